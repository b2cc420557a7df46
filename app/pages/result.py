"""The page *Result*: the answer, the plot, the choices and what-if questions, and exports in a drawer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dash_mantine_components as dmc
from dash import ctx, dcc, html, no_update

from tensoropt.cluster import Cluster, load_cluster
from tensoropt.errors import TensorOptError
from tensoropt.plan.facts_table import Fact
from tensoropt.report.faster import what_is_faster
from tensoropt.units import format_seconds, parse_bytes, parse_seconds, read_number, share_words

from ..context import Context
from ..figures.frontier import compared_figure, frontier_figure
from ..jobs.request import request_from
from ..state import View, said_fault
from ..views.explorations import compared, named
from ..views.frontier import FrontierData, address_sentences, budget_fault, count_words, without_point
from ..views.point import NOTE, ORIGIN, assumptions
from ..views.result import AnswerLine, answer_line, baseline_rows, choices, two_digits, what_if
from . import export, parts
from .new import earlier, started
from .parts import note
from .wiring import Callbacks

CALLBACKS = Callbacks(export.CALLBACKS)
_MOST_ROWS = 2000
"""Maximum number of points in the table; the CSV has all."""


def layout(context: Context) -> Any:
    budget = dmc.TextInput(id="budget", size="xs", w=88, value="", debounce=True)
    longest = dmc.TextInput(id="longest", size="xs", w=80, value="", placeholder="any", debounce=True)
    head = parts.row(
        html.Div(id="bar-words", className="bar-words"),
        parts.row(
            html.Label("on", htmlFor="bar-devices"),
            dmc.TextInput(
                id="bar-devices",
                size="xs",
                w=168,
                value="",
                debounce=True,
                disabled=context.jobs is None,
                **parts.aria(label="Devices"),
            ),
            html.Label("Budget", htmlFor="budget"),
            budget,
            html.Label("Longest step", htmlFor="longest"),
            longest,
            names="tight",
            id="limits",
        ),
        parts.grow(),
        parts.row(
            dcc.Link("New", href="/new", className="plain-button"),
            html.Button("Share", id="share", type="button", className="plain-button"),
            dmc.Button("Export ▾", id="export-open", size="xs"),
            names="tight",
        ),
        names="tight bar-head",
    )
    plot = parts.panel(
        html.Div(
            parts.plot("graph", 372), id="plot", tabIndex=0, role="application",
            **parts.aria(label="Memory against time. Arrow keys walk along the frontier."),
        ),
        parts.row(
            parts.hint(
                "Click a point, or ", html.Kbd("←"), " ", html.Kbd("→"), "; drag the budget's line.",
                id="plot-hint",
            ),
            parts.grow(),
            dcc.Link("", href="", id="whole", className="small"),
            names="tight",
        ),
        names="plot-panel",
    )  # fmt: skip
    aside = parts.stack(
        parts.panel(html.Div(id="choices"), title="Choices", id="choices-panel"),
        parts.panel(html.Div(id="what-if"), title="What if", id="what-if-panel"),
    )
    return html.Div(
        [
            html.H1("Result", className="unseen"),
            *parts.stores("drawn", "listed", "clicked", "told-last"),
            parts.panel(head, parts.spoken("bar-said"), parts.spoken("answer"), names="answer-panel"),
            html.Div(id="result-notes"),
            html.Div([plot, aside], id="result-body", className="columns"),
            html.Div(_below(context), id="below"),
            export.drawer(),
        ]
    )


def _below(context: Context) -> list[Any]:
    """Return the sections below the answer, collapsed."""
    money = parts.row(
        dmc.TextInput(id="headroom", label="Memory kept free, %", value="", debounce=True, size="xs", w=150),
        dmc.TextInput(
            id="price", label="Price of a device-hour", value="", placeholder="unknown", debounce=True,
            size="xs", w=150,
        ),
        dmc.TextInput(
            id="amount", label="Cost of", placeholder="1,000 steps; 1e9 tokens; 50000 samples",
            value="", debounce=True, size="xs", w=330,
        ),
        names="fields",
    )  # fmt: skip
    said = html.Span(id="points-said", className="muted small")
    return [
        html.Details([html.Summary("Assumptions, and what they rest on"), money, html.Div(id="assumptions")]),
        html.Details([html.Summary("Why not faster", id="faster-show"), parts.spoken("faster")]),
        html.Details([html.Summary("Plans that people make by hand"), html.Div(id="baselines")]),
        html.Details(
            [
                html.Summary("All points"),
                parts.row(parts.button("Show the table", "points-show"), said),
                html.Div(id="points-place"),
            ]
        ),
    ]


_BLANK: dict[str, dict[str, Any]] = {
    "bar-words": {"children": None}, "bar-said": {"children": None}, "answer": {"children": None},
    "result-notes": {"children": None}, "graph": {"figure": no_update}, "choices": {"children": None},
    "budget": {"value": "", "error": False, "placeholder": ""}, "longest": {"value": "", "error": False},
    "whole": {"children": "", "href": ""}, "result-body": {"style": {}}, "below": {"style": {}},
    "bar-devices": {"value": "", "error": False}, "limits": {"style": {}}, "plot-hint": {"style": {}},
    "drawn": {"data": None},
}  # fmt: skip
"""Properties that depend on the address, with their values for an empty page."""
_SHOWN = tuple((name, title) for name, properties in _BLANK.items() for title in properties)


def _hidden(*names: str) -> dict[str, dict[str, Any]]:
    return {name: {"style": parts.visible(False)} for name in names}


def content(context: Context, search: Any, scheme: str, *, narrow: bool) -> dict[str, dict[str, Any]]:
    """Return what the page shows at an address, as property values by component."""
    view = context.view_from(search)
    shown = {**_BLANK, "drawn": {"data": [str(search or ""), scheme]}}
    empty = _empty(context, view)
    if empty is not None:
        hidden = _hidden("result-body", "below", "limits")
        return {**shown, "answer": {"children": empty}, **hidden}
    if view.beside:
        return {**shown, **_compared(context, view, scheme)}
    data = context.frontier(view)
    assert data is not None
    found = data.answer(view)
    row = data.chosen(view, found)
    said = [note(words, "warn") for words in address_sentences(data, str(search or ""))]
    free = data.limit_words(without_point(view, None))
    more = "near the budget" if view.whole else f"all {len(data.exploration.points):,} points"
    return {
        **shown,
        "bar-words": {"children": _bar(data, view)},
        "answer": {"children": answer(answer_line(data, view, found, row), view)},
        "result-notes": {"children": said or None},
        "graph": {"figure": frontier_figure(data, view, found, scheme, narrow=narrow)},
        "choices": {"children": _choices(data, view, found, row)},
        "budget": {"value": data.limit_words(view), "error": False, "placeholder": free},
        "longest": {"value": _longest_words(view), "error": False},
        "bar-devices": {"value": _devices_words(data), "error": False},
        "whole": {"children": more, "href": view.link(whole=not view.whole)},
    }


_FIELDS = ("budget", "longest", "bar-devices", "bar-said")
"""Components with properties that other callbacks set, too."""


@CALLBACKS.answer(
    sets=[("+" if name in _FIELDS else "") + f"{name}.{title}" for name, title in _SHOWN],
    when="url.search page.data scheme.data made.data",
    given="narrow.data drawn.data",
    at_start=True,
)
def _show(context: Context, search: Any, page: Any, scheme: Any, made: Any, narrow: Any, drawn: Any) -> Any:
    """Show the page of an address, unless it is already shown, as it is after the first load."""
    if page != "result" or "result" not in (made or []) or not scheme:
        return (no_update,) * len(_SHOWN)
    if drawn == [str(search or "").lstrip("?"), scheme] and "made" not in str(ctx.triggered_id):
        return (no_update,) * len(_SHOWN)
    found = content(context, str(search or "").lstrip("?"), str(scheme), narrow=bool(narrow))
    return tuple(found[name][title] for name, title in _SHOWN)


def _empty(context: Context, view: View) -> Any:
    if not view.exploration:
        link = dcc.Link("Plan it: costs of usual strategies come first, then all others.", href="/new")
        return parts.empty("No exploration yet", link)
    try:
        context.exploration(view)
    except TensorOptError as error:
        return parts.empty("This exploration cannot be shown", str(error))
    if context.frontier(view) is None:
        return parts.empty("This exploration holds no points", "Plan it again with a larger budget.")
    return None


def _bar(data: FrontierData, view: View) -> Any:
    """Return the model and the batch, with a link to change them."""
    batch = f", batch {data.exploration.model.batch}" if data.exploration.model.batch else ""
    change = dcc.Link("change", href=f"/new?from={view.exploration}", className="small")
    return [html.Strong(named(data.model)), f"{batch} ", change]


def _devices_words(data: FrontierData) -> str:
    """Return the text of the device field: ``8 × H100-80GB``; for several kinds the cluster's name."""
    several = len(data.exploration.cluster["kinds"]) > 1
    return str(data.exploration.cluster["name"]) if several else f"{data.count} × {data.device}"


def answer(line: AnswerLine, view: View) -> Any:
    """Return the answer as page elements: verdict and figures in large type, then sentences."""
    figures: list[Any] = [
        html.Span(line.verdict, className=f"verdict-big {line.mark}"),
        html.Span(f"needs {line.needs}"),
    ]
    figures += [html.Span(words) for words in (line.time, line.pace, line.cost) if words]
    first: list[Any] = [line.plan, " ", dcc.Link("Details", href=view.link("details"))]
    said = [html.P(first, title=line.name), html.P([line.runs_in])]
    return [html.P(figures, className="figures"), *said, html.P(line.beside, className="muted")]


def _choices(data: FrontierData, view: View, found: Any, row: int) -> Any:
    rows, unit = [], ""
    for choice in choices(data, view, found, row):
        speed, _, unit = choice.pace.partition(" ")
        # One element in both cases, to keep the focus.
        words, name = ("chosen", "chosen") if choice.chosen else ("Use", "use")
        use = dcc.Link(words, href=choice.link, className=name)
        mark = html.Span(className=f"verdict {choice.mark}", title=choice.mark)
        plan = html.Span(choice.name, className="plan-short", title=data.exploration.names[choice.row])
        rows.append([[html.Div(choice.title), plan], choice.needs, choice.time, speed, mark, use])
    return parts.plain_table(["", "needs", "a step", unit, "", ""], rows, numbers=(1, 2, 3))


def _compared(context: Context, view: View, scheme: str) -> dict[str, dict[str, Any]]:
    """Return what the page shows of several explorations: one plot, one table, one CSV."""
    found = compared(context.library, view)
    rows = [
        [
            [dcc.Link(row.title, href=row.link), html.Span(row.plan, className="plan-short", title=row.plan)],
            row.needs, row.time, row.pace, html.Span(className=f"verdict {row.mark}", title=row.mark),
        ]
        for row in found.rows
    ]  # fmt: skip
    names = ",".join(data_key for data_key in (view.exploration, *view.beside))
    return {
        "bar-words": {"children": [html.Strong(f"{len(rows)} explorations"), " side by side"]},
        "answer": {
            "children": html.P(
                [
                    "The recommended plan of each, within its own budget. ",
                    html.A(
                        "CSV of all their points", href=f"/download/several/{names}", download="frontiers.csv"
                    ),
                ]
            )
        },
        "result-notes": {"children": [note(words, "warn") for words in found.said] or None},
        "graph": {"figure": compared_figure(found.frontiers, scheme, per_sample=found.per_sample)},
        "choices": {"children": parts.plain_table(["", "needs", "a step", "", ""], rows, numbers=(1, 2, 3))},
        **_hidden("below", "limits", "plot-hint"),
    }


@CALLBACKS.answer(
    sets="what-if.children what-if-panel.style assumptions.children baselines.children headroom.value "
    "price.value amount.value points-said.children listed.data",
    when="drawn.data",
    given="url.search listed.data",
    at_start=True,
)
def _list(context: Context, _: Any, search: Any, listed: Any) -> Any:
    """Fill the sections below the answer, once the answer is shown."""
    view = context.view_from(search)
    about = [view.exploration, view.budget_bytes, view.headroom, view.price, view.amount, *view.beside]
    data = context.frontier(view)
    if about == listed:
        return (no_update,) * 9
    if data is None or view.beside:
        return None, parts.visible(False), *(no_update,) * 6, about
    found = data.answer(view)
    rows = [
        [one.title, one.words, dcc.Link(one.action, href=one.link) if one.link else ""]
        for one in what_if(context.library, data, view, found)
    ]
    head = ["", "plan", "needs", "a step", "against the recommended plan"]
    hand = parts.plain_table(head, baseline_rows(data, found), numbers=(2, 3))
    return (
        parts.plain_table(["", "", ""], rows), {},
        _assumed(assumptions(data, view, *context.verified(view))),
        parts.scrolled("Plans made by hand", hand),
        *_money_words(view.headroom, view.price, view.amount), count_words(data), about,
    )  # fmt: skip


def _money_words(headroom: float, price: float | None, amount: str) -> tuple[str, str, str]:
    return f"{round(100 * headroom, 2):g}", "" if price is None else f"{price:.10g}", amount


def _assumed(said: tuple[Fact, ...]) -> list[Any]:
    """Return a list of settings, then one of notes, which are sentences."""
    notes = [fact.words for fact in said if fact.name in (NOTE, ORIGIN)]
    return [
        parts.facts(fact for fact in said if fact.name not in (NOTE, ORIGIN)),
        html.Ul(list(map(html.Li, notes)), className="notes"),
    ]


@CALLBACKS.answer(
    sets="goto.data +budget.error +longest.error +bar-said.children",
    when="budget.value longest.value",
    given="url.search drawn.data",
)
def _typed(context: Context, budget: Any, longest: Any, search: Any, drawn: Any) -> Any:
    """Set the budget or the longest step that was typed; an empty budget means the exploration's own. Values
    that the page itself wrote are ignored."""
    view = wanted = context.view_from(search)
    data = context.frontier(view)
    if data is None or view.beside or not isinstance(drawn, list):
        return (no_update,) * 4
    shown = context.view_from(drawn[0])
    size, time = str(budget or "").strip(), str(longest or "").strip()
    faults: dict[str, str] = {}
    try:
        if size != data.limit_words(shown):
            wanted = without_point(view, _budget(data, size))
    except TensorOptError as error:
        faults["budget"] = f"Budget: {error}"
    try:
        if time != _longest_words(shown):
            wanted = replace(without_point(view, None), time_s=_longest(time))
    except TensorOptError as error:
        faults["longest"] = f"Longest step: {error}"
    link = no_update if wanted == view or faults else wanted.link()
    said = note("; ".join(faults.values()), "error")
    return link, "budget" in faults, "longest" in faults, said


@CALLBACKS.answer(
    jobs=True,
    sets="+goto.data +bar-devices.error +bar-said.children",
    when="bar-devices.n_submit bar-devices.value",
    given="url.search",
)
def _elsewhere(context: Context, _: Any, typed: Any, search: Any) -> Any:
    """Plan the same training on other devices: show a known exploration, else start a job."""
    view, text = context.view_from(search), str(typed or "").strip()
    data = context.frontier(view)
    if data is None or view.beside or text in ("", _devices_words(data)):
        return no_update, False, None
    try:
        _, form, left_out = earlier(context, view.exploration)
        request = request_from({**form, "devices": text}, context.manager.uploads)
        named = request.question.cluster
        cluster = load_cluster(named) if isinstance(named, str) else Cluster.from_dict(named)
        for entry in context.library.alike(view.exploration):
            if context.library.head_of(entry).cluster == cluster.name:
                return View(entry.key).link(), False, None
        if "bar-devices.n_submit" not in ctx.triggered_prop_ids:
            return no_update, False, note(f"Press Enter in that field to plan it on {cluster.counts}.")
        job = context.manager.submit(request)
    except TensorOptError as error:
        return no_update, True, note(f"Devices: {error}", "error")
    said = started(context, job, dcc.Link("Show it", href="/new"))
    return no_update, False, [said, note(f"Left out: {', '.join(left_out)}." if left_out else "", "warn")]


def _budget(data: FrontierData, text: str) -> float | None:
    """Return a typed budget in bytes; a bare number is in the displayed unit."""
    if not text:
        return None
    try:
        budget = read_number(text) * data.units.memory.factor
    except TensorOptError:
        try:
            budget = parse_bytes(text)
        except TensorOptError as error:
            raise TensorOptError("write a size, such as 24GiB") from error
    if not 0 < budget < float("inf"):
        raise TensorOptError("the budget must be above 0")
    if fault := budget_fault(data, budget):
        raise TensorOptError(fault)
    return budget


def _longest_words(view: View) -> str:
    return "" if view.time_s is None else format_seconds(view.time_s)


def _longest(text: str) -> float | None:
    limit = parse_seconds(text) if text else None
    if limit is not None and not 0 < limit < float("inf"):
        raise TensorOptError("the longest step must be above 0 s")
    return limit


_MONEY = ("headroom", "price", "amount")


@CALLBACKS.answer(
    sets=["+goto.data", *(f"{name}.error" for name in _MONEY)],
    when=[f"{name}.value" for name in _MONEY],
    given="url.search listed.data",
)
def _assume(context: Context, headroom: Any, price: Any, amount: Any, search: Any, listed: Any) -> Any:
    """Apply the headroom, price and length of training (``amount``) typed among the assumptions."""
    if not isinstance(listed, list) or (headroom, price, amount) == _money_words(*listed[2:5]):
        return no_update, None, None, None  # the page itself wrote these values
    view, errors = context.view_from(search), dict.fromkeys(_MONEY, "")
    changes: dict[str, Any] = {}
    text = str(headroom or "").strip().removesuffix("%").strip()
    try:
        share = round(read_number(text) / 100, 4) if text else View.headroom
        changes["headroom"] = share
        errors["headroom"] = "" if 0 <= share <= 0.9 else "between 0 and 90 %"
    except TensorOptError as error:
        errors["headroom"] = str(error)
    text = str(price or "").strip()
    try:
        changes["price"] = read_number(text) if text else None
        errors["price"] = "" if changes["price"] is None or changes["price"] > 0 else "more than 0"
    except TensorOptError as error:
        errors["price"] = str(error)
    changes["amount"] = str(amount or "").strip()
    errors["amount"] = said_fault(changes["amount"])
    said = [errors[name] or None for name in _MONEY]
    link = view.link(**changes) if not any(said) else view.link()
    return no_update if any(said) or link == view.link() else link, *said


@CALLBACKS.answer(sets="faster.children", when="faster-show.n_clicks drawn.data", given="url.search")
def _faster(context: Context, clicks: Any, _: Any, search: Any) -> Any:
    """Show what shortens the selected plan's step, while that section is open."""
    data = context.frontier(view := context.view_from(search))
    if data is None or view.beside or not clicks or clicks % 2 == 0:
        return None
    row = data.chosen(view)
    try:
        found = what_is_faster(data.exploration, row)
    except TensorOptError as error:
        return parts.hint(str(error))
    if not found:
        return parts.hint("No faster links, kernels or host would shorten this step.")
    rows = [
        [one.title, two_digits(one.time_s), f"−{share_words(1 - one.time_s / data.time[row])}"]
        for one in found
    ]
    words = parts.hint("The plan stays the same; a search with such hardware may find a better one.")
    return [parts.plain_table(["the step with", "a step", ""], rows, numbers=(1, 2)), words]


CALLBACKS.in_browser("tensoropt.grid", sets="+gridded.data", when="points-show.n_clicks")


@CALLBACKS.answer(
    sets="points-place.children", when="points-show.n_clicks listed.data gridded.data", given="url.search"
)
def _points(context: Context, clicks: Any, _: Any, gridded: Any, search: Any) -> Any:
    """Make the table of points when requested; remove it with another frontier or budget."""
    data = context.frontier(context.view_from(search))
    if data is None or ctx.triggered_id == "listed" or not clicks or not gridded:
        return None
    return points_table(data, context.view_from(search))


def points_table(data: FrontierData, view: View) -> Any:
    """Return the points in a table that sorts and filters; if there are many, only every n-th."""
    size, second = data.units.memory, data.units.time
    step = -(-len(data) // _MOST_ROWS)
    rows = [
        {
            "id": str(row),
            "point": row + 1 if row < len(data.exploration.points) else None,
            "needs": float(f"{size.of(float(data.needs[row])):.4g}"),
            "time": float(f"{second.of(float(data.time[row])):.4g}"),
            "fits": data.verdict(view, row),
            "by": data.title(row) if row >= len(data.exploration.points) else "",
            "is": ", ".join(data.notable.get(row, ())),
            "plan": data.exploration.names[row],
        }
        for row in range(0, len(data), step)
    ]
    columns = [
        parts.numbers("point", "point", 80, parts.D3.format("d")),
        parts.numbers("needs", f"needs, {size.name}", 116, parts.D3.format(",.3~r")),
        parts.numbers("time", f"time, {second.name}", 108, parts.D3.format(",.3~r")),
        {"field": "fits", "headerName": "verdict", "width": 118},
        {"field": "is", "headerName": "what it is", "width": 190},
        {"field": "by", "headerName": "found by", "width": 160},
        {"field": "plan", "headerName": "plan", "width": 620, "tooltipField": "plan"},
    ]
    table = parts.grid(
        "points", columns, 380, {"rowHeight": 30, "headerHeight": 34, "rowSelection": parts.ONE_ROW},
        column={"filter": True}, rowData=rows,
    )  # fmt: skip
    said = f"Every {step}th of {len(data):,}; the CSV has all." if step > 1 else ""
    return [table, parts.hint(f"{said} Click a row to select it.")]


CALLBACKS.in_browser("result.clicked", sets="clicked.data", when="graph.clickData")
CALLBACKS.in_browser("result.row", sets="+clicked.data", when="points.selectedRows")
