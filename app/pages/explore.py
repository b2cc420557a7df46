"""The explore page: a model, a cluster, options, and the jobs that were started."""

from __future__ import annotations

from typing import Any, cast

import dash_mantine_components as dmc
from dash import Dash, dcc, html

from tensoropt.cluster import list_clusters, list_devices, list_links

from ..context import Context
from ..jobs.manager import JobManager
from ..safety import MAX_UPLOAD_BYTES
from ..views.jobs import models
from . import explore_callbacks
from .parts import panel

CLEAR: Any = {"aria-label": "clear"}
COMMAND_LINE = "tensoropt explore train.py:build --cluster dgx-h100 --out out/mine"


def layout(context: Context) -> Any:
    if context.jobs is None:
        form: Any = panel(html.P("This dashboard only shows explorations; it was started without jobs."))
    else:
        form = html.Div([_model(context.jobs), _cluster(), _options(), _start()], className="stack")
    return html.Div(
        [
            html.H1("Explore", className="unseen"),
            dcc.Interval(id="tick", interval=1000),
            html.Div(
                [form, html.Div([panel(html.Div(id="jobs"), title="Jobs")], className="stack")],
                className="explore-columns",
            ),
        ]
    )


def _model(jobs: JobManager) -> Any:
    return panel(
        dmc.Select(
            id="model", label="Model", data=models(jobs.uploads.known()), value="zoo:gpt2-tiny",
            searchable=True, allowDeselect=False, nothingFoundMessage="no model by that name",
        ),
        dcc.Upload(
            html.Div(["Drop an ONNX file here, or ", html.Span("choose one", className="linklike")]),
            id="upload", className="upload", max_size=MAX_UPLOAD_BYTES, multiple=False, accept=".onnx",
        ),
        html.Div(id="upload-said", **cast(Any, {"aria-live": "polite"})),
        html.Div(
            [
                dmc.NumberInput(id="batch", label="Batch", min=1, placeholder="the model's own", w=150),
                dmc.TextInput(id="dims", label="Open dims of an ONNX file", placeholder="batch=8", w=200),
            ],
            className="row fields",
        ),
        html.P(
            ["A Python model is named on the command line, never here: ", html.Code(COMMAND_LINE)],
            className="hint",
        ),
        title="Model",
    )  # fmt: skip


def _cluster() -> Any:
    links = list(list_links())
    names = [n for n in list_clusters() if not n.endswith("xN")]
    return panel(
        dmc.Select(
            id="cluster", label="Preset", value="dgx-h100", allowDeselect=False, searchable=True,
            data=[
                {"group": "Here", "items": [{"value": "local", "label": "local: CPU ranks of this machine"}]},
                {"group": "Presets", "items": [{"value": n, "label": n} for n in names]},
            ],
        ),
        html.Div(
            [
                dmc.Select(
                    id="kind", label="Device", data=list(list_devices()), searchable=True, w=170,
                    allowDeselect=False,
                ),
                dmc.NumberInput(id="per-node", label="per node", min=1, value=8, w=100),
                dmc.NumberInput(id="nodes", label="Nodes", min=1, value=1, w=90),
            ],
            className="row fields",
        ),
        html.Div(
            [
                dmc.Select(id="inside", label="Link in a node", data=links, clearable=True, w=170,
                           clearButtonProps=CLEAR),
                dmc.Select(id="between", label="between nodes", data=links, clearable=True, w=170,
                           clearButtonProps=CLEAR),
                dmc.NumberInput(
                    id="device-price", label="Price per device-hour", min=0, placeholder="unknown", w=170,
                    decimalScale=4,
                ),
            ],
            className="row fields",
        ),
        html.Div(id="cluster-said", className="hint"),
        title="Cluster",
    )  # fmt: skip


def _options() -> Any:
    return panel(
        html.Div(
            [
                dmc.Select(
                    id="mode", label="Mode", value="train", data=["train", "inference"], w=120,
                    allowDeselect=False,
                ),
                dmc.Select(
                    id="optimizer", label="Optimizer", value="adam", data=["adam", "momentum", "sgd"], w=130,
                    allowDeselect=False,
                ),
                dmc.TextInput(id="micro", label="Micro-batches", value="auto", w=130),
                dmc.NumberInput(id="epsilon", label="Allowed gap, %", value=0.1, min=0, step=0.1, w=130),
                dmc.NumberInput(id="max-points", label="Points kept", min=2, placeholder="all", w=120),
            ],
            className="row fields",
        ),
        title="Options",
    )  # fmt: skip


def _start() -> Any:
    return html.Div(
        [
            dmc.Button("Explore", id="start", size="md"),
            html.Div(id="start-said", className="grow", **cast(Any, {"aria-live": "polite"})),
        ],
        className="row",
    )


def register(app: Dash, context: Context) -> None:
    explore_callbacks.register(app, context)
