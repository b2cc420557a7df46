"""The part of the frontier page with baselines and published planners: in a table and as marks; further ones
run on demand as a job."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html, no_update

from tensoropt.errors import TensorOptError
from tensoropt.planners import ENTRIES
from tensoropt.report.detail import recorded_of

from ...context import Context
from ...jobs.beside import Beside
from ...jobs.fields import RequestError
from ...jobs.manager import JobManager
from ...jobs.record import Job
from ...jobs.request import planners_from
from ...state import View
from ...views.answer import BaselineRow, answer_words
from ...views.planners import refusals_beside
from ...views.runs import title_of
from .. import parts
from ..parts import view_of
from ..wiring import Callbacks

CALLBACKS = Callbacks()

_USUAL = ("data_parallel", "zero", "megatron")
"""The planners that run unless others are chosen: quick methods that people use by hand."""
_HEAD = ("", "plan", "memory", "time", "against the answer", "")


def layout(context: Context) -> Any:
    start = None
    if context.jobs is not None:
        start = parts.row(
            html.Div(parts.planner_choice("beside", "Run beside this frontier", _USUAL), className="grow"),
            dmc.Button("Run planners", id="beside-start", variant="default"),
            names="fields",
        )
    return parts.panel(
        parts.scrolled("Baselines", id="planner-table"),
        start,
        parts.spoken("beside-said", className="said-below"),
        *parts.stores("beside-job", "beside-told", "planner-shown"),
        title="Baselines within the budget",
        names="later",
    )


@CALLBACKS.answer(
    sets="planner-table.children planner-shown.data",
    when="listed.data pick.data",
    given="state.data planner-shown.data",
    at_start=True,
)
def _table(context: Context, listed: Any, _: Any, kept: Any, shown: Any) -> Any:
    """Return the table, made anew if there are other points, another selection, budget or filter."""
    view = view_of(kept)
    about = [
        listed,
        view.exploration,
        view.point,
        view.budget_bytes,
        view.headroom,
        view.mesh,
        view.micro,
        view.devices,
    ]
    if about == shown:
        return no_update, no_update
    data = context.frontier(view)
    rows = answer_words(data, view).baselines if data is not None else ()
    if not rows:
        words = (
            "None was run beside this frontier. Their plans become marks in the plot, evaluated by the "
            "same simulator."
        )
        return parts.hint(words), about
    cells = [
        [
            parts.explained(r.title), r.plan, r.memory, r.time, r.verdict,
            _links(r),
        ]
        for r in rows
    ]  # fmt: skip
    return parts.plain_table(_HEAD, cells, numbers=(2, 3)), about


def _links(row: BaselineRow) -> Any:
    """Return links that write and run a baseline's plan, and compare it."""
    use = [dcc.Link("Use", href=row.use, title=f"Write and run {row.title}")] if row.use else []
    compare = [dcc.Link("compare", href=row.link)] if row.link else []
    return html.Span([*use, *([" · "] if use and compare else []), *compare])


@CALLBACKS.answer(
    jobs=True,
    sets="beside.data beside.value",
    when="listed.data",
    given="state.data beside.value",
    at_start=True,
)
def _offer(context: Context, _: Any, kept: Any, chosen: Any) -> Any:
    """Offer the planners that may find something beside this frontier; those that will refuse say why."""
    data = context.frontier(view_of(kept))
    if data is None:
        return no_update, no_update
    return parts.offered(refusals_beside(data), chosen)


# Alone, without the clock: a browser drops the answer of a callback that was requested again meanwhile,
# and this one is the only one that knows which job it started.
@CALLBACKS.answer(
    jobs=True, sets="beside-job.data", when="beside-start.n_clicks", given="beside.value state.data"
)
def _start(context: Context, clicks: Any, names: Any, kept: Any) -> Any:
    if not clicks:
        return no_update
    try:
        return {"id": context.manager.submit(_wanted(context, view_of(kept), names)).id}
    except TensorOptError as error:
        return {"refused": str(error), "click": clicks}


@CALLBACKS.answer(
    jobs=True,
    sets="beside-said.children beside-told.data renewed.data",
    when="beside-job.data told.data",
    given="beside-told.data",
)
def _say(context: Context, started: Any, _: Any, shown: Any) -> Any:
    """Report how the job is going, every second; but only if there is something new."""
    if not isinstance(started, dict):
        return no_update, no_update, no_update
    if "refused" in started:
        news, words = ["refused", started.get("click")], parts.note(str(started["refused"]), "error")
    else:
        job = next((j for j in context.manager.jobs() if j.id == started.get("id")), None)
        if job is None:
            return no_update, no_update, no_update
        stage = job.stages[-1] if job.stages else None
        news = [job.id, job.state, *((stage.name, stage.done, stage.total) if stage else ())]
        words = None if news == shown else _words(job, context.manager)
    if news == shown:
        return no_update, no_update, no_update
    # What is drawn has other points now, and other planners.
    drawn_anew = isinstance(started, dict) and len(news) > 1 and news[1] == "done"
    return words, news, news[0] if drawn_anew else no_update


def _wanted(context: Context, view: View, names: Any) -> Beside:
    """Return what the button asks for.

    Raises:
        TensorOptError: there is no planner or no exploration to run, or it was saved without its operators.
    """
    planners = planners_from(names)
    if not planners:
        raise RequestError("choose at least one planner")
    exploration = context.library.load(view.exploration)
    recorded_of(exploration)
    entry = context.library.entry(view.exploration)
    local = any(kind["type"] == "cpu" for kind in exploration.cluster["kinds"])
    there = tuple(
        dict.fromkeys(row["planner"] for row in exploration.comparison if row["planner"] in ENTRIES)
    )
    return Beside(entry.shown.resolve(), title_of(context.library, entry), planners, local, there)


def _words(job: Job, jobs: JobManager) -> Any:
    if job.state == "done" and jobs.folder / job.id in jobs.beside().values():
        words = "Done: their plans are in the table and the plot of this exploration."
        return parts.note(f"{words} To remove them, forget the job on the Explore page.")
    if job.state == "done":
        words = "Done. Current costs differ from those of this frontier, so the result is a new one: "
        link = dcc.Link("open the frontier with its marks", href=f"/frontier?x=job-{job.id}")
        return html.Div([words, link], className="note note-info", role="status")
    if job.state == "queued":
        return parts.note("Waits for its turn; the Explore page shows what runs.")
    if job.active:
        stage = job.stages[-1] if job.stages else None
        return parts.note(f"Running: {stage.name}, {stage.done} of {stage.total}." if stage else "Running.")
    return parts.note(f"The planners' job was {job.state}{': ' + job.error if job.error else ''}.", "warn")
