"""The callbacks of the explore page: presets fill the form, the form starts jobs, jobs report."""

from __future__ import annotations

from typing import Any

from dash import Dash, ctx, html, no_update

from tensoropt.cluster import list_clusters
from tensoropt.cluster.local import available_cores
from tensoropt.errors import TensorOptError
from tensoropt.plan.settings import settings_fields

from ..context import Context
from ..jobs.clusters import ClusterFile
from ..jobs.fields import CHECKS, MOST_DEVICES, RequestError, count, faults
from ..jobs.manager import JobManager
from ..jobs.refill import hardware_fields
from ..jobs.request import Hardware, Request, hardware_from, request_from
from ..views.jobs import clusters, duration, estimate_words, model_words, models
from ..views.planners import refusals
from . import job_list, parts, refill
from .parts import note
from .wiring import callback

FORM = {
    "model": "model", "batch": "batch", "dims": "dims", "loss": "loss", "outputs": "outputs",
    "cluster": "cluster", "kind": "kind", "per_node": "per-node", "nodes": "nodes", "inside": "inside",
    "between": "between", "price": "device-price", "also_on": "also-on", "devices": "devices",
    "planners": "planners", "seed": "seed",
    **{setting.key: setting.flag for setting in settings_fields()},
}  # fmt: skip
"""Field of the form -> id of its control."""


def register(app: Dash, context: Context) -> None:
    job_list.register(app, context)
    if context.jobs is not None:
        _register_form(app, context.jobs)
        refill.register(app, context, context.jobs, FORM, _BESIDE)


def _register_form(app: Dash, jobs: JobManager) -> None:
    @callback(
        app,
        sets=[*(f"{FORM[n]}.value" for n in _BESIDE), *(f"{FORM[n]}.disabled" for n in _BESIDE)],
        when="cluster.value refilled.data",
        at_start=True,
    )
    def preset(name: Any, refilled: Any) -> Any:
        """Fill the fields from a preset or a file; those of a preset may then be edited."""
        uploaded = jobs.uploads.clusters()
        if name != "local" and name not in list_clusters() and name not in uploaded:
            return (no_update,) * 2 * len(_BESIDE)
        if name == "local":
            found: Any = Hardware("local", "CPU", len(available_cores()), 1, "", "")
        else:
            found = uploaded[name] if name in uploaded else Hardware.of(name)
        values = hardware_fields(found)
        # A form that was filled from a job sets a cluster and the changes to it at the same time.
        if "refilled.data" in ctx.triggered_prop_ids and isinstance(refilled, dict):
            values = {field: refilled.get(field) for field in _BESIDE}
        fixed = {field: name in uploaded or (name == "local" and field != "per_node") for field in _BESIDE}
        return *(values[field] for field in _BESIDE), *(fixed[field] for field in _BESIDE)

    @callback(
        app,
        sets=[f"{FORM[name]}.error" for name in CHECKS],
        when=[f"{FORM[name]}.value" for name in CHECKS],
        at_start=True,
    )
    def check(*values: Any) -> Any:
        """Return the rule that the typed text breaks, to be shown next to it."""
        found = faults(dict(zip(CHECKS, values, strict=True)))
        return tuple(found[name] or None for name in CHECKS)

    @callback(app, sets="cluster-said.children", when=[f"{FORM[n]}.value" for n in _CLUSTER], at_start=True)
    def say(*values: Any) -> Any:
        """Say what the fields amount to, or what is wrong with them."""
        try:
            found = hardware_from(dict(zip(_CLUSTER, values, strict=True)), jobs.uploads.clusters())
            if isinstance(found, ClusterFile):
                return found.words
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

    @callback(
        app,
        sets="planners.data planners.value",
        when="per-node.value nodes.value mode.value",
        given="planners.value",
        at_start=True,
    )
    def offer(per_node: Any, nodes: Any, mode: Any, chosen: Any) -> Any:
        """Let planners that will refuse this cluster or mode say why before anything is started."""
        try:
            devices = count(per_node, "", MOST_DEVICES) * count(nodes, "", MOST_DEVICES)
        except RequestError:
            return no_update, no_update
        whys = refusals(devices, training=mode != "inference")
        left = [name for name in chosen or [] if not whys.get(name)]
        return parts.planner_options(whys), no_update if left == (chosen or []) else left

    @callback(
        app, sets="model-said.children zoo-fields.style onnx-fields.style", when="model.value", at_start=True
    )
    def describe(name: Any) -> Any:
        """Describe the chosen model, and show the fields that are for its kind."""
        words = model_words(str(name))
        return words, parts.visible(bool(words)), parts.visible(not words)

    @callback(
        app,
        sets="model.data model.value upload-said.children",
        when="upload.contents",
        given="upload.filename",
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

    @callback(
        app,
        sets="cluster.data cluster.value cluster-upload-said.children",
        when="cluster-upload.contents",
        given="cluster-upload.filename",
    )
    def upload_cluster(contents: Any, name: Any) -> Any:
        """Read a cluster file at once, and show next to the field what is wrong with it."""
        if contents is None:
            return no_update, no_update, no_update
        try:
            token = jobs.uploads.keep_cluster(contents, name)
        except TensorOptError as error:
            return no_update, no_update, note(str(error), "error")
        known = jobs.uploads.clusters()
        return clusters(known), token, note(f"{known[token].label} is here: {known[token].words}")

    @callback(
        app, sets="estimate.children", when=[f"{control}.value" for control in FORM.values()], at_start=True
    )
    def estimate(*values: Any) -> Any:
        """Say how long it will take, before it is started; nothing for a form that cannot be started."""
        try:
            return estimate_words(jobs.estimate(_request(values)))
        except TensorOptError:
            return ""

    def _request(values: tuple[Any, ...]) -> Request:
        form = dict(zip(FORM, values, strict=True))
        return request_from(form, jobs.uploads.known(), jobs.uploads.clusters())

    @callback(
        app,
        sets="start-said.children",
        when="start.n_clicks",
        given=[f"{control}.value" for control in FORM.values()],
    )
    def start(clicks: Any, *values: Any) -> Any:
        if not clicks:
            return no_update
        try:
            job = jobs.submit(_request(values))
        except TensorOptError as error:
            return note(str(error), "error")
        words = f"{job.title}: {'started' if job.state == 'running' else 'waits for its turn'}. "
        if (took := jobs.took(job)) is not None:
            words += f"The same took {duration(took)} last time. "
        # On a narrow screen the list stands below the form.
        link = html.A("Show it", href=f"#job-{job.id}")
        return html.Div([words, link], className="note note-info", role="status")


_BESIDE = ("kind", "per_node", "nodes", "inside", "between", "price")
"""The fields that the choice of a cluster fills."""
_CLUSTER = ("cluster", "kind", "per_node", "nodes", "inside", "between", "price")
