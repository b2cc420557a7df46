"""What happens on the explore page: presets fill the form, the form starts jobs, jobs report."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, html, no_update

from tensoropt.cluster import list_clusters
from tensoropt.cluster.local import available_cores
from tensoropt.errors import TensorOptError

from ..context import Context
from ..jobs.fields import CHECKS, MOST_DEVICES, RequestError, count, faults
from ..jobs.manager import JobManager
from ..jobs.request import Hardware, hardware_from, request_from
from ..views.jobs import duration, model_words, models
from ..views.planners import refusals
from . import job_list, parts
from .parts import note

FORM = {
    "model": "model", "batch": "batch", "dims": "dims", "cluster": "cluster", "kind": "kind",
    "per_node": "per-node", "nodes": "nodes", "inside": "inside", "between": "between",
    "price": "device-price", "mode": "mode", "optimizer": "optimizer", "dtype": "dtype",
    "recompute": "recompute", "measure": "measure", "micro": "micro", "epsilon": "epsilon",
    "max_points": "max-points", "devices": "devices", "planners": "planners", "loss": "loss",
    "outputs": "outputs", "memory": "memory", "seed": "seed", "constraints": "constraints",
    "also_on": "also-on",
}  # fmt: skip
"""Field of the form -> id of its control."""


def register(app: Dash, context: Context) -> None:
    job_list.register(app, context)
    if context.jobs is not None:
        _register_form(app, context.jobs)


def _register_form(app: Dash, jobs: JobManager) -> None:
    @app.callback(
        *(Output(n, "value") for n in ("kind", "per-node", "nodes", "inside", "between", "device-price")),
        *(Output(n, "disabled") for n in ("kind", "nodes", "inside", "between", "device-price")),
        Input("cluster", "value"),
    )
    def preset(name: Any) -> Any:
        """A preset fills the fields; they may be edited then."""
        if name == "local":
            return None, str(len(available_cores())), "1", None, None, "", *[True] * 5
        if name not in list_clusters():
            return (no_update,) * 11
        found = Hardware.of(name)
        price = "" if found.price is None else f"{found.price:g}"
        links = found.inside or None, found.between or None
        return found.kind, str(found.per_node), str(found.nodes), *links, price, *[False] * 5

    @app.callback(
        *(Output(FORM[name], "error") for name in CHECKS),
        *(Input(FORM[name], "value") for name in CHECKS),
    )
    def check(*values: Any) -> Any:
        """The rule that what was typed breaks, beside it."""
        found = faults(dict(zip(CHECKS, values, strict=True)))
        return tuple(found[name] or None for name in CHECKS)

    @app.callback(Output("cluster-said", "children"), *(Input(FORM[n], "value") for n in _CLUSTER))
    def say(*values: Any) -> Any:
        """What the fields amount to, or what is wrong with them."""
        try:
            found = hardware_from(dict(zip(_CLUSTER, values, strict=True)))
            if found.is_local:
                cores = len(available_cores())
                words = f"{found.per_node} ranks, measured here ({cores} cores); nothing else runs meanwhile."
                if found.per_node > cores:
                    words += " More ranks than cores: their times say little about a real cluster."
                return words
            if found != Hardware.of(found.name):
                found.described()
            return f"{found.per_node * found.nodes} × {found.kind}, priced from data sheets."
        except TensorOptError as error:
            return note(str(error), "warn")

    @app.callback(
        Output("planners", "data"),
        Output("planners", "value"),
        Input("per-node", "value"),
        Input("nodes", "value"),
        Input("mode", "value"),
        State("planners", "value"),
    )
    def offer(per_node: Any, nodes: Any, mode: Any, chosen: Any) -> Any:
        """Planners that will refuse this cluster or mode say why before anything is started."""
        try:
            devices = count(per_node, "", MOST_DEVICES) * count(nodes, "", MOST_DEVICES)
        except RequestError:
            return no_update, no_update
        whys = refusals(devices, training=mode != "inference")
        left = [name for name in chosen or [] if not whys.get(name)]
        return parts.planner_options(whys), no_update if left == (chosen or []) else left

    @app.callback(
        Output("model-said", "children"),
        Output("zoo-fields", "style"),
        Output("onnx-fields", "style"),
        Input("model", "value"),
    )
    def describe(name: Any) -> Any:
        """What the chosen model is, and the fields that are for its kind."""
        words = model_words(str(name))
        return words, parts.visible(bool(words)), parts.visible(not words)

    @app.callback(
        Output("model", "data"),
        Output("model", "value"),
        Output("upload-said", "children"),
        Input("upload", "contents"),
        State("upload", "filename"),
        prevent_initial_call=True,
    )
    def upload(contents: Any, name: Any) -> Any:
        if contents is None:
            return no_update, no_update, no_update
        try:
            token = jobs.uploads.keep(contents, name)
        except TensorOptError as error:
            return no_update, no_update, note(str(error), "error")
        known = jobs.uploads.known()
        return models(known), token, note(f"{known[token][1]} is here; it is read when the job starts.")

    @app.callback(
        Output("start-said", "children"),
        Input("start", "n_clicks"),
        *(State(control, "value") for control in FORM.values()),
        prevent_initial_call=True,
    )
    def start(clicks: Any, *values: Any) -> Any:
        if not clicks:
            return no_update
        try:
            request = request_from(dict(zip(FORM, values, strict=True)), jobs.uploads.known())
            job = jobs.submit(request)
        except TensorOptError as error:
            return note(str(error), "error")
        words = f"{job.title}: {'started' if job.state == 'running' else 'waits for its turn'}. "
        if (took := jobs.took(job)) is not None:
            words += f"The same took {duration(took)} last time. "
        # On a narrow screen the list stands below the form.
        link = html.A("Show it", href=f"#job-{job.id}")
        return html.Div([words, link], className="note note-info", role="status")


_CLUSTER = ("cluster", "kind", "per_node", "nodes", "inside", "between", "price")
