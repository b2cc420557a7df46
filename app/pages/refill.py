"""Exploring again with changes: the form is filled from a job, or from the exploration that is shown."""

from __future__ import annotations

import time
from typing import Any

from dash import ALL, ctx, dcc, html, no_update

from tensoropt.errors import TensorOptError
from tensoropt.plan.settings import settings_fields
from tensoropt.report.commands import question_of

from ..context import Context
from ..jobs.fields import RequestError
from ..jobs.manager import JobManager
from ..jobs.refill import Refill, question_of_job, refill
from ..state import View
from ..views.jobs import clusters
from . import parts
from .parts import note, spoken
from .wiring import Callbacks

CALLBACKS = Callbacks()
FORM = {
    "model": "model", "batch": "batch", "dims": "dims", "loss": "loss", "outputs": "outputs",
    "cluster": "cluster", "kind": "kind", "per_node": "per-node", "nodes": "nodes", "inside": "inside",
    "between": "between", "price": "device-price", "also_on": "also-on", "devices": "devices",
    "planners": "planners", "seed": "seed",
    **{setting.key: setting.flag for setting in settings_fields()},
}  # fmt: skip
"""Field of the form -> id of its control."""


BESIDE = ("kind", "per_node", "nodes", "inside", "between", "price")
"""The fields that the choice of a cluster fills."""
_FILLED = [field for field in FORM if field not in BESIDE]
"""The fields that no other callback sets."""


def layout() -> Any:
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


def button() -> Any:
    """Return the button to explore again with changes, for pages that show an exploration."""
    return parts.button("explore again with changes", "change-shown")


@CALLBACKS.answer(
    sets=[
        *(f"+{FORM[field]}.value" for field in _FILLED),
        "+cluster.data",
        "refilled.data",
        "refill-said.children",
    ],
    when=[({"job": ALL, "do": "change"}, "n_clicks"), "refill-shown.n_clicks", "change-shown.n_clicks"],
    given="state.data",
    at_start=True,
    jobs=True,
)
def _fill(context: Context, _: Any, __: Any, earlier: Any, state: Any) -> Any:
    """Fill every field with the earlier request; nothing is started."""
    none = (no_update,) * (len(_FILLED) + 2)
    # A button that has just been made fires as well, without a click; where it is the form that has just
    # been made, a click on another page waited for it.
    if not any(t["value"] for t in ctx.triggered) and not (earlier and not ctx.triggered_id):
        return *none, no_update
    asked = ctx.triggered_id
    try:
        if isinstance(asked, dict):
            what, found = _of_job(context.manager, str(asked.get("job")))
        else:
            what, found = _of_exploration(context, state)
    except TensorOptError as error:
        return *none, note(str(error), "error")
    fields = {**found.fields, "filled": time.time()}
    words = f"Filled from {what}. Change what should be different, then press Explore."
    if found.said:
        words += f" The form has no field for {', '.join(found.said)}: that is left out."
    return (
        *(fields[field] for field in _FILLED),
        clusters(context.manager.uploads.clusters()),
        fields,
        note(words, "warn" if found.said else "info"),
    )


CALLBACKS.in_browser("tensoropt.refilled", sets="refill-said.title", when="refill-said.children", jobs=True)


def _of_job(jobs: JobManager, id: str) -> tuple[str, Refill]:
    job = jobs.job(id)
    if job is None:
        raise RequestError("this job is not kept any more; fill the form from another one")
    return f"'{job.title}'", refill(question_of_job(job), jobs.uploads)


def _of_exploration(context: Context, state: Any) -> tuple[str, Refill]:
    view = View.from_data((state or {}).get("view"))
    exploration = context.exploration(view)
    if exploration is None:
        raise RequestError("no exploration is shown; choose one in the list at the top")
    name = context.library.model_name(exploration.model.source)
    found = refill(question_of(exploration), context.manager.uploads)
    return f"{name} on {exploration.cluster['name']}", found
