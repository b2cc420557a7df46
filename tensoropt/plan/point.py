"""A point of a frontier, and which of several points no other beats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from tensoropt.costs.process_memory import CONSTANTS
from tensoropt.errors import InfeasibleError
from tensoropt.frontier import knee
from tensoropt.plan.facts_table import facts_html
from tensoropt.simulate.recording import MEMORY_KINDS, allocator_words, host_words, is_host_bound
from tensoropt.units import format_bytes, format_seconds

FRONTIER = "frontier"
"""The planner of the search's own points, and in a comparison the row of all that are shown."""


@dataclass(frozen=True, repr=False)
class Point:
    """One strategy of the frontier with its figures; bytes and seconds of one rank and step.

    ``memory_bytes`` and ``time_s`` are the simulator's, ``additive_...`` what the search added up.
    ``communication_s`` is all of it: ``exposed_s`` is waited for, ``hidden_s`` runs beside something else;
    ``time_s = compute_s + exposed_s + idle_s``. ``host_s``: what issuing all of it takes the host, where that
    is not the device; a step takes the slower of both. ``sources``: shares of all these seconds but idle
    ones.

    ``exact``: proven that no strategy of any searched space is better in the additive model, faster with no
    more memory or leaner and no slower. ``gap``: by how much a strategy of no more additive memory could be
    faster there, at most (additive time over the bound, less 1); None where nothing is proven. A point that
    the simulator prefers though others are better in the additive model has the gap that this is.

    ``memory`` is the peak of tensors by kind, ``terms`` what a process takes beside them by name (empty on
    CPU ranks); ``memory_bytes`` is the sum of both. ``additive_memory_bytes`` counts tensors only.

    ``allocator``: peaks of PyTorch's caching allocator in the step, by the names of
    :data:`~tensoropt.simulate.recording.ALLOCATOR`; only of sharded plans where process memory is counted.

    ``placed``: of a placed plan what :mod:`tensoropt.placement.points` keeps of it, instead of indices;
    ``pipeline``: likewise of a pipelined one (:mod:`tensoropt.pipeline.points`), whose memory is that of the
    fullest rank and whose breakdown that of the busiest.
    """

    memory_bytes: float
    time_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    hidden_s: float
    additive_memory_bytes: float
    additive_time_s: float
    memory: tuple[float, ...]
    space: int
    choice: tuple[int, ...]
    options: tuple[int, ...]
    collectives: tuple[tuple[str, tuple[int, ...], int, int], ...]
    sources: Mapping[str, float]
    exact: bool
    gap: float | None
    planner: str = "frontier"
    idle_s: float = 0.0
    host_s: float = 0.0
    placed: Mapping[str, Any] | None = None
    pipeline: Mapping[str, Any] | None = None
    terms: Mapping[str, float] = field(default_factory=dict)
    allocator: Mapping[str, float] = field(default_factory=dict)

    @property
    def carried(self) -> Mapping[str, Any] | None:
        """What a point without indices carries of its plan; None of one that is a choice in a searched
        space."""
        return self.placed or self.pipeline

    @property
    def tensor_bytes(self) -> float:
        """Of the memory what tensors take, as a tracker of tensors sees it."""
        return sum(self.memory)

    @property
    def host_bound(self) -> bool:
        """Whether the device waits for the host that issues its work."""
        return is_host_bound(self)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two points only if they are the same strategy by the same planner."""
        # Such points have no indices; what they carry tells them apart.
        own = json.dumps(self.placed["placed"], sort_keys=True) if self.placed else ""
        own += json.dumps(self.pipeline["pipeline"], sort_keys=True) if self.pipeline else ""
        return (self.planner, self.space, self.choice, self.options, own)

    @property
    def proven(self) -> str:
        """What is proven of it in the additive model: ``exact``, at most so far off, or nothing (``-``)."""
        if self.gap is None:
            return "-"
        share = 100 * self.gap
        return "exact" if self.exact else f"≤{share:.0f} %" if share >= 100 else f"≤{share:.2g} %"

    def facts(self) -> list[tuple[str, str]]:
        """The figures in words, each with its label."""
        memory = (*zip(MEMORY_KINDS, self.memory, strict=True), *self.terms.items())
        shares = (f"{name} {100 * share:.0f} %" for name, share in self.sources.items())
        return [
            ("memory per device", format_bytes(self.memory_bytes)),
            ("", ", ".join(f"{kind} {format_bytes(size)}" for kind, size in memory if size)),
            *([("allocator", allocator_words(self.allocator))] if self.allocator else []),
            ("time per step", format_seconds(self.time_s)),
            (
                "",
                f"compute {format_seconds(self.compute_s)}, waiting for communication "
                f"{format_seconds(self.exposed_s)}, idle {format_seconds(self.idle_s)}; hidden communication "
                f"{format_seconds(self.hidden_s)}",
            ),
            *([("host", host_words(self))] if self.host_s else []),
            ("figures", ", ".join(shares)),
            ("proven", self.proven if self.gap is not None else "nothing"),
            ("planner", self.planner),
            ("space", str(self.space)),
        ]

    def __repr__(self) -> str:
        return (
            f"Point({format_bytes(self.memory_bytes)} per device, {format_seconds(self.time_s)} per step: "
            f"compute {format_seconds(self.compute_s)}, communication "
            f"{format_seconds(self.communication_s)}; space {self.space}, by {self.planner})"
        )

    def _repr_html_(self) -> str:
        return facts_html("Point", self.facts())


Item = TypeVar("Item")


def reduce_points(items: Sequence[Item], costs: Callable[[Item], tuple[float, float]]) -> tuple[Item, ...]:
    """The items no other beats in both (memory, time), ascending in memory; the first of equals."""
    kept: list[Item] = []
    best = float("inf")
    # Ascending in memory, then time: an item stays if it is strictly faster than all leaner ones. sorted() is
    # stable, so that of equals the first stays.
    for item in sorted(items, key=costs):
        time_s = costs(item)[1]
        if time_s < best:
            kept.append(item)
            best = time_s
    return tuple(kept)


SAME = 1e-9
"""Figures that differ by less, as a share, are one: placed and sharded plans are added up in other orders,
each sum rounding by some 1e-16 per term."""


def with_others(points: Sequence[Point], others: Sequence[Point]) -> tuple[Point, ...]:
    """A frontier with those of other points that beat one of its own or lie between them, reduced to one.

    Another point comes in only where no point of the frontier needs as little of both, but for rounding. A
    point goes where another needs as little of one, but for rounding, and less of the other.

    Args:
        points: ascending in memory, descending in time.
    """
    memory = np.array([point.memory_bytes for point in points])
    best = np.array([np.inf, *(point.time_s for point in points)])
    new = [
        other
        for other in others
        if other.time_s * (1 + SAME)
        < best[np.searchsorted(memory, other.memory_bytes * (1 + SAME), side="right")]
    ]
    kept = reduce_points([*points, *new], lambda point: (point.memory_bytes, point.time_s))
    return tuple(point for point in kept if not any(beats(other, point) for other in others))


def beats(other: Point, point: Point) -> bool:
    """Whether another point needs less memory or time and no more of the other, both but for rounding."""
    memory, time_s = other.memory_bytes, other.time_s
    if memory > point.memory_bytes * (1 + SAME) or time_s > point.time_s * (1 + SAME):
        return False
    return memory < point.memory_bytes * (1 - SAME) or time_s < point.time_s * (1 - SAME)


def unbeaten(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points, of which none is called exact that another one beats in additive memory and time.

    Bounds are right but for rounding, so that a point of one space can lie a rounding above one of another,
    and they say nothing of what is placed. Here the figures themselves are compared, as the CSV shows them.
    """
    order = sorted(range(len(points)), key=lambda i: _additive(points[i]))
    found = list(points)
    best = (float("inf"), float("inf"))  # the least time so far, and the memory it needs
    for i in order:
        memory, time_s = _additive(points[i])
        if best[0] < time_s or (best[0] == time_s and best[1] < memory):
            found[i] = replace(points[i], exact=False)
        if time_s < best[0]:
            best = time_s, memory
    return tuple(found)


def _additive(point: Point) -> tuple[float, float]:
    return point.additive_memory_bytes, point.additive_time_s


def check_budget(points: Sequence[Point], memory_bytes: float | None) -> None:
    """Raise :class:`InfeasibleError` where none of the points, leanest first, fits the budget."""
    if memory_bytes is not None and points[0].memory_bytes > memory_bytes:
        beside = sum(size for name, size in points[0].terms.items() if name != CONSTANTS)
        told = f", of which {format_bytes(beside)} are estimates of what a process takes beside tensors"
        raise InfeasibleError(
            f"no plan fits {format_bytes(memory_bytes)}; the smallest plan needs "
            f"{format_bytes(points[0].memory_bytes)}{told if beside else ''}"
        )


def knee_index(points: Sequence[Point]) -> int:
    """The index of the knee: the point from which both memory and time get dearest, as fractions."""
    return knee(_Costs(points))


class _Costs:
    """Memory and time of points as two arrays, which is what the tools of :mod:`tensoropt.frontier` take."""

    def __init__(self, points: Sequence[Point]):
        self.memory = np.array([p.memory_bytes for p in points])
        self.time = np.array([p.time_s for p in points])
