"""The callbacks of the explore page: presets fill the form, the form starts jobs, jobs report.

Exploring again with changes: the form is filled from a job, or from the exploration that is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dash import ALL, ctx, dcc, html, no_update

from tensoropt.cluster import list_clusters, load_cluster
from tensoropt.cluster.local import available_cores
from tensoropt.errors import TensorOptError
from tensoropt.question.compute_dtype import AUTO, dtype_of
from tensoropt.question.model_source import has_sequence
from tensoropt.question.question import Question
from tensoropt.question.settings import settings_fields
from tensoropt.report.commands import explore_line, question_of

from ..context import Context
from ..jobs.fields import CHECKED, MOST_DEVICES, RequestError, count, faults
from ..jobs.fields import words as separated
from ..jobs.manager import JobManager
from ..jobs.refill import Refill, hardware_fields, question_of_job, refill
from ..jobs.request import Hardware, Request, hardware_from, request_from
from ..jobs.uploads import ClusterFile
from ..state import View
from ..views.export import command_folder
from ..views.jobs import clusters, duration, estimate_words, model_words, models
from ..views.planners import refusals
from . import parts
from .parts import note, spoken
from .wiring import Callbacks

CALLBACKS = Callbacks()
FORM = {
    "model": "model", "batch": "batch", "sequence": "sequence", "options": "model-options",
    "dims": "dims", "loss": "loss", "outputs": "outputs",
    "cluster": "cluster", "kind": "kind", "per_node": "per-node", "nodes": "nodes", "inside": "inside",
    "between": "between", "price": "device-price", "also_on": "also-on", "devices": "devices",
    "planners": "planners", "seed": "seed",
    **{setting.key: setting.flag for setting in settings_fields()},
}  # fmt: skip
"""Field of the form -> id of its control."""


_BESIDE = ("kind", "per_node", "nodes", "inside", "between", "price")
"""The fields that the choice of a cluster fills."""
_FILLED = [field for field in FORM if field not in _BESIDE]
"""The fields that no other callback sets."""


def refill_notice() -> Any:
    """Return the button for the exploration that is shown, and the place that says what the form was filled
    from."""
    return html.Div(
        [
            dcc.Store(id="refilled"),
            parts.button("Fill the form from the exploration above", "refill-shown"),
            spoken("refill-said", tabIndex=-1),
        ],
        className="refill",
    )


def refill_button() -> Any:
    """Return the button to explore again with changes, for pages that show an exploration."""
    return parts.button("explore again with changes", "change-shown")


@CALLBACKS.answer(
    sets=[
        *(f"+{FORM[field]}.value" for field in _FILLED),
        "+cluster.data",
        "refilled.data",
        "refill-said.children",
    ],
    when=[
        ({"job": ALL, "do": "change"}, "n_clicks"),
        "refill-shown.n_clicks",
        "change-shown.n_clicks",
        "fit-asked.data",
    ],
    given="state.data",
    at_start=True,
    jobs=True,
)
def _fill(context: Context, _: Any, __: Any, earlier: Any, asked: Any, state: Any) -> Any:
    """Fill every field with the earlier request; nothing is started."""
    none = (no_update,) * (len(_FILLED) + 2)
    # A button that has just been made fires as well, without a click; where it is the form that has just
    # been made, a click on another page waited for it.
    waited = (earlier or asked) and not ctx.triggered_id
    if not any(t["value"] for t in ctx.triggered) and not waited:
        return *none, no_update
    trigger = ctx.triggered_id
    try:
        if isinstance(trigger, dict):
            origin, form = _of_job(context.manager, str(trigger.get("job")))
        elif asked and (trigger == "fit-asked" or not (trigger or earlier)):
            origin, form = "the page Fit", refill(Question.of(asked["question"]), context.manager.uploads)
        else:
            origin, form = _of_exploration(context, state)
    except TensorOptError as error:
        return *none, note(str(error), "error")
    fields = {**form.fields, "filled": time.time()}
    words = f"Filled from {origin}. Change what should be different, then press Explore."
    if form.said:
        words += f" The form has no field for {', '.join(form.said)}: that is left out."
    return (
        *(fields[field] for field in _FILLED),
        clusters(context.manager.uploads.clusters()),
        fields,
        note(words, "warn" if form.said else "info"),
    )


CALLBACKS.in_browser("tensoropt.refilled", sets="refill-said.title", when="refill-said.children", jobs=True)


def _of_job(jobs: JobManager, id: str) -> tuple[str, Refill]:
    job = jobs.job(id)
    if job is None:
        raise RequestError("this job is not kept any more; fill the form from another one")
    return f"'{job.title}'", refill(question_of_job(job), jobs.uploads, job.line)


def _of_exploration(context: Context, state: Any) -> tuple[str, Refill]:
    view = View.from_data((state or {}).get("view"))
    exploration = context.exploration(view)
    if exploration is None:
        raise RequestError("no exploration is shown; choose one in the list at the top")
    name = context.library.model_name(exploration.model.source)
    entry = context.library.entry(view.exploration)
    line = explore_line(exploration, f"out/{entry.key}", command_folder(entry))
    form = refill(question_of(exploration), context.manager.uploads, line)
    return f"{name} on {exploration.cluster['name']}", form


_CLUSTER = ("cluster", *_BESIDE)
"""The fields that say what the cluster is."""


@CALLBACKS.answer(
    jobs=True,
    sets=[*(f"{FORM[n]}.value" for n in _BESIDE), *(f"{FORM[n]}.disabled" for n in _BESIDE)],
    when="cluster.value refilled.data",
    at_start=True,
)
def _preset(context: Context, name: Any, refilled: Any) -> Any:
    """Fill the fields from a preset or a file; those of a preset may then be edited."""
    uploaded = context.manager.uploads.clusters()
    if name != "local" and name not in list_clusters() and name not in uploaded:
        return (no_update,) * 2 * len(_BESIDE)
    if name == "local":
        hardware: Any = Hardware("local", "CPU", len(available_cores()), 1, "", "")
    else:
        hardware = uploaded[name] if name in uploaded else Hardware.of(name)
    values = hardware_fields(hardware)
    # A form that was filled from a job sets a cluster and the changes to it at the same time.
    if "refilled.data" in ctx.triggered_prop_ids and isinstance(refilled, dict):
        values = {field: refilled.get(field) for field in _BESIDE}
    fixed = {field: name in uploaded or (name == "local" and field != "per_node") for field in _BESIDE}
    return *(values[field] for field in _BESIDE), *(fixed[field] for field in _BESIDE)


@CALLBACKS.answer(
    jobs=True,
    sets=[f"{FORM[name]}.error" for name in CHECKED],
    when=[*(f"{FORM[name]}.value" for name in CHECKED), "model.value"],
    at_start=True,
)
def _check(context: Context, *values: Any) -> Any:
    """Return the rule that the typed text breaks, to be shown next to it."""
    form = dict(zip((*CHECKED, "model"), values, strict=True))
    # Sizes that have fields of their own are checked there.
    own = context.manager.uploads.open_dims(str(form["model"]))
    form["dims"] = ", ".join(w for w in separated(form["dims"]) if w.rpartition("=")[0] not in own)
    rules = faults(form)
    return tuple(rules[name] or None for name in CHECKED)


_FIRST = ("model", "batch", "sequence", "loss", "cluster", "dims")
"""The fields that stand before the others, and the sizes that have fields there."""
_MORE = [field for field in FORM if field not in _FIRST]


@CALLBACKS.answer(
    jobs=True,
    sets="more.open",
    when=[f"{FORM[field]}.value" for field in _MORE],
    given="model.value cluster.value",
)
def _open(context: Context, *values: Any) -> Any:
    """Open the other fields where something in them is not as usual, or wrong."""
    form = dict(zip((*_MORE, "model", "cluster"), values, strict=True))
    usual = {setting.key: setting.in_form(setting.default) for setting in settings_fields()}
    name, uploaded = form["cluster"], context.manager.uploads.clusters()
    if name in list_clusters():
        usual |= hardware_fields(Hardware.of(name))
    elif name in uploaded:
        usual |= hardware_fields(uploaded[name])
    else:
        usual |= {field: form[field] for field in _BESIDE}
    chosen = any((form[field] or "") != (usual.get(field) or "") for field in _MORE if form[field] != [])
    return True if chosen or any(faults(form)[field] for field in CHECKED if field in _MORE) else no_update


@CALLBACKS.answer(
    jobs=True,
    sets="cluster-said.children",
    when=[*(f"{FORM[n]}.value" for n in _CLUSTER), "model.value", "dtype.value"],
    at_start=True,
)
def _say(context: Context, *values: Any) -> Any:
    """Say what the fields amount to, or what is wrong with them."""
    form = dict(zip((*_CLUSTER, "model", "dtype"), values, strict=True))
    try:
        hardware = hardware_from(form, context.manager.uploads.clusters())
        why = ""
        if form["dtype"] == AUTO:
            why = dtype_of(str(form["model"]), [load_cluster(hardware.asked())])[1]
        computes = f" The model {why}." if why else ""
        if isinstance(hardware, ClusterFile):
            return hardware.words + computes
        if hardware.is_local:
            cores = len(available_cores())
            words = f"{hardware.per_node} ranks, measured here ({cores} cores); nothing else runs meanwhile."
            if hardware.per_node > cores:
                words += " More ranks than cores: their times say little about a real cluster."
            return words
        return f"{hardware.per_node * hardware.nodes} × {hardware.kind}, priced from data sheets.{computes}"
    except TensorOptError as error:
        # What is wrong with a field is said next to it.
        marked = any(faults(form)[field] for field in ("per_node", "nodes", "price"))
        return "" if marked else note(str(error), "warn")


@CALLBACKS.answer(
    jobs=True,
    sets="planners.data planners.value",
    when="per-node.value nodes.value mode.value",
    given="planners.value",
    at_start=True,
)
def _offer(context: Context, per_node: Any, nodes: Any, mode: Any, chosen: Any) -> Any:
    """Let planners that will refuse this cluster or mode say why before anything is started."""
    try:
        devices = count(per_node, "", MOST_DEVICES) * count(nodes, "", MOST_DEVICES)
    except RequestError:
        return no_update, no_update
    return parts.offered(refusals(devices, training=mode != "inference"), chosen)


@CALLBACKS.answer(
    jobs=True,
    sets="model-said.children model-options.description zoo-fields.style onnx-fields.style "
    "sequence-place.style +sequence.value",
    when="model.value",
    at_start=True,
)
def _describe(context: Context, name: Any) -> Any:
    """Describe the chosen model, and show the fields that are for its kind."""
    (words, options), sequence = model_words(str(name)), has_sequence(str(name))
    return (
        words, options, parts.visible(bool(words)), parts.visible(not words), parts.visible(sequence),
        no_update if sequence else "",
    )  # fmt: skip


@CALLBACKS.answer(
    jobs=True, sets="open-dims.children", when="model.value refilled.data", given="dims.value", at_start=True
)
def _open_dims(context: Context, model: Any, _: Any, dims: Any) -> Any:
    """Return a field for each size that an uploaded file leaves open."""
    known = dict(word.rpartition("=")[::2] for word in separated(dims))
    return [
        parts.number_field({"dim": name}, name, value=known.get(name, ""), placeholder="a size", w=120)
        for name in context.manager.uploads.open_dims(str(model))
    ]


@CALLBACKS.answer(
    jobs=True,
    sets=[({"dim": ALL}, "error"), "+dims.value"],
    when=[({"dim": ALL}, "value")],
    given=[({"dim": ALL}, "id"), "dims.value"],
)
def _sized(context: Context, values: Any, ids: Any, dims: Any) -> Any:
    """Write the sizes of open dims where all sizes stand; say what is none beside it."""
    sizes = {id["dim"]: str(value or "").strip() for id, value in zip(ids, values, strict=True)}
    rules = [
        faults({"dims": f"{name}={size}"})["dims"] or None if size else None for name, size in sizes.items()
    ]
    others = [word for word in separated(dims) if word.rpartition("=")[0] not in sizes]
    text = ", ".join([*others, *(f"{name}={size}" for name, size in sizes.items() if size)])
    return rules, text if ids and text != dims else no_update


@CALLBACKS.answer(
    jobs=True,
    sets="model.data model.value upload-said.children",
    when="upload.contents",
    given="upload.filename",
)
def _upload(context: Context, contents: Any, name: Any) -> Any:
    uploads = context.manager.uploads
    token, said = _kept(uploads.keep, contents, name)
    if said is not None:
        return no_update, no_update, said
    files = uploads.known()
    dims = uploads.open_dims(token)
    sizes = f"give the size of {' and '.join(dims)} below" if dims else "all its sizes are known"
    return models(files), token, note(f"{files[token][1]} is here; {sizes}.")


@CALLBACKS.answer(
    jobs=True,
    sets="cluster.data cluster.value cluster-upload-said.children",
    when="cluster-upload.contents",
    given="cluster-upload.filename",
)
def _upload_cluster(context: Context, contents: Any, name: Any) -> Any:
    """Read a cluster file at once, and show next to the field what is wrong with it."""
    uploads = context.manager.uploads
    token, said = _kept(uploads.keep_cluster, contents, name)
    if said is not None:
        return no_update, no_update, said
    files = uploads.clusters()
    return clusters(files), token, note(f"{files[token].label} is here: {files[token].words}")


def _kept(keep: Callable[[Any, Any], str], contents: Any, name: Any) -> tuple[str, Any]:
    """Return (the token of an uploaded file, None), or ("", what to say instead)."""
    if contents is None:
        return "", no_update
    try:
        return keep(contents, name), None
    except TensorOptError as error:
        return "", note(str(error), "error")


@CALLBACKS.answer(
    jobs=True, sets="estimate.children", when=[f"{control}.value" for control in FORM.values()], at_start=True
)
def _estimate(context: Context, *values: Any) -> Any:
    """Say how long it will take, before it is started; nothing for a form that cannot be started."""
    try:
        return estimate_words(context.manager.estimate(_request(context, values)))
    except TensorOptError:
        return ""


def _request(context: Context, values: tuple[Any, ...]) -> Request:
    form, uploads = dict(zip(FORM, values, strict=True)), context.manager.uploads
    request = request_from(form, uploads.known(), uploads.clusters())
    if left := [name for name in uploads.open_dims(form["model"]) if name not in request.question.dims]:
        raise RequestError(f"the file leaves {' and '.join(left)} open; give the size")
    return request


@CALLBACKS.answer(
    jobs=True,
    sets="start-said.children",
    when="start.n_clicks",
    given=[f"{control}.value" for control in FORM.values()],
)
def _start(context: Context, clicks: Any, *values: Any) -> Any:
    if not clicks:
        return no_update
    try:
        job = context.manager.submit(_request(context, values))
    except TensorOptError as error:
        # What is wrong with a field is said next to it.
        wrong = any(faults(dict(zip(FORM, values, strict=True))).values())
        return note("Not started: correct the marked fields." if wrong else str(error), "error")
    words = f"{job.title}: {'started' if job.state == 'running' else 'waits for its turn'}. "
    if (took := context.manager.took(job)) is not None:
        words += f"The same took {duration(took)} last time. "
    # On a narrow screen the list stands below the form. The words leave with what they are about.
    link = html.A("Show it", href=f"#job-{job.id}")
    return html.Div([words, link], className="note note-info", role="status")


CALLBACKS.in_browser(
    "tensoropt.cleared",
    sets="+start-said.children",
    when=[*(f"{control}.value" for control in FORM.values()), "finished.data"],
    jobs=True,
)
