"""Exploring again with changes: the form is filled from a job, or from the exploration that is shown."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from dash import ALL, Dash, ctx, dcc, html, no_update

from tensoropt.errors import TensorOptError
from tensoropt.report.commands import question_of

from ..context import Context
from ..jobs.fields import RequestError
from ..jobs.manager import JobManager
from ..jobs.refill import Refill, question_of_job, refill
from ..state import View
from ..views.jobs import clusters
from . import parts
from .parts import note, spoken
from .wiring import callback, in_browser


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


def register(
    app: Dash, context: Context, jobs: JobManager, form: Mapping[str, str], beside: Sequence[str]
) -> None:
    """Connect the buttons.

    Args:
        form: field -> the id of its control.
        beside: the fields that follow the choice of a cluster, which another callback sets.
    """
    filled = [field for field in form if field not in beside]
    none = (no_update,) * (len(filled) + 2)

    @callback(
        app,
        sets=[
            *(f"+{form[field]}.value" for field in filled),
            "+cluster.data",
            "refilled.data",
            "refill-said.children",
        ],
        when=[({"job": ALL, "do": "change"}, "n_clicks"), "refill-shown.n_clicks", "change-shown.n_clicks"],
        given="state.data",
        at_start=True,
    )
    def fill(_: Any, __: Any, earlier: Any, state: Any) -> Any:
        """Fill every field with the earlier request; nothing is started."""
        # A button that has just been made fires as well, without a click; where it is the form that has just
        # been made, a click on another page waited for it.
        if not any(t["value"] for t in ctx.triggered) and not (earlier and not ctx.triggered_id):
            return *none, no_update
        asked = ctx.triggered_id
        try:
            if isinstance(asked, dict):
                what, found = _of_job(jobs, str(asked.get("job")))
            else:
                what, found = _of_exploration(context, jobs, state)
        except TensorOptError as error:
            return *none, note(str(error), "error")
        fields = {**found.fields, "filled": time.time()}
        words = f"Filled from {what}. Change what should be different, then press Explore."
        if found.said:
            words += f" The form has no field for {', '.join(found.said)}: that is left out."
        return (
            *(fields[field] for field in filled),
            clusters(jobs.uploads.clusters()),
            fields,
            note(words, "warn" if found.said else "info"),
        )

    in_browser(
        app,
        """said => {
          const place = document.getElementById("refill-said");
          if (!said || !place) return window.dash_clientside.no_update;
          // As a person would go there, so that the address, the page and the way back agree.
          const away = document.documentElement.dataset.page !== "explore";
          if (away) document.getElementById("nav-explore").click();
          window.setTimeout(() => {
            place.scrollIntoView({ block: "center" });
            place.focus({ preventScroll: true });
          }, 150);
          return window.dash_clientside.no_update;
        }""",
        sets="refill-said.title",
        when="refill-said.children",
    )


def _of_job(jobs: JobManager, id: str) -> tuple[str, Refill]:
    job = jobs.job(id)
    if job is None:
        raise RequestError("this job is not kept any more; fill the form from another one")
    return f"'{job.title}'", refill(question_of_job(job), jobs.uploads)


def _of_exploration(context: Context, jobs: JobManager, state: Any) -> tuple[str, Refill]:
    view = View.from_data((state or {}).get("view"))
    exploration = context.exploration(view)
    if exploration is None:
        raise RequestError("no exploration is shown; choose one in the list at the top")
    name = context.library.model_name(exploration.model.source)
    found = refill(question_of(exploration), jobs.uploads)
    return f"{name} on {exploration.cluster['name']}", found
