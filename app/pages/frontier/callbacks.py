"""The callbacks of the frontier page: events change the view, the view draws the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dash import Patch, ctx, dcc, no_update, set_props

from tensoropt.errors import TensorOptError
from tensoropt.exploration.notable import CARDS_GIB

from ... import events, state
from ...context import Context
from ...figures import frontier as drawing
from ...figures.frontier import Window
from ...figures.palette import palette
from ...state import View
from ...views.certificate import certificate_sentence
from ...views.frontier import (
    FrontierData,
    address_sentences,
    axes_of,
    axis_sentence,
    count_words,
    far_sentence,
    filter_sentence,
    limit_sentence,
    mark_sentence,
)
from ...views.runs import choices
from ..parts import difference_table, empty, note, stored, view_of, visible
from ..wiring import Callbacks
from .look import ANSWER, answered, card, look, selection

CALLBACKS = Callbacks()


_BUTTONS = (
    "pick-leanest", "pick-knee", "pick-fastest", "compare-this", "compare-swap", "compare-clear",
    *(f"budget-{size}" for size in CARDS_GIB),
)  # fmt: skip
_LIMITS = ("budget", "target")
_FIELDS = (
    *_LIMITS, "headroom", "price", "options", "filter-mesh", "filter-micro", "filter-devices", "axis-x",
    "axis-y", "amount", "currency",
)  # fmt: skip
_TYPED = ("budget-text", "target-text", "headroom", "price", "amount", "currency")
"""The controls whose text may break a rule, which is then shown next to them."""
_AT_ONCE = ("graph", "points", "key", *_BUTTONS)
"""The controls that a person may have used before the first answer; the values of others are then not a
person's."""
_SECOND = {"graph": events.on_click, "points": events.on_row}
"""The controls that pick the compared point while clicks compare."""


_EVENTS = (
    "url.search",
    "exploration.value",
    *(f"{name}-rest.data" for name in _LIMITS),
    *(f"{name}.value" for name in _FIELDS if name not in _LIMITS),
    *(f"{name}-text.{fired}" for name in _LIMITS for fired in ("n_submit", "n_blur")),
    *("graph.clickData", "points.cellClicked", "points.eventData", "key.data"),
    *(f"{name}.n_clicks" for name in _BUTTONS),
)
"""The properties whose changes change the view."""


for name in _LIMITS:
    # While a slider is dragged the browser alone answers; it asks the server when the slider rests.
    CALLBACKS.in_browser(
        f"limits.{name}",
        sets=[f"{name}-slid.data"],
        when=[f"{name}.value"],
        given=["filled.data", "places.data", f"{name}.max", f"{name}.step"],
    )

CALLBACKS.in_browser("tensoropt.fired", sets="fired.data", when=_EVENTS, given="fired.data")


@CALLBACKS.answer(
    sets=["state.data", *(f"{name}.error" for name in _TYPED), "answered.data", "handled.data"],
    when=_EVENTS,
    given="state.data handled.data filled.data fired.data budget-text.value target-text.value "
    "click-mode.value scheme.data page.data narrow.data",
    at_start=True,
)
def _change(context: Context, *values: Any) -> Any:
    kept, handled, filled, order, budget_text, target_text, mode, *seen = values[len(_EVENTS) :]
    now = dict(zip(_EVENTS, values, strict=False))
    fired = unhandled(now, handled, filled, order, [item["prop_id"] for item in ctx.triggered])
    # The page has just been opened, or a link was followed: the URL decides, and the controls' values are
    # old.
    first = kept is None or handled is None
    if first or "url" in fired:
        opened = view_from_url(context, values[0])
        if first:
            # What is drawn at first can be clicked before the page knows what it shows.
            early = {name: fired[name] for name in _AT_ONCE if fired.get(name) is not None}
            opened, _ = _applied(context.frontier(opened), opened, early, mode)
        # Controls follow the state when it is written, also one that the layout came with.
        news = no_update if not first and opened == view_of(kept) else stored(opened)
        return news, *[None] * len(_TYPED), _number(fired.get("key")), now
    view = view_of(kept)
    if fired.get("exploration"):
        view = _opened(context, state.open_exploration(view, str(fired["exploration"])))
    typed = {"budget-text": budget_text, "target-text": target_text}
    # The event only counts presses of Enter; the text is beside it.
    fired |= {name: text for name, text in typed.items() if name in fired}
    view, errors = _applied(context.frontier(view), view, fired, mode)
    if view.exploration != view_of(kept).exploration:  # not as the page itself fills in the choice
        _show(context, view, *seen)
    return (
        # Not written if nothing changed, or controls that follow the state would fire in a circle.
        no_update if view == view_of(kept) else stored(view),
        # An error stays shown until its field is changed, by a person or by the view that it follows.
        *(errors.get(name) if name in fired or view != view_of(kept) else no_update for name in _TYPED),
        _number(fired.get("key")),
        now,
    )


def _show(context: Context, view: View, scheme: Any, page: Any, narrow: Any) -> None:
    """Send plot and card of another exploration with the answer to the choice, so that they need no further
    request."""
    data = context.frontier(view) if page == "frontier" else None
    if data is None or view.point is None:
        return
    for name, properties in look(context, data, view, str(scheme), narrow=bool(narrow)).items():
        set_props(name, properties)


def unhandled(
    now: Mapping[str, Any], handled: Any, filled: Any, order: Any, triggered: Sequence[str]
) -> dict[str, Any]:
    """Return the values of the controls that fired and have had no answer yet, by control, the latest last.

    A browser drops the answer to a request that is repeated meanwhile: on a slow server, the answer to a
    click that another control followed. The effect of that click is still there, as a value that no answer
    has handled.

    Args:
        now: the values by ``control.property``.
        handled: the values that the last answer to arrive had seen; None before the first.
        filled: the values that the page itself set.
        order: the names in the order in which they fired since the page was opened.
        triggered: the names that fired this time.
    """
    earlier = handled if isinstance(handled, Mapping) else now
    shown = filled if isinstance(filled, Mapping) else {}
    missed = [
        name
        for name, value in now.items()
        if name not in triggered and value not in (earlier.get(name), shown.get(name))
    ]
    if isinstance(order, list):
        # In the order in which a person did them, as later events may depend on earlier ones.
        missed.sort(key=lambda name: order.index(name) if name in order else -1)
    return {name.rpartition(".")[0]: now[name] for name in (*missed, *triggered) if name in now}


def _number(key: Any) -> Any:
    """Return which press of a key this was: the browser sends the next one when it receives that number."""
    return key.get("n") if isinstance(key, Mapping) else no_update


def _applied(
    data: FrontierData | None, view: View, fired: Mapping[str, Any], mode: Any
) -> tuple[View, dict[str, str]]:
    """Return the view after every control that fired, and what could not be understood, by control."""
    errors: dict[str, str] = {}
    for name, value in fired.items():
        if data is None or name not in events.EVENTS:
            continue
        try:
            if mode == "compare" and name in _SECOND:
                view = _SECOND[name](view, data, value, True)
            else:
                view = events.EVENTS[name](view, data, value)
        except events.NotUnderstoodError as error:
            errors[name] = str(error)
    return view, errors


def view_from_url(context: Context, search: Any) -> View:
    """Return the view that a link asks for; without an exploration, the first one."""
    view = View.from_query(str(search or ""))
    if not view.exploration:
        first = next(iter(context.library.entries()), None)
        view = replace(view, exploration=first.key) if first else view
    return _opened(context, view)


def _opened(context: Context, view: View) -> View:
    data = context.frontier(view)
    return view if data is None else state.opened(view, data)  # the page says what is wrong with it


@CALLBACKS.answer(sets="exploration.data", when="page.data finished.data runs-edited.data", at_start=True)
def _list_explorations(context: Context, *_: Any) -> Any:
    return choices(context.library)


_CONTROLS = ("exploration", *_FIELDS, "budget-text", "target-text")
_SCALES = [(name, end) for name in _LIMITS for end in ("min", "max", "step", "thumbLabel")]
_FILTERS = [name for name in _FIELDS if name.startswith("filter-")]


@CALLBACKS.answer(
    sets=[
        *(f"+{n}.value" for n in _CONTROLS),
        *(f"{n}.{p}" for n, p in _SCALES),
        *(f"{n}.data" for n in _FILTERS),
        "filled.data",
    ],
    when="controls.data",
    given=["state.data", *(f"{n}.value" for n in _CONTROLS), *(f"{n}.{p}" for n, p in _SCALES)],
)
def _follow(context: Context, _: Any, kept: Any, *have: Any) -> Any:
    """Make controls show the state, except those that already show it: a person may be moving them."""
    view, values, limits = view_of(kept), have[: len(_CONTROLS)], have[len(_CONTROLS) :]
    data = context.frontier(view)
    if data is None:
        kept = [no_update] * (len(_CONTROLS) + len(_SCALES) + len(_FILTERS) - 1)
        return view.exploration, *kept, {"exploration.value": view.exploration}
    wanted, ranges = _wanted(view, data)
    return (
        *(no_update if old == wanted[n] else wanted[n] for n, old in zip(_CONTROLS, values, strict=True)),
        *(no_update if old == ranges[n] else ranges[n] for n, old in zip(_SCALES, limits, strict=True)),
        *(_choices(data, view, n.removeprefix("filter-")) for n in _FILTERS),
        {f"{n}.value": wanted[n] for n in _CONTROLS} | {f"{n}-rest.data": wanted[n] for n in _LIMITS},
    )


def _choices(data: FrontierData, view: View, name: str) -> list[str]:
    """Return what a filter offers; also what a link asks for in vain, so that it is seen and can be
    cleared."""
    offered = data.filters()[name]
    asked = str(getattr(view, name))
    return offered if asked in ("", *offered) else [*offered, asked]


def _wanted(view: View, data: FrontierData) -> tuple[dict[str, Any], dict[tuple[str, str], float | str]]:
    """Return what every control shows for a view, and the ends of the sliders."""
    ranges: dict[tuple[str, str], float | str] = {}
    values: dict[str, Any] = {}
    for name, limits, limit, unit in (
        ("budget", events.budget_range(data, view), view.budget_bytes, data.units.memory),
        ("target", events.target_range(data), view.target_s, data.units.time),
    ):
        low, high, step = limits
        ranges |= {(name, "min"): low, (name, "max"): high, (name, "step"): step}
        # A screen reader would only say the number.
        title = "Memory budget" if name == "budget" else "Time target"
        ranges[name, "thumbLabel"] = f"{title} in {unit.name}"
        values[name] = high if limit is None else min(max(limit / unit.factor, low), high)
        values[f"{name}-text"] = "" if limit is None else unit.limit(limit).replace(",", "")
    values |= {
        "exploration": view.exploration,
        "headroom": f"{round(100 * view.headroom, 2):g}",
        "price": "" if view.price is None else f"{view.price:.10g}",
        "options": events.options_of(view),
        "filter-mesh": view.mesh or None,
        "filter-micro": view.micro or None,
        "filter-devices": view.devices or None,
        "axis-x": view.across,
        "axis-y": view.up,
        "amount": view.amount,
        "currency": view.currency,
    }
    return values, ranges


CALLBACKS.in_browser("tensoropt.zoom", sets="zoom.data", when="graph.relayoutData", given="zoom.data")


@CALLBACKS.answer(
    sets="graph.figure points-count.children drawn.data",
    when="frame.data scheme.data page.data",
    given="state.data drawn.data zoom.data points-count.children narrow.data",
    at_start=True,
)
def _draw(
    context: Context, frame: Any, scheme: Any, page: Any, kept: Any, drawn: Any, zoom: Any, counted: Any,
    narrow: Any,
) -> Any:  # fmt: skip
    view = view_of(kept)
    key = [frame, scheme]
    data = context.frontier(view) if page == "frontier" and kept else None
    # `page` fires this too, so that a frontier that was opened on another page is drawn when it is shown,
    # once.
    if data is None or (drawn or [])[:2] == key:
        return (no_update,) * 3
    figure = drawing.frontier_figure(data, view, str(scheme), Window.read(zoom), narrow=bool(narrow))
    count = count_words(data, view)
    return figure, no_update if count == counted else count, [*key, selection(view)]


@CALLBACKS.answer(sets="+graph.figure", when="zoom.data", given="scheme.data state.data")
def _finer(context: Context, zoom: Any, scheme: Any, kept: Any) -> Any:
    """Draw more of the points where a person zoomed in, if not all are drawn."""
    view = view_of(kept)
    data = context.frontier(view)
    if data is None or not drawing.is_thinned(data, view):
        return no_update
    traces = drawing.frontier_figure(data, view, str(scheme), Window.read(zoom))["data"]
    patch = Patch()
    for place in range(drawing.MARKS):
        patch["data"][place] = traces[place]
    return patch


CALLBACKS.in_browser(
    "tensoropt.after",
    sets="list-now.data +selection.data",
    when="drawn.data",
    given="listing.data listed.data selection.data",
    at_start=True,
)


@CALLBACKS.answer(sets="+graph.figure", when="selection.data", given="drawn.data scheme.data state.data")
def _mark(context: Context, moved: Any, drawn: Any, scheme: Any, kept: Any) -> Any:
    if isinstance(moved, list) and moved[-1:] == ["drawn"]:  # with a plot that is drawn anew
        return no_update
    view = view_of(kept)
    data = context.frontier(view)
    if data is None or not drawn or view.point is None:
        return no_update
    return marking(data, view, str(scheme))


def marking(data: FrontierData, view: View, scheme: str) -> Patch:
    """Return only what a selection moves: three traces of one point, the two veils, the budget's line and
    words."""
    colours = palette(scheme)
    patch = Patch()
    traces = drawing.selection_traces(data, view, colours)
    for place, trace in zip((drawing.KNEE, drawing.OTHER, drawing.SELECTED), traces, strict=True):
        for name in {"x", "y", "showlegend", "error_y"} & trace.keys():
            patch["data"][place][name] = trace[name]
    veils = drawing.shapes(data, view, colours)
    for place in (drawing.BUDGET, drawing.TARGET, drawing.LIMIT):
        patch["layout"]["shapes"][place] = veils[place]
    patch["layout"]["annotations"][drawing.LABEL] = drawing.budget_label(data, view, colours)
    return patch


@CALLBACKS.answer(
    sets="frontier-empty.children frontier-body.style", when="listing.data", given="state.data", at_start=True
)
def _body(context: Context, _: Any, kept: Any) -> Any:
    view = view_of(kept)
    if not view.exploration:
        first = dcc.Link("Will your model fit? An answer at once, before any search.", href="/fit")
        said = "Start an exploration on the Explore page; its frontier appears here."
        return empty("No exploration yet", said, first), visible(False)
    try:
        exploration = context.exploration(view)
    except TensorOptError as error:
        return empty("This exploration cannot be shown", str(error)), visible(False)
    data = context.frontier(view)
    if exploration is None or data is None:
        text = empty("This exploration holds no points", "Explore again with a larger budget.")
        return text, visible(False)
    return None, {}


@CALLBACKS.answer(sets=[f"{name}.{title}" for name, title in ANSWER], when="pick.data", at_start=True)
def _answer(context: Context, pick: Any) -> Any:
    """Write the answer anew; the field in it keeps what is typed."""
    view = view_of(pick)
    data = context.frontier(view)
    if data is None:
        return [no_update] * len(ANSWER)
    return [value for properties in answered(data, view).values() for value in properties.values()]


@CALLBACKS.answer(
    sets="frontier-notes.children card.children comparison.children comparison-panel.style",
    when="pick.data",
    given="url.search",
)
def _words(context: Context, pick: Any, search: Any) -> Any:
    view = view_of(pick)
    data = context.frontier(view)
    if data is None or view.point is None:
        return None, None, None, visible(False)
    # Of the address until something else is chosen.
    followed = view == view_from_url(context, search)
    notes = [
        *(note(said, "warn") for said in address_sentences(data, str(search or "")) if followed),
        note(filter_sentence(data, view), "warn"),
        note(axis_sentence(axes_of(data, view), view)),
        note(limit_sentence(data, view), "warn"),
        note(mark_sentence(data)) if view.marks else None,
        note(far_sentence(data, view)) if view.marks else None,
        note(certificate_sentence(data, view)),
        note(drawing.THINNED) if drawing.is_thinned(data, view) else None,
    ]
    seen = visible(view.other is not None)
    return [n for n in notes if n], card(context, data, view), difference_table(data, view), seen
