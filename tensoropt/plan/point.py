"""A point of a frontier, and the reduction of several points to those that no other beats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tensoropt.plan.figures import BREAKDOWNS, KEPT, kept_figures, worded
from tensoropt.plan.kinds import SHARDED, PlanKind
from tensoropt.plan.plan import StagesInfo
from tensoropt.plan.point_records import WITH_INDICES, StagesRecord
from tensoropt.simulate.recording import is_host_bound
from tensoropt.units import LEAST_SHARE, share_words

if TYPE_CHECKING:
    from tensoropt.simulate.collectives import Collective

FRONTIER = "frontier"
"""The planner of the search's own points, and in a comparison the row of all that are shown."""


@dataclass(frozen=True, repr=False)
class Point:
    """A strategy of the frontier with its figures, in bytes and seconds of one rank and one step.

    Every figure of :data:`~tensoropt.plan.figures.KEPT` is an attribute. ``memory_bytes`` and ``time_s`` are
    the simulator's, ``additive_...`` what the search added up. ``communication_s`` is all of it:
    ``exposed_s`` is waited for, ``hidden_s`` runs beside something else; ``time_s = compute_s + exposed_s +
    idle_s``. ``host_s``: what issuing all of it takes the host, where that is not the device; a step takes
    the slower of both.

    ``exact``: proven that no strategy of any searched space is better in the additive model, faster with no
    more memory or leaner and no slower. ``gap``: by how much a strategy of no more additive memory could be
    faster there, at most (additive time over the bound, less 1). A point that the simulator prefers though
    others are better in the additive model has the gap that this is.

    ``memory_bytes`` is the sum of ``memory`` and ``terms``; ``additive_memory_bytes`` counts tensors only.

    ``record``: the plan of a placed or pipelined point, instead of indices; its memory is that of the fullest
    rank, its breakdown that of the busiest.
    """

    figures: Mapping[str, float]
    space: int
    choice: tuple[int, ...]
    options: tuple[int, ...]
    collectives: tuple[tuple[str, tuple[int, ...], int, int], ...]
    planner: str = FRONTIER
    record: StagesRecord = WITH_INDICES

    @classmethod
    def of(
        cls,
        *,
        space: int,
        choice: tuple[int, ...] = (),
        options: tuple[int, ...] = (),
        collectives: tuple[tuple[str, tuple[int, ...], int, int], ...],
        planner: str = FRONTIER,
        record: StagesRecord = WITH_INDICES,
        **figures: Any,
    ) -> Point:
        """Return a point from a strategy and its figures by name; the parts of a breakdown are given
        together, in order or by name: ``terms={"context": 3e8}``.
        """
        return cls(_ASSUMED | kept_figures(figures), space, choice, options, collectives, planner, record)

    def changed(self, **changes: Any) -> Point:
        """Return this point with other fields or figures; a breakdown is replaced as a whole."""
        own = {name: changes.pop(name) for name in _FIELDS & changes.keys()}
        gone = {
            *changes,
            *(name for part in BREAKDOWNS.keys() & changes for name in BREAKDOWNS[part].values()),
        }
        kept = {name: value for name, value in self.figures.items() if name not in gone}
        return replace(self, figures=kept | kept_figures(changes), **own)

    def __getattr__(self, name: str) -> float:
        figure = KEPT.get(name)
        if figure is None:
            raise AttributeError(f"a point has no figure {name!r}")
        return self.figures.get(name, figure.default)

    @property
    def exact(self) -> bool:
        """Whether it is proven that no strategy is better in the additive model."""
        return bool(self.figures.get("exact", False))

    @property
    def gap(self) -> float | None:
        """The most by which a strategy of no more memory could be faster; None if nothing is proven."""
        return self.figures.get("gap")

    @property
    def memory(self) -> tuple[float, ...]:
        """The peak of tensors by kind, as in :data:`~tensoropt.simulate.recording.MEMORY_KINDS`."""
        return tuple(self.figures.get(name, 0.0) for name in BREAKDOWNS["memory"].values())

    @property
    def terms(self) -> dict[str, float]:
        """The memory that a process takes in addition to tensors, by name; empty on CPU ranks."""
        return self._parts("terms")

    @property
    def sources(self) -> dict[str, float]:
        """The share of all seconds except idle ones that each source of figures accounts for."""
        return self._parts("sources")

    def _parts(self, breakdown: str) -> dict[str, float]:
        names = BREAKDOWNS[breakdown]
        return {part: self.figures[name] for part, name in names.items() if name in self.figures}

    @property
    def stages(self) -> StagesInfo:
        """The stages of a placed or pipelined point; none of a choice in a searched space."""
        return self.record.info

    @property
    def kind(self) -> PlanKind:
        """The kind of its plan, with the words for it."""
        return self.record.kind

    @property
    def tensor_bytes(self) -> float:
        """The part of the memory that tensors take, as a tracker of tensors measures it."""
        return sum(self.memory)

    @property
    def host_bound(self) -> bool:
        """Whether the device waits for the host that issues its work."""
        return is_host_bound(self)

    @property
    def identity(self) -> tuple[Any, ...]:
        """A value that two points share only if they are the same strategy by the same planner."""
        # Points without indices are told apart by their plans.
        return (self.planner, self.space, self.choice, self.options, self.record.identity)

    @property
    def proven(self) -> str:
        """What is proven in the additive model: ``exact``, ``within 0.1 %``, or nothing of use (``-``)."""
        if self.gap is None or self.gap > PROOF:
            return "-"
        return "exact" if self.exact else f"within {share_words(max(self.gap, LEAST_SHARE))}"

    def __repr__(self) -> str:
        return worded(
            self,
            "Point({memory_bytes} per device, {time_s} per step: compute {compute_s}, communication "
            f"{{communication_s}}; space {self.space}, by {self.planner})",
        )


def stages_point(
    record: StagesRecord,
    seconds_by_source: Mapping[str, float],
    sent: Mapping[Collective, int],
    **fields: Any,
) -> Point:
    """Return the point of a simulated plan of several stages, with nothing proven about it.

    Args:
        seconds_by_source: all seconds, computing and sending, by the source of their figures.
        sent: how many of each collective or message are sent.
        fields: the other fields and figures of :meth:`Point.of`.
    """
    whole = sum(seconds_by_source.values()) or 1.0
    return Point.of(
        collectives=tuple((*send, count) for send, count in sorted(sent.items())),
        sources={name: seconds / whole for name, seconds in seconds_by_source.items() if seconds},
        record=record,
        **fields,
    )


_ASSUMED = kept_figures({f.name: f.default for f in KEPT.values() if f.part is None})
"""What a figure is that is not given, where that is not unknown."""
_FIELDS = frozenset(field.name for field in fields(Point)) - {"figures"}
"""What a point has beside its figures."""


def by_strategy(points: Sequence[Point]) -> tuple[dict[int, list[int]], dict[int, StagesRecord]]:
    """Return the rows of the points with indices, by their space, and the records of the others, by row."""
    of_spaces: dict[int, list[int]] = {}
    records: dict[int, StagesRecord] = {}
    for row, point in enumerate(points):
        if point.kind is SHARDED:
            of_spaces.setdefault(point.space, []).append(row)
        else:
            records[row] = point.record
    return of_spaces, records


Item = TypeVar("Item")


def reduce_points(
    items: Sequence[Item],
    costs: Callable[[Item], tuple[float, float]] = attrgetter("memory_bytes", "time_s"),
) -> tuple[Item, ...]:
    """Return the items that no other beats in both (memory, time), but for rounding of the time, ascending in
    memory; the first of equal ones.
    """
    kept: list[Item] = []
    best = float("inf")
    # Ascending in memory, then time: an item stays if it is strictly faster than all leaner ones. sorted() is
    # stable, so that of equals the first stays.
    for item in sorted(items, key=costs):
        time_s = costs(item)[1]
        # Steps that one host holds up take the same time, but for rounding.
        if time_s * (1 + SAME) < best:
            kept.append(item)
            best = time_s
    return tuple(kept)


PROOF = 0.1
"""The largest gap that is told as a proof; more says nothing about a plan. An assumption."""
SAME = 1e-9
"""Figures that differ by less, as a share, are one: placed and sharded plans are added up in other orders,
each sum rounding by some 1e-16 per term."""


def with_others(points: Sequence[Point], others: Sequence[Point]) -> tuple[Point, ...]:
    """Return a frontier merged with those other points that beat one of its own or lie between them.

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
    kept = reduce_points([*points, *new])
    return tuple(point for point in kept if not any(_beats(other, point) for other in others))


def _beats(other: Point, point: Point) -> bool:
    """Return whether another point needs less memory or time and no more of the other, up to rounding."""
    memory, time_s = other.memory_bytes, other.time_s
    if memory > point.memory_bytes * (1 + SAME) or time_s > point.time_s * (1 + SAME):
        return False
    return memory < point.memory_bytes * (1 - SAME) or time_s < point.time_s * (1 - SAME)


def unbeaten(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points; one that another beats in additive memory and time is no longer called exact.

    Bounds are right but for rounding, so that a point of one space can lie a rounding above one of another,
    and they say nothing of what is placed. Here the figures themselves are compared, as the CSV shows them.
    """
    order = sorted(range(len(points)), key=lambda i: _additive(points[i]))
    found = list(points)
    best = (float("inf"), float("inf"))  # the least time so far, and the memory it needs
    for i in order:
        memory, time_s = _additive(points[i])
        if best[0] < time_s or (best[0] == time_s and best[1] < memory):
            found[i] = points[i].changed(exact=False)
        if time_s < best[0]:
            best = time_s, memory
    return tuple(found)


def _additive(point: Point) -> tuple[float, float]:
    return point.additive_memory_bytes, point.additive_time_s
