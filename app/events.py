"""A person's actions on a page, applied to the view: one small function per control.

Every control may fire although nobody did anything (a callback filled it in); then the view stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.exploration.notable import CARDS_GIB
from tensoropt.units import parse_bytes, parse_seconds, read_number

from . import state
from .jobs.fields import RequestError, number, price_from
from .state import View
from .views.frontier import FrontierData


class NotUnderstoodError(TensorOptError):
    """The text in a field is not of the kind that the field takes."""


_SLIDER_STEPS = 400


def _slider_range(low: float, high: float) -> tuple[float, float, float]:
    """Return (min, max, step) of a limit's slider: its right end lies above every point and means no
    limit."""
    room = (high - low) or high or 1.0
    # Two figures, so that the values that a slider stands on are readable.
    step = float(f"{room / _SLIDER_STEPS:.2g}")
    # A few steps of room at both ends: the largest point and "no limit" must be apart.
    return max(low - 4 * step, 0.9 * low), high + 8 * step, step


def budget_range(data: FrontierData, view: View) -> tuple[float, float, float]:
    """Return the ends and the step of the memory slider, in the unit shown: as far as the plot shows
    memory."""
    size, largest = data.units.memory.factor, float(data.needs.max())
    if data.near_capacity(largest, view):
        largest = max(largest, data.capacity_bytes)
    return _slider_range(float(data.needs.min()) / size, largest / size)


def target_range(data: FrontierData) -> tuple[float, float, float]:
    """Return the ends and the step of the time slider, in the unit shown."""
    second = data.units.time.factor
    return _slider_range(float(data.time.min()) / second, float(data.time.max()) / second)


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number; JSON's true is not one."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _slid(value: Any, limits: tuple[float, float, float], factor: float, old: float | None) -> float | None:
    """Return the limit that a slider stands for: None at its right end, the old one while it has not
    moved."""
    _, high, step = limits
    if not _is_number(value) or value >= high - step:
        return None
    # A typed limit lies between two steps: the slider that shows it must not round it.
    if value <= 0 or (old is not None and abs(old / factor - value) < step / 2):
        return old
    return float(f"{value:.9g}") * factor


def on_budget(view: View, data: FrontierData, value: Any) -> View:
    """Return the view after the memory slider moved: the recommended plan within its limit."""
    unit, budget = data.units.memory.factor, view.budget_bytes
    return _after_slide(view, data, value, budget_range(data, view), unit, budget, state.set_budget)


def _on_target(view: View, data: FrontierData, value: Any) -> View:
    """Return the view after the time slider moved: the plan that needs least within its limit."""
    unit, target = data.units.time.factor, view.target_s
    return _after_slide(view, data, value, target_range(data), unit, target, state.set_target)


def _after_slide(
    view: View, data: FrontierData, value: Any, limits: tuple[float, float, float], factor: float,
    old: float | None, change: Callable[[View, FrontierData, float | None], View],
) -> View:  # fmt: skip
    new = _slid(value, limits, factor, old)
    return view if new == old or _beyond(old, limits, factor, new) else change(view, data, new)


def _beyond(old: float | None, limits: tuple[float, float, float], factor: float, new: float | None) -> bool:
    """Return whether a typed limit lies beyond either end of the slider, which then shows that end; that is
    no change."""
    if old is None:
        return False
    low, high, step = limits
    at = old / factor
    # Half a step: the slider's own least value, which is rounded, may lie a hair below its end.
    return (new is None and at >= high - step) or (
        new is not None and at < low - step / 2 and abs(new / factor - low) < step
    )


def _typed_limit(text: Any, data: FrontierData, kind: str) -> float | None:
    """Return the bytes or seconds in a text field; a bare number is in the unit shown; empty for no limit.

    Raises:
        NotUnderstoodError: the message says what would be understood.
    """
    unit = data.units.memory if kind == "memory" else data.units.time
    words = str(text or "").strip()
    if not words or words.lower() in ("none", "no limit"):
        return None
    try:
        value = read_number(words) * unit.factor
    except TensorOptError:
        try:
            value = parse_bytes(words) if kind == "memory" else parse_seconds(words)
        except TensorOptError as error:
            raise NotUnderstoodError(
                f"write a number and a unit, for example {unit.text(unit.factor * 10)}"
            ) from error
    if not 0 < value < float("inf"):
        raise NotUnderstoodError("a limit is above 0; leave the field empty for no limit")
    return value


def on_budget_text(view: View, data: FrontierData, value: Any) -> View:
    """Return the view after a memory budget was typed."""
    return _typed(view, data, value, "memory")


def on_target_text(view: View, data: FrontierData, value: Any) -> View:
    """Return the view after a time target was typed."""
    return _typed(view, data, value, "time")


def _typed(view: View, data: FrontierData, value: Any, kind: str) -> View:
    wanted = _typed_limit(value, data, kind)
    old = view.budget_bytes if kind == "memory" else view.target_s
    unit = data.units.memory if kind == "memory" else data.units.time
    # Leaving the field without a change gives its own rounded text back.
    if wanted == old or (wanted and old and unit.text(wanted) == unit.text(old)):
        return view
    change = state.set_budget if kind == "memory" else state.set_target
    return change(view, data, wanted)


def on_click(view: View, data: FrontierData, value: Any, second: bool = False) -> View:
    """Return the view after a click on a point of the plot; ``second`` picks the one to compare with."""
    if not isinstance(value, Mapping):
        return view
    hits = value.get("points")
    for hit in hits if isinstance(hits, list) else ():
        custom = hit.get("customdata") if isinstance(hit, Mapping) else None
        row = _row(custom[0], data) if isinstance(custom, list) and custom else None
        # The first hit that is a point: rings around a selection carry no row.
        if row is not None:
            return state.compare(view, row) if second else state.select(view, data, row)
    return view


def on_row(view: View, data: FrontierData, value: Any, second: bool = False) -> View:
    """Return the view after a row of the points' table was chosen, by its id."""
    # A click on the grid says `rowId`; a key pressed in it arrives as the `data` of an event.
    inner = value.get("data", value) if isinstance(value, Mapping) else None
    row = _row(inner.get("rowId", inner.get("row")), data) if isinstance(inner, Mapping) else None
    if row is None:
        return view
    return state.compare(view, row) if second else state.select(view, data, row)


def _row(value: Any, data: FrontierData) -> int | None:
    """Return a row that exists, given a number or its text."""
    text = str(value)
    # `isdigit` alone lets other scripts' digits and superscripts pass, and `int` takes numbers of any length.
    row = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    return row if 0 <= row < len(data) else None


def on_key(view: View, data: FrontierData, value: Any) -> View:
    """Return the view after a key: arrow keys, ends, knee; ``c`` marks the selected point for comparison."""
    if not isinstance(value, Mapping):
        return view
    if value.get("word"):
        return on_word(view, data, value.get("word"))
    step = value.get("step")
    return (
        state.select(view, data, data.neighbour(view, step))
        if _is_number(step) and isinstance(step, int)
        else view
    )


def on_word(view: View, data: FrontierData, word: Any) -> View:
    """Return the view after a word: ``leanest``, ``knee``, ``fastest`` select a point; ``compare``, ``swap``,
    ``clear`` act on the second point."""
    if word == "swap":
        return state.swapped(view)
    if word == "clear":
        return replace(view, other=None)
    if word == "compare":
        # The selected point remains as the second one; the next click or arrow moves on from it.
        return replace(view, other=view.point) if view.point is not None else view
    points = data.special(view)
    return state.select(view, data, points[word]) if isinstance(word, str) and word in points else view


def on_share(view: View, data: FrontierData, value: Any) -> View:
    """Return the view with a headroom in percent; an empty field means the default one.

    Raises:
        NotUnderstoodError: it is not a number, or out of bounds.
    """
    share = _typed_number(str(value or "").strip().removesuffix("%"), "headroom")
    if share is None:
        return replace(view, headroom=View.headroom)
    if not 0 <= share <= 90:
        raise NotUnderstoodError("between 0 and 90 %")
    return replace(view, headroom=round(share / 100, 4))


def on_price(view: View, data: FrontierData, value: Any) -> View:
    """Return the view with a price of a device-hour; an empty field means an unknown one.

    Raises:
        NotUnderstoodError: it is not a number, or out of bounds.
    """
    try:
        return replace(view, price=price_from(value))
    except RequestError as error:
        raise NotUnderstoodError(str(error)) from error


def _typed_number(value: Any, name: str) -> float | None:
    try:
        return number(value, name)
    except RequestError as error:
        raise NotUnderstoodError(str(error)) from error


def _on_options(view: View, data: FrontierData, value: Any) -> View:
    """Return the view with the chips that say how the plot is drawn."""
    chosen = value if isinstance(value, list) else []
    names = ("log_x", "log_y", "lines", "band", "marks")
    drawn: dict[str, Any] = {name: name in chosen for name in names}
    return replace(view, **drawn)


def options_of(view: View) -> list[str]:
    """Return the chips that are on for a view; the inverse of :func:`_on_options`."""
    return [n for n in ("log_x", "log_y", "lines", "band", "marks") if getattr(view, n)]


def _filtered(name: str) -> Callable[[View, FrontierData, Any], View]:
    """Return the event of a filter: a value that occurs, or nothing for all."""

    def on_filter(view: View, data: FrontierData, value: Any) -> View:
        wanted: dict[str, Any] = {name: value if value in data.filters()[name] else ""}
        changed = replace(view, **wanted)
        if changed == view:
            return view
        # Limits select among what the filters keep; without a limit, a point that is filtered out gives way.
        changed = state.repicked(changed, data)
        if changed.point is None or data.passing(changed)[changed.point]:
            return changed
        point = data.picked(changed)
        return changed if point is None else state.select(changed, data, point)

    return on_filter


def said(name: str) -> Callable[[View, FrontierData, Any], View]:
    """Return the event of a text that the view keeps as it is: an amount of training, a currency."""

    def on_said(view: View, data: FrontierData, value: Any) -> View:
        text = str(value or "").strip()
        try:
            state.check_said(name, text)
        except TensorOptError as error:
            raise NotUnderstoodError(str(error)) from error
        kept: dict[str, Any] = {name: text}
        return replace(view, **kept)

    return on_said


def _on_axis(name: str, choices: tuple[str, ...]) -> Callable[[View, FrontierData, Any], View]:
    """Return the event of a choice of what an axis shows; where both would then say the same, the other one
    shows what it usually does."""

    def on_choice(view: View, data: FrontierData, value: Any) -> View:
        kept: dict[str, Any] = {name: value}
        changed = replace(view, **kept) if value in choices else view
        if not state.is_tautology(changed.across, changed.up):
            return changed
        usual: dict[str, Any] = {"up": state.USUAL_UP} if name == "across" else {"across": state.USUAL_ACROSS}
        return replace(changed, **usual)

    return on_choice


def _on_card(size: int) -> Callable[[View, FrontierData, Any], View]:
    """Return the event of a button with the memory of a card."""
    return lambda view, data, _: state.set_budget(view, data, size * 2.0**30)


EVENTS: dict[str, Callable[[View, FrontierData, Any], View]] = {
    "budget-rest": on_budget,
    "target-rest": _on_target,
    "budget-text": on_budget_text,
    "target-text": on_target_text,
    "graph": on_click,
    "points": on_row,
    "key": on_key,
    "headroom": on_share,
    "price": on_price,
    "options": _on_options,
    "amount": said("amount"),
    "currency": said("currency"),
    "axis-x": _on_axis("across", state.ACROSS),
    "axis-y": _on_axis("up", state.UP),
    "filter-mesh": _filtered("mesh"),
    "filter-micro": _filtered("micro"),
    "filter-devices": _filtered("devices"),
    "pick-leanest": lambda view, data, _: on_word(view, data, "leanest"),
    "pick-knee": lambda view, data, _: on_word(view, data, "knee"),
    "pick-fastest": lambda view, data, _: on_word(view, data, "fastest"),
    "compare-this": lambda view, data, _: on_word(view, data, "compare"),
    "compare-swap": lambda view, data, _: on_word(view, data, "swap"),
    "compare-clear": lambda view, data, _: on_word(view, data, "clear"),
    **{f"budget-{size}": _on_card(size) for size in CARDS_GIB},
}
"""The events by the id of the control."""
