"""The part of the plan page on why the selected plan is not faster, and what would make it so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import ALL, Dash, ctx, dcc, html, no_update

from tensoropt.errors import TensorOptError
from tensoropt.plan import Exploration
from tensoropt.plan.changed import fingerprint
from tensoropt.report.changes import change_named
from tensoropt.report.levers import OF_SIMULATED
from tensoropt.report.why import Why, with_simulated

from ..context import Context, Recent
from ..jobs.deeper import Deeper, deeper_jobs
from ..jobs.manager import JobManager
from ..state import View
from ..views.frontier import FrontierData
from ..views.library import title_of
from ..views.why import WhyRow, budget_of, deeper_rows, parts, quick, results_of, rows
from .parts import button, hint, note, panel, plain_table, scrolled, spoken, stores
from .view_store import shown_point, view_of
from .wiring import callback, in_browser

HEAD = ("", "time", "change", "")


def layout() -> Any:
    return panel(
        html.Div(id="why-quick"),
        html.H3("The same plan under changed costs"),
        html.Div(id="why-simulated"),
        html.H3("With a search of its own"),
        html.Div(id="why-deeper"),
        spoken("why-said", className="said-below"),
        *stores("why-rest", "why-started", "why-shown"),
        title="Why not faster?",
        names="why",
    )


class _Answers:
    """The answers remembered between callbacks, by exploration, point and budget."""

    def __init__(self, context: Context):
        self.context = context
        self._quick, self._whole, self._prints = Recent(size=32), Recent(size=32), Recent(size=16)

    def quick(self, data: FrontierData, view: View) -> Why:
        found = data.exploration
        key = (id(found), view.point, budget_of(data, view)[0])
        return self._quick.get(key, lambda: (found, self._made(data, view)))[1]  # type: ignore[no-any-return]

    def _made(self, data: FrontierData, view: View) -> Why:
        entry, point = self.context.library.entry(view.exploration), view.point
        assert point is not None
        detail, _ = self.context.detail_or_why(data, point)  # without it the engine says why
        return quick(data, view, str(entry.folder), detail)

    def whole(self, data: FrontierData, view: View) -> Why:
        found = data.exploration
        key = (id(found), view.point, budget_of(data, view)[0])
        return self._whole.get(key, lambda: (found, with_simulated(found, self.quick(data, view))))[1]  # type: ignore[no-any-return]

    def fingerprint(self, found: Exploration) -> str:
        return str(self._prints.get(id(found), lambda: (found, fingerprint(found)))[1])


def register(app: Dash, context: Context) -> None:
    answers = _Answers(context)

    @callback(app, sets="why-quick.children", when="plan-headline.children", given="pick.data page.data")
    def known(_: Any, pick: Any, page: Any) -> Any:
        """Fill in what is known once the rest of the page is there: it has the point's details, which take
        longest."""
        data, view = shown_point(context, pick, page, "plan")
        if data is None or view.point is None:
            return None
        try:
            why = answers.quick(data, view)
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
    in_browser(app, "why.rest", sets="why-rest.data", when="why-quick.children", at_start=True)

    @callback(app, sets="why-simulated.children", when="why-rest.data", given="pick.data page.data")
    def simulated(_: Any, pick: Any, page: Any) -> Any:
        data, view = shown_point(context, pick, page, "plan")
        if data is None or view.point is None:
            return None
        try:
            why, before = answers.whole(data, view), answers.quick(data, view)
        except TensorOptError:
            return None  # said above
        bounds, levers = why.bounds[len(before.bounds) :], why.levers[len(before.levers) :]
        if not bounds:
            return [note(text) for text in why.notes[len(before.notes) :]]
        return [
            _table(rows(why, (*bounds, *levers), data, view)),
            hint(f"The first two are bounds. {OF_SIMULATED.capitalize()}."),
        ]

    @callback(
        app,
        sets="why-deeper.children why-shown.data",
        when="why-quick.children told.data why-started.data",
        given="pick.data page.data why-shown.data",
    )
    def deeper(_: Any, __: Any, ___: Any, pick: Any, page: Any, shown: Any) -> Any:
        """Show the changes that take a search; drawn again only when one says something new."""
        data, view = shown_point(context, pick, page, "plan")
        if data is None or view.point is None:
            return no_update, no_update
        try:
            found = _deeper_rows(context, answers, data, view)
        except TensorOptError:
            return None, None  # said above
        news = [view.exploration, view.point, view.budget_bytes, [_sign(row) for row in found]]
        return (no_update, no_update) if news == shown else (_table(found, actions=True), news)

    if context.jobs is not None:
        _register_start(app, context, context.jobs)


def _register_start(app: Dash, context: Context, jobs: JobManager) -> None:
    @callback(
        app, sets="why-started.data why-said.children", when=[({"why": ALL}, "n_clicks")], given="state.data"
    )
    def start(_: Any, kept: Any) -> Any:
        """Explore a change. This is a separate callback, so that it makes the browser drop no other
        answer."""
        asked = ctx.triggered_id
        # A button that has just been made fires as well, without a click.
        if not isinstance(asked, dict) or not any(t["value"] for t in ctx.triggered):
            return no_update, no_update
        try:
            return jobs.submit(wanted(context, jobs, view_of(kept), str(asked.get("why")))).id, None
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
        raise TensorOptError(f"{change.title}: a job for it is at work already")
    local = any(kind["type"] == "cpu" for kind in exploration.cluster["kinds"])
    return Deeper(entry.folder, title_of(context.library, entry), change.key, change.title, local)


def _deeper_rows(context: Context, answers: _Answers, data: FrontierData, view: View) -> tuple[WhyRow, ...]:
    why = answers.quick(data, view)
    entry = context.library.entry(view.exploration)
    jobs = context.jobs.jobs() if context.jobs is not None else []
    found = {}
    for key, made in results_of(context.library, answers.fingerprint(data.exploration)).items():
        try:
            found[key] = (made, context.library.load(made))
        except TensorOptError:
            continue  # the list of explorations says what is wrong with it
    at_work = deeper_jobs(jobs, entry.folder)
    return deeper_rows(why, data, view, found, at_work, can_run=context.jobs is not None)


def _sign(row: WhyRow) -> list[Any]:
    return [row.key, row.time, row.state, row.action, row.link.href if row.link else ""]


def _parts_table(why: Why, data: FrontierData) -> list[Any]:
    found = parts(why, data.units)
    # One panel above has the step's parts; what it lacks is which links are waited for.
    if len(found) < 3:
        return []
    table = plain_table(["the step", "", "share"], [[p.title, p.time, p.share] for p in found], (1, 2))
    return [html.Div(table, className="why-parts")]


def _table(found: Sequence[WhyRow], *, actions: bool = False) -> Any:
    lines = []
    for row in found:
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
    return scrolled(label, plain_table(HEAD, lines, numbers=(1, 2)), names="levers")


def _actions(row: WhyRow) -> list[Any]:
    found: list[Any] = []
    if row.state:
        found.append(html.Span(row.state, className="why-state", role="status" if row.active else None))
    if row.action:
        words = {"run": "Explore", "again": "Try again"}[row.action]
        found.append(button(words, {"why": row.key}, f"{words}: {row.title}"))
    return found
