"""The jobs on the page *Plan it*: their progress and actions.

A card is made once; then only its changed parts are sent, so that the rest stays open, selected or focused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dash_mantine_components as dmc
from dash import ALL, Patch, ctx, dcc, html, no_update, set_props

from ..context import Context
from ..jobs.manager import JobManager
from ..views.jobs import JobCard, found_words, sketch
from .parts import aria, button, copyable, empty, grow, hint, note, row, spoken, stores
from .wiring import Callbacks

CALLBACKS = Callbacks()

_SHOWN_JOBS = 30


def layout() -> Any:
    """Return the container of the jobs' cards, and the stores that keep the page's data in the browser."""
    kept = stores("acted", "shown-jobs", "shown-forgotten")
    return html.Div([spoken("forgotten"), html.Div(id="jobs"), *kept])


@CALLBACKS.answer(jobs=True, sets="acted.data", when=[({"job": ALL, "do": ALL}, "n_clicks")])
def _act(context: Context, _: Any) -> Any:
    """Carry out the action of a card's button. As a separate callback, it makes the browser discard no
    other callback's answer."""
    trigger = ctx.triggered_id
    # A newly made button fires without a click.
    clicked = isinstance(trigger, dict) and any(t["value"] for t in ctx.triggered)
    if not clicked or str(trigger.get("do")) not in _ACTIONS:
        return no_update
    _ACTIONS[str(trigger["do"])](context.manager, str(trigger.get("job")))
    return time.time()


@CALLBACKS.answer(
    jobs=True, sets="finished.data heard.data", when="told.data", given="finished.data", at_start=True
)
def _tell(context: Context, done_before: Any, finished: Any) -> Any:
    """Tell the browser the ids of finished jobs, on which the list of explorations depends."""
    done = [job.id for job in context.manager.jobs() if job.state == "done"]
    return no_update if done == finished else done, done_before


@CALLBACKS.answer(
    jobs=True,
    sets="notice.children active-jobs.data",
    when="told.data",
    given="active-jobs.data",
    at_start=True,
)
def _notice(context: Context, _: Any, watched: Any) -> Any:
    """Report, on whichever page is open, that a job has ended which the page saw running."""
    jobs = context.manager.jobs()
    active = [job.id for job in jobs if job.active]
    before = watched if isinstance(watched, list) else []
    ended = [job for job in jobs if job.id in before and not job.active and job.state != "cancelled"]
    if not ended:
        return no_update, no_update if active == before else active
    job = ended[0]
    keys = _keys_of(job.id, context.manager.results())
    more: list[Any] = [dcc.Link("open the result", href=f"/result?x={keys[-1]}")] if keys else []
    words = f"{job.title}: {job.state}" + (f": {job.error}" if job.error else ".")
    box = row(html.Span(words), *more, names="tight", key=job.id)
    kind = "info" if job.state == "done" else "warn"
    return html.Div(box, className=f"note note-{kind}"), active


@CALLBACKS.answer(
    jobs=True,
    sets="forgotten.children shown-forgotten.data",
    when="told.data acted.data page.data",
    given="shown-forgotten.data",
    at_start=True,
)
def _undo(context: Context, _: Any, __: Any, page: Any, shown: Any) -> Any:
    """Offer to restore the job that was deleted last."""
    gone = context.manager.forgotten() if page == "new" else []
    now = [job.id for job in gone]
    if now == (shown or []):
        return no_update, no_update
    if not gone:
        return None, now
    words = f"Deleted: {gone[0].title}. It can be restored for ten minutes, or until the dashboard ends."
    offer = row(html.Span(words), _button("restore", gone[0].id, "Undo"), names="tight")
    return html.Div(offer, className="note note-info"), now


@CALLBACKS.answer(
    jobs=True,
    sets="jobs.children shown-jobs.data",
    when="told.data acted.data page.data",
    given="shown-jobs.data",
    at_start=True,
)
def _show(context: Context, _: Any, __: Any, page: Any, shown: Any) -> Any:
    """Show the cards, or their changes."""
    if page != "new":
        return no_update, no_update
    if not (cards := _cards(context)):
        nothing = empty("No jobs yet", "Choose a model and devices, then press Plan it.")
        return (no_update, no_update) if shown == {} else (nothing, {})
    now = {id: _signs(card) for id, card in cards.items()}
    earlier = shown if isinstance(shown, Mapping) else {}
    listed = _relisted(list(earlier), list(now), lambda id: _card(cards[id]))
    for id, card in cards.items():
        for part, sign in now[id].items() if id in earlier else ():
            if sign != earlier[id].get(part):
                set_props({"card": id, "part": part}, {"children": PARTS[part](card)})
    return listed, no_update if now == earlier else now


def _relisted(earlier: list[str], now: list[str], make: Callable[[str], Any]) -> Any:
    """Return how the list of cards changes. Cards that remain are not sent again, and so keep their state."""
    if earlier == now:
        return no_update
    stay = [id for id in earlier if id in now]
    if not stay or stay != [id for id in now if id in earlier]:
        return [make(id) for id in now]
    patch = Patch()
    for place in reversed(range(len(earlier))):
        if earlier[place] not in now:
            del patch[place]
    for place, id in enumerate(now):
        if id not in earlier:
            patch.insert(place, make(id))
    return patch


_ACTIONS: dict[str, Callable[[JobManager, str], Any]] = {
    "cancel": JobManager.cancel,
    "forget": JobManager.forget,
    "again": JobManager.again,
    "restore": JobManager.restore,
}
"""Actions by button."""


def _keys_of(id: str, results: Sequence[tuple[str, Path]]) -> tuple[str, ...]:
    return tuple(key for key, _ in results if key.startswith(f"job-{id}"))


def _cards(context: Context) -> dict[str, JobCard]:
    now, manager = time.time(), context.manager
    results = manager.results()  # once, as it looks into every folder
    cards = {}
    for job in manager.jobs()[:_SHOWN_JOBS]:
        keys = _keys_of(job.id, results)
        found = ""
        if len(keys) == 1:
            costs = context.library.costs_of(context.library.entry(keys[0]))
            found = found_words(*costs, len(costs[0]))
        running = manager.growing(job.id), manager.first(job.id), manager.log(job.id)
        cards[job.id] = JobCard(job, now, keys, found, *running)
    return cards


def _signs(card: JobCard) -> dict[str, str]:
    """Return a text for each part of a card that differs if the part's content differs."""
    return {
        "state": f"{card.job.state} {card.words}",
        "buttons": f"{card.job.active} {' '.join(card.results)}",
        "fault": card.job.error,
        "progress": f"{card.at_work} {card.share:.3f} {card.growing} {card.first}",
        # The end of a log identifies the log, as logs only grow.
        "log": f"{len(card.log)} {card.log[-40:]}",
    }


def _buttons(card: JobCard) -> Any:
    buttons: list[Any] = []
    if card.results:
        words = "open the result" if len(card.results) == 1 else f"open {len(card.results)} results"
        buttons.append(dcc.Link(words, href=f"/result?x={card.results[-1]}", className="open"))
    if card.job.active:
        return [*buttons, _button("cancel", card.job.id)]
    words = "run again" if card.job.state == "done" else "try again"
    change = dcc.Link("change", href=f"/new?from=job-{card.job.id}", className="open")
    return [*buttons, _button("again", card.job.id, words), change, _button("forget", card.job.id)]


def _progress(card: JobCard) -> Any:
    if not card.at_work:
        return None
    bar = dmc.Progress(value=100 * card.share, size="sm", **aria(label=f"{card.job.title}: {card.at_work}"))
    shown: list[Any] = [bar, html.Span(card.at_work, className="muted small")]
    shown += [html.P(f"Before the search: {card.first}")] if card.first else []
    if card.growing is not None and card.growing[2]:
        memory, time_s, count = card.growing
        dots = html.Div(style={"maskImage": f'url("{sketch(memory, time_s)}")'}, className="dots")
        words = f"so far {found_words(memory, time_s, count)}"
        picture = html.Div(dots, className="sketch", role="img", **aria(label=words))
        axes = hint("up: time, right: memory")
        shown.append(row(picture, html.Div([hint(words), axes]), names="tight growing"))
    return html.Div(shown, className="at-work")


PARTS: dict[str, Callable[[JobCard], Any]] = {
    "state": lambda card: html.Span(card.words, className=f"state state-{card.job.state}"),
    "buttons": _buttons,
    "fault": lambda card: note(card.job.error, "error"),
    "progress": _progress,
    "log": lambda card: card.log or "nothing yet",
}
"""The parts of a card that change during a job, with their drawing functions."""


def _card(card: JobCard) -> Any:
    def part(name: str, of: Any = html.Div, **more: Any) -> Any:
        return of(PARTS[name](card), id={"card": card.job.id, "part": name}, **more)

    details = [
        html.Summary("command and log"),
        copyable(card.job.line, "the command", f"job-command-{card.job.id}"),
        part("log", html.Pre, className="log", tabIndex=0),
    ]
    head = row(
        html.Strong(card.job.title),
        part("state", html.Span),
        grow(),
        part("buttons", className="row tight"),
        names="tight",
    )
    return html.Article(
        [head, part("fault"), part("progress"), html.Details(details)],
        className="job",
        id=f"job-{card.job.id}",
    )


def _button(action: str, job: str, words: str = "") -> Any:
    return button(words or action, {"job": job, "do": action})
