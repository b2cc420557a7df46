"""The page *Plan it*: a form for model and devices, and the list of searches."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl

import dash_mantine_components as dmc
from dash import dcc, html, no_update

from tensoropt.cluster import load_cluster
from tensoropt.errors import TensorOptError
from tensoropt.plan.facts_table import Fact
from tensoropt.question.question import Question
from tensoropt.question.settings import settings_fields
from tensoropt.report.commands import cluster_is_named, question_of
from tensoropt.units import format_bytes

from ..context import Context
from ..jobs.record import Job
from ..jobs.request import DTYPES, FIELDS, OPTIONS, RequestError, cluster_of, form_of, request_from
from ..safety import MAX_UPLOAD_BYTES
from ..views.jobs import clusters, duration, estimate_words, model_words, models
from . import job_list, parts
from .parts import note
from .wiring import Callbacks

CALLBACKS = Callbacks(job_list.CALLBACKS)
_FIRST = {"model": "llama3-8b", "devices": "rtx-4090x2", "batch": "16", "sequence": "2048"}
"""The form's initial values."""


def layout(context: Context) -> Any:
    if context.jobs is None:
        return parts.panel(html.P("This dashboard only shows explorations; it was started without jobs."))
    jobs = parts.panel(job_list.layout(), title="Searches", names="jobs-panel")
    return html.Div(
        [html.H1("Plan it", className="unseen"), html.Div([_form(context), jobs], className="new-columns")]
    )


def _form(context: Context) -> Any:
    uploads = context.manager.uploads
    return parts.panel(
        *parts.stores("typed"),
        parts.spoken("filled-said"),
        dmc.Autocomplete(
            id="model", label="Model", value=_FIRST["model"], data=models(uploads.known()),
            description="from the list, ORGANISATION/MODEL from the Hugging Face Hub, or a file"
            + (f"; or file.py:function below {uploads.own} here" if uploads.own else ""),
        ),
        parts.hint(id="model-said"),
        dmc.Autocomplete(
            id="devices", label="Devices", value=_FIRST["devices"], data=clusters(uploads.clusters()),
            description="a preset, also dgx-h100x4 or dgx-h100[2]; 8xRTX-4090; or a file",
        ),
        parts.hint(id="devices-said"),
        parts.row(
            # Mantine's NumberInput would drop letters: 1e9 became 19.
            dmc.TextInput(id="batch", label="Batch, samples", value=_FIRST["batch"],
                          placeholder="8; 8,16; auto", w=118),
            dmc.TextInput(id="sequence", label="Sequence, tokens", value=_FIRST["sequence"],
                          placeholder="the model's", w=132),
            dmc.Select(id="dtype", label="Computes in", data=list(DTYPES), value=DTYPES[0],
                       allowDeselect=False, w=112),
            names="fields",
        ),
        dmc.TextInput(
            id="more", label="More options", placeholder="--micro-batches 1,2 --max-points 100",
            description="written as on the command line",
        ),
        html.Details(
            [
                html.Summary("Which options there are"),
                parts.facts(Fact(f"--{s.flag}", s.help) for s in settings_fields() if s.flag in OPTIONS),
                parts.hint("Also: ", ", ".join(f"--{name}" for name in OPTIONS if name in _OTHERS)),
            ]
        ),
        _drop_zone(),
        parts.spoken("upload-said"),
        parts.row(
            dmc.Button("Plan it", id="start", size="md"),
            html.Div(id="estimate", className="muted small grow"),
            names="start-bar",
        ),
        parts.spoken("start-said"),
    )  # fmt: skip


def _drop_zone() -> html.Div:
    """Return the area on which files are dropped; the browser explains refusals (``assets/upload.js``)."""
    words = "Drop a model (ONNX, config.json) or devices (YAML, JSON) here, or "
    endings = ".onnx,.json,.yaml,.yml"
    rule: Any = {
        "data-said": "upload-said", "data-endings": endings, "data-most-bytes": str(MAX_UPLOAD_BYTES),
        "data-remedy": "export or write it again", "data-larger": "Use the command line",
    }  # fmt: skip
    return html.Div(
        dcc.Upload(
            html.Div([words, html.Span("choose one", className="linklike")]), id="upload", className="upload",
            max_size=MAX_UPLOAD_BYTES, min_size=1, multiple=False, accept=endings,
        ),
        id="upload-place", **rule,
    )  # fmt: skip


_OTHERS = ("seed", "planners", "devices", "also-on", "dim", "output", "loss", "headroom", "lora")


@CALLBACKS.answer(
    jobs=True,
    sets=[*(f"+{name}.value" for name in FIELDS), "model.data", "devices.data", "filled-said.children"],
    when="url.search made.data",
    given="page.data",
    at_start=True,
)
def _fill(context: Context, search: Any, made: Any, page: Any) -> Any:
    """Fill the form from the job or exploration that the address names, without starting anything."""
    asked = dict(parse_qsl(str(search or "").lstrip("?"))) if page == "new" else {}
    origin, uploads = asked.get("from", ""), context.manager.uploads
    none = (no_update,) * (len(FIELDS) + 2)
    if not origin or "new" not in (made or []):
        return *none, no_update
    try:
        title, fields, left_out = earlier(context, origin)
    except TensorOptError as error:
        return *none, note(str(error), "error")
    fields |= {name: asked[name] for name in ("batch", "devices") if name in asked}
    words = f"Filled from {title}. Change it as needed, then press Plan it."
    if left_out:
        words += f" {', '.join(left_out)}: left out, as only the command line has them."
    said = note(words, "warn" if left_out else "info")
    values = (fields[name] for name in FIELDS)
    return *values, models(uploads.known()), clusters(uploads.clusters()), said


def earlier(context: Context, origin: str) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Return (title, the form's fields, options that the form lacks) of an earlier job or exploration.

    Raises:
        TensorOptError: there is no such job or exploration, or the form cannot express it.
    """
    uploads = context.manager.uploads
    job = context.manager.job(origin.removeprefix("job-"))
    if job is not None and job.question:
        return f"'{job.title}'", *form_of(Question.of(job.question), uploads)
    exploration = context.library.load(origin)
    name = str(exploration.cluster["name"]) if cluster_is_named(exploration) else ""
    title = context.library.model_name(exploration.model.source)
    fields, left_out = form_of(question_of(exploration), uploads, name)
    return f"{title} on {exploration.cluster['name']}", fields, left_out


_SAID = (
    *(f"{name}.error" for name in FIELDS if name != "dtype"),
    *("model-said.children", "devices-said.children", "estimate.children"),
)


CALLBACKS.in_browser(
    "tensoropt.typed", sets="typed.data", when=[f"{name}.value" for name in FIELDS], at_start=True, jobs=True
)


@CALLBACKS.answer(jobs=True, sets=_SAID, when="typed.data")
def _look(context: Context, values: Any) -> Any:
    """Show faults of the fields' values, and the expected duration, when typing pauses. Fields report every
    typed letter at once, so that a click on the button submits the whole text."""
    form, uploads = dict(zip(FIELDS, values, strict=True)), context.manager.uploads
    errors: dict[str, str | None] = dict.fromkeys(FIELDS)
    estimate, devices = "", ""
    try:
        request = request_from(form, uploads)
        estimate = estimate_words(context.manager.estimate(request))
    except RequestError as error:
        errors[error.field] = str(error)
    with suppress(RequestError):  # shown at its field
        cluster = load_cluster(cluster_of(str(form["devices"] or "").strip(), uploads))
        devices = f"{cluster.counts}, {format_bytes(cluster.memory_bytes)} each."
    words = model_words(str(form["model"] or "").removeprefix("zoo:").partition("?")[0])
    if dims := uploads.open_dims(str(form["model"])):
        words = f"The file leaves {', '.join(dims)} open; give sizes in more options: --dim {dims[0]}=8"
    return (
        *(errors[name] for name in FIELDS if name != "dtype"), words, devices, estimate,
    )  # fmt: skip


@CALLBACKS.answer(
    jobs=True,
    sets="+model.data +devices.data +model.value +devices.value upload-said.children",
    when="upload.contents",
    given="upload.filename",
)
def _upload(context: Context, contents: Any, name: Any) -> Any:
    if contents is None:
        return (no_update,) * 5
    uploads = context.manager.uploads
    try:
        field, label = uploads.keep_any(contents, name)
    except TensorOptError as error:
        return *(no_update,) * 4, note(str(error), "error")
    values = (label if field == wanted else no_update for wanted in ("model", "devices"))
    return models(uploads.known()), clusters(uploads.clusters()), *values, note(f"{label} is uploaded.")


@CALLBACKS.answer(
    jobs=True, sets="start-said.children", when="start.n_clicks", given=[f"{name}.value" for name in FIELDS]
)
def _start(context: Context, clicks: Any, *values: Any) -> Any:
    if not clicks:
        return no_update
    uploads = context.manager.uploads
    try:
        request = request_from(dict(zip(FIELDS, values, strict=True)), uploads)
        missing = [dim for dim in uploads.open_dims(request.label) if dim not in request.question.dims]
        if missing:
            raise RequestError("more", f"give sizes in more options: --dim {missing[0]}=8")
        job = context.manager.submit(request)
    except TensorOptError as error:
        return note(f"Not started: {error}", "error")
    # On a narrow screen the list is below the form.
    return started(context, job, html.A("Show it", href=f"#job-{job.id}"))


def started(context: Context, job: Job, link: Any) -> Any:
    """Return a sentence that a job started or waits, with a link to it."""
    words = f"{job.title}: {'started' if job.state == 'running' else 'waits for its turn'}. "
    if (took := context.manager.took(job)) is not None:
        words += f"The same took {duration(took)} last time; saved results are reused. "
    return html.Div([words, link], className="note note-info", role="status")
