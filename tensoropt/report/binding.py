"""The bottleneck of a step: computation, the links that are waited for, idle devices, the host, or the
budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensoropt.plan.exploration import Exploration
from tensoropt.plan.point import Point
from tensoropt.report.rows import Detail
from tensoropt.report.step_parts import (
    COMPUTING,
    HOST,
    IDLE,
    WAITING,
    Part,
    idle_title,
    largest_words,
    step_parts,
    waits_of,
)
from tensoropt.units import format_bytes, format_seconds

_LEAST = 0.005
"""Smaller shares of a step are not mentioned."""
_LARGEST = 3
"""The most parts of a step that a sentence names."""


@dataclass(frozen=True)
class Binding:
    """The parts of a step's time, and which of them binds.

    Attributes:
        parts: the parts of the step, which add up to it; communication by the links that are waited for, if
            known.
        key: the key of the largest part, with communication counted as one.
        sentence: what binds, with its share, and whether the budget binds, too.
    """

    parts: tuple[Part, ...]
    key: str
    sentence: str


def binding(
    exploration: Exploration,
    index: int,
    detail: Detail | None,
    memory_bytes: float,
    within: int,
    *,
    limit: str = "",
) -> Binding:
    """Return what binds point ``index`` of ``all_points`` within a budget.

    Args:
        detail: the point's detail; without it nothing is said about operators and links.
        memory_bytes: the bytes that plans may need; those that the point needs if nobody set a limit.
        within: the frontier's fastest point that fits.
        limit: what the limit is called, with its size; "" if nobody set one.
    """
    point = exploration.all_points[index]
    parts = detail.parts if detail is not None else step_parts(exploration, index, None, {}, ())
    waits = waits_of(point)
    key = max(waits, key=lambda name: waits[name])
    words = {
        COMPUTING: "Computation",
        WAITING: "Communication that is waited for" + _links_words(parts),
        HOST: "The host, which issues work more slowly than the device does it,",
        IDLE: idle_title(point).capitalize() + ("," if point.pipeline is not None else ""),
    }
    share = 100 * waits[key] / (point.time_s or 1.0)
    sentence = f"{words[key]} binds: {share:.0f} % of a step of {format_seconds(point.time_s)}."
    told = [
        sentence,
        _largest(parts, key),
        _budget_words(exploration, index, memory_bytes, within, limit),
    ]
    return Binding(parts, key, " ".join(filter(None, told)))


def _largest(parts: Sequence[Part], key: str) -> str:
    """Name the largest parts in a sentence, without what was said to bind; "" if nothing is distinguished."""
    if not any(part.count for part in parts):
        return ""
    words = largest_words([part for part in parts if part.key == COMPUTING or part.key != key], _LARGEST)
    return words and f"{'Its largest parts' if key == COMPUTING else 'Beside it'}: {words}."


def _links_words(parts: Sequence[Part]) -> str:
    waits = [part for part in parts if part.key == WAITING]
    if len(waits) < 2:
        return f" ({waits[0].title.removeprefix('waiting for ')})" if waits else ""
    return f", most of all {waits[0].title.removeprefix('waiting for ')},"


def _budget_words(exploration: Exploration, index: int, memory_bytes: float, within: int, limit: str) -> str:
    """Say whether the limit binds: within it, beyond it, or not at all. Without a limit, say what more memory
    buys."""
    said = limit[:1].upper() + limit[1:]
    points, point = exploration.points, exploration.all_points[index]
    best, fastest = points[within], points[-1]
    told = []
    if best.time_s < point.time_s * (1 - 1e-9):
        told.append(
            f"Point {within + 1} fits {format_bytes(memory_bytes)} and is faster: "
            f"{_faster(point.time_s, best)}."
        )
    if fastest.time_s < best.time_s * (1 - _LEAST):
        more = (
            f"the frontier's fastest plan needs {format_bytes(fastest.memory_bytes)} and takes "
            f"{_faster(point.time_s, fastest)}."
        )
        told.append(f"{said} binds, too: {more}" if limit else f"No memory budget is set; {more}")
    elif not told:
        told.append(
            f"{said} does not bind: no plan of the frontier is faster, whatever it needs."
            if limit
            else "No plan of the frontier is faster, whatever memory it needs."
        )
    return " ".join(told)


def _faster(before_s: float, point: Point) -> str:
    time_s = point.time_s
    percent = 100 * (time_s / before_s - 1)
    # Below one percent, its first figure: "−0 %" would say that nothing changes.
    change = f"{percent:+.0f}" if abs(percent) >= 1 else f"{percent:+.1g}"
    change = change.replace("-", "−")
    return f"{format_seconds(time_s)} ({change} %)"
