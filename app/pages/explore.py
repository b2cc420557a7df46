"""The explore page: a model, a cluster, options, and the jobs that were started."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import html

from tensoropt.cluster import list_devices, list_links
from tensoropt.question.settings import SEARCH, Setting, settings_fields
from tensoropt.units import read_number, read_whole

from ..context import Context
from ..jobs.fields import PIN
from ..jobs.manager import JobManager
from ..jobs.request import LOSSES
from ..jobs.uploads import ENDINGS, MOST_BYTES
from ..safety import MAX_UPLOAD_BYTES
from ..views.jobs import clusters, models, presets
from . import explore_callbacks, job_list, parts
from .wiring import Callbacks

CALLBACKS = Callbacks(job_list.CALLBACKS, explore_callbacks.CALLBACKS)

MODEL, CLUSTER = "zoo:resnet50", "rtx-4090"
"""What the form begins with: explored in half a minute, and the fastest plan needs twice as much as the
leanest, a quarter of a card."""
_COMMAND_LINE = "tensoropt explore train.py:build --cluster dgx-h100 --out out/mine"


_SEARCHED: Any = {"searchable": True, "clearSearchOnFocus": True, "allowDeselect": False}
"""The attributes of a select of many things, one of which is chosen."""
_CLEARED: Any = {"clearable": True, "clearButtonProps": parts.CLEAR}
"""The attributes of a select that may be empty."""


def layout(context: Context) -> Any:
    if context.jobs is None:
        form: Any = parts.panel(
            html.P("This dashboard only shows explorations; it was started without jobs.")
        )
    else:
        form = parts.stack(_model(context.jobs), _cluster(context.jobs), _more(), _start())
    jobs = parts.stack(parts.panel(_desktop_notice(), job_list.layout(), title="Jobs"), names="jobs-column")
    heading = parts.heading("Explore", "Pick a model and a cluster: the best ways of splitting it are found.")
    return html.Div([heading, html.Div([form, jobs], className="explore-columns")])


def _model(jobs: JobManager) -> Any:
    return parts.panel(
        explore_callbacks.refill_notice(),
        dmc.Select(
            id="model", label="Model", data=models(jobs.uploads.known()), value=MODEL, **_SEARCHED,
            nothingFoundMessage="no model by that name",
        ),
        parts.hint(id="model-said"),
        parts.upload(
            "upload", "upload-place", "an ONNX file", (".onnx",), MAX_UPLOAD_BYTES,
            said="upload-said", remedy="export the model again",
        ),
        parts.spoken("upload-said"),
        html.Div(
            [
                parts.row(
                    parts.number_field("batch", "Batch", placeholder="8; 8,16; auto", w=150),
                    html.Div(
                        parts.number_field("sequence", "Sequence, tokens", placeholder="the model's", w=150),
                        id="sequence-place",
                    ),
                    names="fields",
                ),
                parts.hint(
                    "Empty is the model's own. Several, as in 8,16, are explored in turn; auto tries larger "
                    "ones, up to the largest that fits."
                ),
            ],
            id="zoo-fields",
            className="fields",
        ),
        html.Div(
            [
                parts.row(
                    html.Div(id="open-dims", className="row fields"),
                    dmc.Select(id="loss", label="Loss", data=list(LOSSES), value="auto",
                               allowDeselect=False, w=150),
                    names="fields",
                ),
                parts.hint(
                    "The file has no loss: auto takes cross entropy where an output is called logits, else "
                    "the squared error."
                ),
            ],
            id="onnx-fields",
        ),
        title="Model",
    )  # fmt: skip


def _cluster(jobs: JobManager) -> Any:
    return parts.panel(
        dmc.Select(
            id="cluster", label="Preset, or a file of yours", value=CLUSTER, **_SEARCHED,
            data=clusters(jobs.uploads.clusters()), nothingFoundMessage="no cluster by that name",
        ),
        parts.upload(
            "cluster-upload", "cluster-upload-place", "a cluster file (YAML)", ENDINGS, MOST_BYTES,
            said="cluster-upload-said", remedy="write the cluster into it",
        ),
        parts.spoken("cluster-upload-said"),
        html.Div(id="cluster-said", className="hint"),
        title="Cluster",
    )  # fmt: skip


def _more() -> Any:
    """Return what a first exploration can leave as it is, closed until something in it is set or wrong."""
    summary = html.Summary("More: devices, links and price, precision, memory, planners, constraints")
    body = parts.stack(_edited(), _options())
    return html.Details([summary, body], id="more", className="panel more")


def _edited() -> Any:
    links = list(list_links())
    return html.Div(
        [html.H3("Model and cluster"),
        parts.row(
            dmc.TextInput(
                id="model-options", label="Model options", placeholder="layers=24&dropout=0.1", w=330
            ),
            dmc.TextInput(id="dims", label="Sizes of an ONNX file", placeholder="batch=8, x[0]=4", w=200),
            dmc.TextInput(id="outputs", label="Only up to these tensors", w=210, placeholder="all outputs"),
            names="fields",
        ),
        parts.row(
            dmc.Select(id="kind", label="Device", data=list(list_devices()), w=170, **_SEARCHED),
            parts.number_field("per-node", "per node", value="4", w=100),
            parts.number_field("nodes", "Nodes", value="1", w=90),
            names="fields",
        ),
        parts.row(
            *(
                dmc.Select(id=name, label=label, data=links, w=170, **_CLEARED)
                for name, label in (("inside", "Link in a node"), ("between", "between nodes"))
            ),
            parts.number_field("device-price", "Price per device-hour", placeholder="unknown", w=170),
            names="fields",
        ),
        dmc.MultiSelect(
            id="also-on", label="Also on", data=presets(), value=[], searchable=True, hidePickedOptions=True,
            placeholder="no further cluster", **_CLEARED,
            description="Each has a frontier of its own.",
        ),
        parts.hint("A Python model is named on the command line, never here: ", html.Code(_COMMAND_LINE))],
    )  # fmt: skip


def _control(setting: Setting) -> Any:
    """Return the control for a setting; its meaning is shown when one points at it."""
    value = setting.in_form(setting.default)
    more: dict[str, Any] = {"label": setting.form_label, "w": setting.width}
    if setting.offered:
        control = dmc.Select(
            id=setting.flag, value=value, data=list(setting.offered), allowDeselect=False, **more
        )
    elif setting.read in (read_number, read_whole):
        control = parts.number_field(setting.flag, value=value, placeholder=setting.none, **more)
    else:
        control = dmc.TextInput(id=setting.flag, value=value, placeholder=setting.none, **more)
    return html.Div(control, title=setting.help)


def _options() -> Any:
    groups: dict[str, list[Any]] = {}
    for setting in settings_fields():
        if setting.name != "constraints":
            groups.setdefault(setting.group, []).append(_control(setting))
    run = [
        dmc.TextInput(id="devices", label="Also on fewer devices", placeholder="auto, or 1,2,4", w=170),
        parts.number_field("seed", "Seed", placeholder="0", w=90),
    ]
    about = next(setting for setting in settings_fields() if setting.name == "constraints").help
    constraints = dmc.Textarea(
        id="constraints", autosize=True, minRows=3, maxRows=12, placeholder=PIN,
        description=about, **parts.aria(label="Constraints"),
    )  # fmt: skip
    groups[SEARCH] += run
    rows = [
        shown
        for title, controls in groups.items()
        for shown in (html.H3(title.capitalize()), parts.row(*controls, names="fields"))
    ]
    planners = parts.planner_choice("planners", "Published planners beside it")
    return html.Div([*rows, html.Div(planners, className="fields"), html.H3("Constraints"), constraints])


def _desktop_notice() -> Any:
    """Return the button that asks the browser for notices (``assets/notify.js``), with the outcome."""
    return parts.row(
        html.Button("Notify me when a job ends", id="notify", type="button", className="plain-button"),
        parts.small("notify-said", role="status"),
        names="tight notify",
    )


def _start() -> Any:
    return parts.row(
        dmc.Button("Explore", id="start", size="md"),
        html.Div(id="estimate", className="muted small"),
        parts.spoken("start-said", className="grow"),
        names="start-bar",
    )
