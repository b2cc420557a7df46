"""The reasons why a plan is not faster: what binds it, lower bounds, and what each change would gain.

The bottleneck of a step is computation, the links that are waited for, idle devices, the host, or the budget.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tensoropt.console import columns
from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.plan.point import Point
from tensoropt.report.changes import Change, changes, was_searched
from tensoropt.report.detail import detail as detail_of
from tensoropt.report.explain import parts_table
from tensoropt.report.levers import (
    IMPOSSIBLE,
    OF_SIMULATED,
    SIMULATED,
    TO_EXPLORE,
    Lever,
    explored_lever,
    gain_words,
    memory_levers,
    searched_micro_batches,
    simulated_levers,
    unlimited_memory,
    without_waiting,
)
from tensoropt.report.step_parts import (
    COMPUTING,
    HOST,
    IDLE,
    WAITING,
    Detail,
    Part,
    largest_words,
    remedies,
    step_parts,
    waits_of,
)
from tensoropt.units import format_bytes, format_seconds

_LEAST = 0.005
"""Smaller shares of a step are not mentioned."""
_LARGEST = 3
"""The most parts of a step that a sentence names."""


@dataclass(frozen=True)
class _Binding:
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
) -> _Binding:
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
        # With a comma behind a clause.
        IDLE: point.kind.idle.capitalize() + ("," if "," in point.kind.idle else ""),
    }
    share = 100 * waits[key] / (point.time_s or 1.0)
    sentence = f"{words[key]} binds: {share:.0f} % of a step of {format_seconds(point.time_s)}."
    sentences = [
        sentence,
        _largest(parts, key),
        *remedies(parts)[:1],
        _budget_words(exploration, index, memory_bytes, within, limit),
    ]
    return _Binding(parts, key, " ".join(filter(None, sentences)))


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
    best, fastest, needs = points[within], points[-1], float(exploration.needs[len(points) - 1])
    sentences = []
    if best.time_s < point.time_s * (1 - 1e-9):
        sentences.append(
            f"Point {within + 1} fits {format_bytes(memory_bytes)} and is faster: "
            f"{_faster(point.time_s, best)}."
        )
    if fastest.time_s < best.time_s * (1 - _LEAST):
        more = (
            f"the frontier's fastest plan needs {format_bytes(needs)} and takes "
            f"{_faster(point.time_s, fastest)}."
        )
        sentences.append(f"{said} binds, too: {more}" if limit else f"No memory budget is set; {more}")
    elif not sentences:
        sentences.append(
            f"{said} does not bind: no plan that was searched is faster."
            if limit
            else "No plan that was searched is faster."
        )
    return " ".join(sentences)


def _faster(before_s: float, point: Point) -> str:
    time_s = point.time_s
    percent = 100 * (time_s / before_s - 1)
    # Below one percent, its first figure: "−0 %" would say that nothing changes.
    change = f"{percent:+.0f}" if abs(percent) >= 1 else f"{percent:+.1g}"
    change = change.replace("-", "−")
    return f"{format_seconds(time_s)} ({change} %)"


@dataclass(frozen=True, repr=False)
class Why:
    """The bottleneck of a point, and what would make it faster.

    Attributes:
        index: the point's place in ``all_points``; its number is one more.
        memory_bytes: the budget: the one given, otherwise what the point itself needs.
        within: the frontier's fastest point that fits the budget.
        unchanged_s: that point's seconds, if it is faster than this one; otherwise None.
        bounds: lower bounds on the step.
        levers: changes whose answers are known.
        deeper: changes that are to be explored, or have been.
        notes: what could not be answered, and why.
    """

    index: int
    title: str
    name: str
    time_s: float
    memory_bytes: float
    within: int
    unchanged_s: float | None
    binding: _Binding
    bounds: tuple[Lever, ...]
    levers: tuple[Lever, ...]
    deeper: tuple[Lever, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "\n".join(why_lines(self))

    def answered(self, key: str, title: str, changed: Exploration) -> Lever:
        """Return what an exploration with a change says about this point's budget."""
        return explored_lever(key, title, changed, self.memory_bytes, self.unchanged_s)

    def with_explored(self, lever: Lever, note: str = "") -> Why:
        """Return the same with the answer of an explored change in place of the question."""
        deeper = tuple(lever if other.key == lever.key else other for other in self.deeper)
        if lever not in deeper:
            deeper = (*deeper, lever)
        return replace(self, deeper=deeper, notes=(*self.notes, *([note] if note else [])))

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data; points are counted from 1."""
        return {
            "point": self.index + 1,
            "title": self.title,
            "name": self.name,
            "time_s": self.time_s,
            "memory_bytes": self.memory_bytes,
            "within": self.within + 1,
            "unchanged_s": self.unchanged_s,
            "binding": asdict(self.binding),
            "bounds": [lever.to_dict() for lever in self.bounds],
            "levers": [lever.to_dict() for lever in self.levers],
            "deeper": [lever.to_dict() for lever in self.deeper],
            "notes": list(self.notes),
        }


def why_point(
    exploration: Exploration, index: int, *, memory_bytes: float | None = None, folder: str = "DIR"
) -> Why:
    """Say why point ``index`` of ``exploration.all_points`` is not faster.

    Answers are looked up or simulated at once; what needs a search is listed with its command
    (:func:`tensoropt.api.explore_changed` runs it).

    Args:
        memory_bytes: the budget per device; by default what the point needs.
        folder: the exploration's folder, for commands.

    Raises:
        TensorOptError: there is no such point.
        InfeasibleError: the point does not fit the budget.
    """
    quick = looked_up(exploration, index, memory_bytes=memory_bytes, folder=folder)
    return with_simulated(exploration, quick)


def looked_up(
    exploration: Exploration,
    index: int,
    *,
    memory_bytes: float | None = None,
    folder: str = "DIR",
    detail: Detail | None = None,
) -> Why:
    """Return :func:`why_point` without what needs a simulation of the plan under changed costs.

    Args:
        detail: the point's detail, if it is already known.
    """
    count = len(exploration.all_points)
    if not 0 <= index < count:
        raise TensorOptError(f"there is no point {index + 1}; there are points 1 to {count}")
    point, needs = exploration.all_points[index], float(exploration.needs[index])
    if memory_bytes is None:
        budget, limit = needs, ""
    else:
        budget, limit = memory_bytes, f"the memory budget of {format_bytes(memory_bytes)}"
        if needs > budget:
            raise InfeasibleError(
                f"{exploration.title(index)} needs {format_bytes(needs)}, more than the budget "
                f"of {format_bytes(budget)}; take a point that fits, or a larger budget"
            )
    fastest = exploration.fastest_within(budget)
    within = fastest or 0  # a planner's plan may need less memory than the leanest point
    best_s = exploration.points[within].time_s
    notes = []
    if detail is None:
        try:
            detail = detail_of(exploration, index)
        except TensorOptError as error:
            notes.append(f"operators and links are not distinguished: {error}")
    return Why(
        index=index,
        title=exploration.title(index),
        name=exploration.names[index],
        time_s=point.time_s,
        memory_bytes=budget,
        within=within,
        unchanged_s=best_s if fastest is not None and best_s < point.time_s * (1 - 1e-9) else None,
        binding=binding(exploration, index, detail, budget, within, limit=limit),
        bounds=(
            unlimited_memory(exploration),
            *((without_waiting(exploration, index),) if point.kind.bound else ()),
        ),
        levers=memory_levers(exploration, budget),
        deeper=_deeper(exploration, index, budget, folder, notes),
        notes=tuple(notes),
    )


def with_simulated(exploration: Exploration, why: Why) -> Why:
    """Return what was looked up, with the answers of simulating the plan under changed costs."""
    try:
        bounds, levers = simulated_levers(exploration, why.index)
    except TensorOptError as error:
        return replace(why, notes=(*why.notes, str(error)))
    return replace(why, bounds=(*why.bounds, *bounds), levers=(*why.levers, *levers))


def _deeper(
    exploration: Exploration, index: int, memory_bytes: float, folder: str, notes: list[str]
) -> tuple[Lever, ...]:
    """Return the changes that are to be explored."""
    if exploration.recorded is None:
        notes.append(
            "nothing can be explored from it: it was saved without its operator graph (by an older version, "
            "or for an operator that no file can hold); explore the model again"
        )
        return ()
    return tuple(
        _to_explore(exploration, index, memory_bytes, folder, change)
        for change in changes(exploration, index)
    )


def _to_explore(
    exploration: Exploration, index: int, memory_bytes: float, folder: str, change: Change
) -> Lever:
    if was_searched(change):
        space = exploration.spaces[exploration.all_points[index].space]
        return replace(
            searched_micro_batches(exploration, 2 * space.micro_batches, memory_bytes, change.title),
            key=change.key,
        )
    if change.refusal:
        return Lever(change.key, change.title, IMPOSSIBLE, words=change.refusal)
    command = _why_command(folder, index, len(exploration.points), change.key)
    return Lever(change.key, change.title, TO_EXPLORE, words=change.remark, command=command)


def _why_command(folder: str, index: int, points: int, key: str) -> str:
    """Return the command that explores a change for a point."""
    point = ["--point", str(index + 1)] if index < points else []
    out = f"out/{key.replace(':', '-')}"
    return shlex.join(["tensoropt", "why", folder, *point, "--deep", key, "--out", out])


def why_lines(why: Why) -> list[str]:
    """Return all of it as text."""
    lines = [
        f"{why.title}: {format_seconds(why.time_s)} per step, within {format_bytes(why.memory_bytes)} per "
        "device",
        f"  {why.name}",
        "",
        why.binding.sentence,
        "",
        parts_table(why.binding.parts),
        "",
        "at least",
        _levers(why, why.bounds),
        "",
        f"what would make it faster, within {format_bytes(why.memory_bytes)} unless stated otherwise",
        _levers(why, why.levers),
        *([OF_SIMULATED] if any(lever.how == SIMULATED for lever in why.levers) else []),
    ]
    if why.deeper:
        lines += ["", "with a separate search", _levers(why, why.deeper)]
        lines += [lever.command for lever in why.deeper if lever.command]
    return [*lines, *(f"note: {note}" for note in why.notes)]


def _levers(why: Why, levers: Sequence[Lever]) -> str:
    rows = [["", "time", "change", "memory", "point", "how", ""]]
    for lever in levers:
        gain = gain_words(why.time_s, lever)
        rows.append(
            [
                lever.title,
                "-" if lever.time_s is None else format_seconds(lever.time_s),
                gain.partition(",")[0] or "-",
                "-" if lever.memory_bytes is None else format_bytes(lever.memory_bytes),
                "-" if lever.index is None else str(lever.index + 1),
                lever.how,
                lever.words,
            ]
        )
    return columns(rows, left=(0, 5, 6))
