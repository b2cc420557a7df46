"""The explore page: a model, a cluster, options, and the jobs that were started."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import Dash, dcc, html

from tensoropt.cluster import list_devices, list_links
from tensoropt.plan.settings import Setting, settings_fields
from tensoropt.units import read_number, read_whole

from ..context import Context
from ..jobs.clusters import ENDINGS, MOST_BYTES
from ..jobs.fields import PIN
from ..jobs.manager import JobManager
from ..jobs.request import LOSSES
from ..safety import MAX_UPLOAD_BYTES
from ..views.jobs import clusters, models, presets
from . import explore_callbacks, job_list, refill
from .parts import CLEAR, aria, number_field, panel, planner_choice, upload_rule

COMMAND_LINE = "tensoropt explore train.py:build --cluster dgx-h100 --out out/mine"


def layout(context: Context) -> Any:
    if context.jobs is None:
        form: Any = panel(html.P("This dashboard only shows explorations; it was started without jobs."))
    else:
        form = html.Div(
            [_model(context.jobs), _cluster(context.jobs), _options(), _start()], className="stack"
        )
    return html.Div(
        [
            html.H1("Explore", className="unseen"),
            html.Div(
                [
                    form,
                    html.Div(
                        [panel(desktop_notice(), job_list.layout(), title="Jobs")],
                        className="stack jobs-column",
                    ),
                ],
                className="explore-columns",
            ),
        ]
    )


def _model(jobs: JobManager) -> Any:
    return panel(
        refill.layout(),
        dmc.Select(
            id="model", label="Model", data=models(jobs.uploads.known()), value="zoo:gpt2-tiny",
            searchable=True, clearSearchOnFocus=True, allowDeselect=False,
            nothingFoundMessage="no model by that name",
        ),
        html.P(id="model-said", className="hint"),
        html.Div(
            dcc.Upload(
                html.Div(["Drop an ONNX file here, or ", html.Span("choose one", className="linklike")]),
                id="upload", className="upload", max_size=MAX_UPLOAD_BYTES, min_size=1, multiple=False,
                accept=".onnx",
            ),
            id="upload-place",
            **upload_rule("upload-said", (".onnx",), MAX_UPLOAD_BYTES, "export the model again"),
        ),
        html.Div(id="upload-said", **aria(live="polite")),
        html.Div(
            number_field("batch", "Batch", placeholder="the model's own", w=180),
            id="zoo-fields",
            className="fields",
        ),
        html.Div(
            [
                html.Div(
                    [
                        dmc.TextInput(id="dims", label="Open dims", placeholder="batch=8, length=128", w=200),
                        dmc.Select(id="loss", label="Loss", data=list(LOSSES), value="auto",
                                   allowDeselect=False, w=150),
                        dmc.TextInput(id="outputs", label="Only up to these tensors", w=210,
                                      placeholder="all outputs"),
                    ],
                    className="row fields",
                ),
                html.P(
                    "A file may leave sizes open (name=size) or fix them (input[0]=size replaces one). "
                    "It has no loss: auto takes cross entropy where an output is called logits, else the "
                    "squared error.",
                    className="hint",
                ),
            ],
            id="onnx-fields",
        ),
        html.P(
            ["A Python model is named on the command line, never here: ", html.Code(COMMAND_LINE)],
            className="hint",
        ),
        title="Model",
    )  # fmt: skip


def _cluster(jobs: JobManager) -> Any:
    links = list(list_links())
    return panel(
        dmc.Select(
            id="cluster", label="Preset, or a file of yours", value="dgx-h100", allowDeselect=False,
            searchable=True, clearSearchOnFocus=True, data=clusters(jobs.uploads.clusters()),
            nothingFoundMessage="no cluster by that name",
        ),
        html.Div(
            dcc.Upload(
                html.Div(
                    ["Drop a cluster file (YAML) here, or ", html.Span("choose one", className="linklike")]
                ),
                id="cluster-upload", className="upload", max_size=MOST_BYTES, min_size=1, multiple=False,
                accept=",".join(ENDINGS),
            ),
            id="cluster-upload-place",
            **upload_rule("cluster-upload-said", ENDINGS, MOST_BYTES, "write the cluster into it"),
        ),
        html.Div(id="cluster-upload-said", **aria(live="polite")),
        html.Div(
            [
                dmc.Select(
                    id="kind", label="Device", data=list(list_devices()), searchable=True, w=170,
                    clearSearchOnFocus=True, allowDeselect=False,
                ),
                number_field("per-node", "per node", value="8", w=100),
                number_field("nodes", "Nodes", value="1", w=90),
            ],
            className="row fields",
        ),
        html.Div(
            [
                dmc.Select(id="inside", label="Link in a node", data=links, clearable=True, w=170,
                           clearButtonProps=CLEAR),
                dmc.Select(id="between", label="between nodes", data=links, clearable=True, w=170,
                           clearButtonProps=CLEAR),
                number_field("device-price", "Price per device-hour", placeholder="unknown", w=170),
            ],
            className="row fields",
        ),
        html.Div(id="cluster-said", className="hint"),
        dmc.MultiSelect(
            id="also-on", label="Also on", data=presets(), value=[], clearable=True, clearButtonProps=CLEAR,
            searchable=True, hidePickedOptions=True, placeholder="no further cluster",
            description="The page Clusters then says which is the cheapest, and which the fastest.",
        ),
        title="Cluster",
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
        control = number_field(setting.flag, value=value, placeholder=setting.none, **more)
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
        number_field("seed", "Seed", placeholder="0", w=90),
    ]
    constraints = next(setting for setting in settings_fields() if setting.name == "constraints")
    return panel(
        *(html.Div(controls, className="row fields") for controls in [*groups.values(), run]),
        html.Div(planner_choice("planners", "Published planners beside it"), className="fields"),
        html.Details(
            [
                html.Summary("constraints"),
                dmc.Textarea(
                    id="constraints",
                    autosize=True,
                    minRows=3,
                    maxRows=12,
                    placeholder=PIN,
                    description=f"{constraints.help} (here JSON)",
                    **aria(label="Constraints"),
                ),
            ]
        ),
        title="Options",
    )


def desktop_notice() -> Any:
    """Return the button that asks the browser for notices (``assets/notify.js``), with the outcome."""
    return html.Div(
        [
            html.Button("Notify me when a job ends", id="notify", type="button", className="plain-button"),
            html.Span(id="notify-said", role="status", className="muted small"),
        ],
        className="row tight notify",
    )


def _start() -> Any:
    return html.Div(
        [
            dmc.Button("Explore", id="start", size="md"),
            html.Div(id="estimate", className="muted small"),
            html.Div(id="start-said", className="grow", **aria(live="polite")),
        ],
        className="row start-bar",
    )


def register(app: Dash, context: Context) -> None:
    explore_callbacks.register(app, context)
