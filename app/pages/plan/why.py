"""The part of the plan page on why the selected plan is not faster, and what would make it so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import ALL, ctx, dcc, html, no_update

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.verified import fingerprint
from tensoropt.report.changes import change_named
from tensoropt.report.levers import OF_SIMULATED
from tensoropt.report.why import Why, with_simulated

from ...context import Context
from ...jobs.deeper import Deeper, deeper_jobs
from ...jobs.manager import JobManager
from ...state import View
from ...views.frontier import FrontierData
from ...views.runs import title_of
from ...views.why import WhyRow, budget_of, deeper_rows, parts, quick, results_of, rows
from ..parts import (
    button,
    hint,
    note,
    panel,
    plain_table,
    point_shown,
    scrolled,
    shown_point,
    spoken,
    stores,
    view_of,
)
from ..wiring import Callbacks

CALLBACKS = Callbacks()

_HEAD = ("", "time", "change", "")


def layout() -> Any:
    return panel(
        html.Div(id="why-quick"),
        html.H3("The same plan under changed costs"),
        html.Div(id="why-simulated"),
        html.H3("With a separate search"),
        html.Div(id="why-deeper"),
        spoken("why-said", className="said-below"),
        *stores("why-rest", "why-started", "why-shown"),
        title="Why not faster?",
        names="why",
    )


def _quick(context: Context, data: FrontierData, view: View) -> Why:
    """Return what is known at once, remembered by exploration, point and budget."""
    exploration, point = data.exploration, view.point
    assert point is not None

    def made() -> tuple[Exploration, Why]:
        detail, _ = context.detail_or_why(data, point)  # without it the engine says why
        return exploration, quick(data, view, str(context.library.entry(view.exploration).folder), detail)

    return context.whys.get(("quick", *_key(data, view)), made)[1]  # type: ignore[no-any-return]


def _whole(context: Context, data: FrontierData, view: View) -> Why:
    """Return the same with what is simulated, remembered."""
    shown = data.exploration
    key = ("whole", *_key(data, view))
    made = context.whys.get(key, lambda: (shown, with_simulated(shown, _quick(context, data, view))))
    return made[1]  # type: ignore[no-any-return]


def _key(data: FrontierData, view: View) -> tuple[Any, ...]:
    # The exploration is part of what is remembered, so that its id cannot be reused meanwhile.
    return id(data.exploration), view.point, budget_of(data, view)[0]


@CALLBACKS.answer(sets="why-quick.children", when="plan-headline.children", given="pick.data page.data")
def _known(context: Context, _: Any, pick: Any, page: Any) -> Any:
    """Fill in what is known once the rest of the page is there: it has the point's details, which take
    longest."""
    data, view = shown_point(context, pick, page, "plan")
    if data is None or view.point is None:
        return None
    try:
        why = _quick(context, data, view)
    except TensorOptError as error:
        return note(f"Nothing can be said here: {error}", "warn")
    return [
        html.P(why.binding.sentence, className="binding"),
        *_parts_table(why, data),
        html.H3("On this frontier"),
        _table(rows(why, (*why.bounds, *why.levers), data, view)),
        hint(budget_of(data, view)[1]),
        *(note(text) for text in why.notes),
    ]


# A plan is simulated a dozen more times: not for every point that a person passes.
CALLBACKS.in_browser("why.rest", sets="why-rest.data", when="why-quick.children", at_start=True)


@CALLBACKS.answer(sets="why-simulated.children", when="why-rest.data", given="pick.data page.data")
def _simulated(context: Context, _: Any, pick: Any, page: Any) -> Any:
    data, view = shown_point(context, pick, page, "plan")
    if data is None or view.point is None:
        return None
    try:
        why, before = _whole(context, data, view), _quick(context, data, view)
    except TensorOptError:
        return None  # said above
    bounds, levers = why.bounds[len(before.bounds) :], why.levers[len(before.levers) :]
    if not bounds:
        return [note(text) for text in why.notes[len(before.notes) :]]
    return [
        _table(rows(why, (*bounds, *levers), data, view)),
        hint(f"The first two are bounds. {OF_SIMULATED.capitalize()}."),
    ]


@CALLBACKS.answer(
    sets="why-deeper.children why-shown.data",
    when="why-quick.children told.data why-started.data",
    given="pick.data page.data why-shown.data",
)
def _deeper(context: Context, _: Any, __: Any, ___: Any, pick: Any, page: Any, shown: Any) -> Any:
    """Show the changes that take a search; drawn again only when one says something new."""
    data, view, point = point_shown(context, pick, page, "plan")
    try:
        rows = _deeper_rows(context, data, view)
    except TensorOptError:
        return None, None  # said above
    news = [view.exploration, point, view.budget_bytes, [_sign(row) for row in rows]]
    return (no_update, no_update) if news == shown else (_table(rows, actions=True), news)


@CALLBACKS.answer(
    jobs=True,
    sets="why-started.data why-said.children",
    when=[({"why": ALL}, "n_clicks")],
    given="state.data",
)
def _start(context: Context, _: Any, kept: Any) -> Any:
    """Explore a change. This is a separate callback, so that it makes the browser drop no other
    answer."""
    trigger = ctx.triggered_id
    # A button that has just been made fires as well, without a click.
    if not isinstance(trigger, dict) or not any(t["value"] for t in ctx.triggered):
        return no_update, no_update
    try:
        change = wanted(context, context.manager, view_of(kept), str(trigger.get("why")))
        return context.manager.submit(change).id, None
    except TensorOptError as error:
        return no_update, note(str(error), "error")


def wanted(context: Context, jobs: JobManager, view: View, key: str) -> Deeper:
    """Return what a button asks for.

    Raises:
        TensorOptError: there is no such exploration or change, or it has already been explored.
    """
    exploration = context.library.load(view.exploration)
    change = change_named(exploration, key)
    if change.refusal:
        raise TensorOptError(f"{change.title} cannot be explored: {change.refusal}")
    entry = context.library.entry(view.exploration)
    at_work = deeper_jobs(jobs.jobs(), entry.folder).get(key)
    if at_work is not None and at_work.active:
        raise TensorOptError(f"{change.title}: a job for it is already running")
    local = any(kind["type"] == "cpu" for kind in exploration.cluster["kinds"])
    return Deeper(entry.folder, title_of(context.library, entry), change.key, change.title, local)


def _deeper_rows(context: Context, data: FrontierData, view: View) -> tuple[WhyRow, ...]:
    why, whole = _quick(context, data, view), data.exploration
    of = str(context.whys.get(("print", id(whole)), lambda: (whole, fingerprint(whole)))[1])
    entry = context.library.entry(view.exploration)
    jobs = context.jobs.jobs() if context.jobs is not None else []
    explored = {}
    for key, made in results_of(context.library, of).items():
        try:
            explored[key] = (made, context.library.load(made))
        except TensorOptError:
            continue  # the list of explorations says what is wrong with it
    at_work = deeper_jobs(jobs, entry.folder)
    return deeper_rows(why, data, view, explored, at_work, can_run=context.jobs is not None)


def _sign(row: WhyRow) -> list[Any]:
    return [row.key, row.time, row.state, row.action, row.link.href if row.link else ""]


def _parts_table(why: Why, data: FrontierData) -> list[Any]:
    rows = parts(why, data.units)
    # One panel above has the step's parts; what it lacks is which links are waited for.
    if len(rows) < 3:
        return []
    table = plain_table(["the step", "", "share"], rows, (1, 2))
    return [html.Div(table, className="why-parts")]


def _table(rows: Sequence[WhyRow], *, actions: bool = False) -> Any:
    lines = []
    for row in rows:
        change = html.Span(row.change, className={True: "better", False: "worse", None: ""}[row.better])
        said: list[Any] = []
        if row.link is not None:
            said += [dcc.Link(row.link.text, href=row.link.href), " "]
        if row.words:
            said.append(html.Span(row.words, className="muted"))
        if actions:
            said += _actions(row)
        lines.append([row.title, row.time, change, said])
    label = "What a search would find" if actions else "What would change"
    return scrolled(label, plain_table(_HEAD, lines, numbers=(1, 2)), names="levers")


def _actions(row: WhyRow) -> list[Any]:
    actions: list[Any] = []
    if row.state:
        actions.append(html.Span(row.state, className="why-state", role="status" if row.active else None))
    if row.action:
        words = {"run": "Explore", "again": "Try again"}[row.action]
        actions.append(button(words, {"why": row.key}, f"{words}: {row.title}"))
    return actions
