"""Points of a frontier (strategies with their figures), and the removal of points that another one beats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from tensoropt.plan.figures import BREAKDOWNS, KEPT, kept_figures, worded
from tensoropt.plan.kinds import SHARDED, PlanKind
from tensoropt.plan.plan import StagesInfo
from tensoropt.plan.point_records import WITH_INDICES, StagesRecord
from tensoropt.simulate.recording import is_host_bound
from tensoropt.units import LEAST_SHARE, share_words

if TYPE_CHECKING:
    from tensoropt.simulate.collectives import Collective

FRONTIER = "frontier"
"""The planner name of the search's own points; in a comparison, the row of the whole frontier."""


@dataclass(frozen=True, repr=False)
class Point:
    """A strategy with its figures, in bytes and seconds of one rank and one step.

    Every figure of :data:`~tensoropt.plan.figures.KEPT` is an attribute. ``memory_bytes`` and ``time_s`` are
    simulated, ``additive_...`` are the sums of costs by which the search ranked the strategy.
    ``communication_s`` is all communication: the device waits for ``exposed_s``, and ``hidden_s`` overlaps
    other work; ``time_s = compute_s + exposed_s + idle_s``. ``host_s`` is the host's time to issue the step,
    which takes at least as long. ``memory_bytes`` is the sum of ``memory`` and ``terms``;
    ``additive_memory_bytes`` counts tensors only.

    Attributes:
        exact: whether it is proven that no strategy of any searched mesh has lower sums (less time with no
            more memory, or less memory in no more time).
        gap: the most by which a strategy with no more memory could be faster, by the sums (time over its
            lower bound, less 1); None if nothing is proven.
        space: the index of the mesh and micro-batch count among those searched.
        choice, options: the strategy as indices into the names of the choices in that space.
        record: the plan of a placed or pipelined point, instead of indices. Its memory is the fullest rank's,
            its breakdown of time the busiest rank's.
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
        """Return a point from a strategy and its figures by name. A breakdown is one argument with all its
        parts: a sequence, or a mapping from their names such as ``terms={"context": 3e8}``."""
        return cls(_ASSUMED | kept_figures(figures), space, choice, options, collectives, planner, record)

    def changed(self, **changes: Any) -> Point:
        """Return a copy with other fields or figures; a breakdown given by name is replaced as a whole."""
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
        """Whether it is proven that no searched strategy has lower sums of costs."""
        return bool(self.figures.get("exact", False))

    @property
    def gap(self) -> float | None:
        """The most by which a strategy with no more memory could be faster; None if nothing is proven."""
        return self.figures.get("gap")

    @property
    def memory(self) -> tuple[float, ...]:
        """The peak memory of tensors in bytes by :data:`~tensoropt.simulate.recording.MEMORY_KINDS`."""
        return tuple(self.figures.get(name, 0.0) for name in BREAKDOWNS["memory"].values())

    @property
    def terms(self) -> dict[str, float]:
        """The memory of a process beside the step's tensors in bytes, by name, such as CUDA's context."""
        return self._parts("terms")

    @property
    def sources(self) -> dict[str, float]:
        """The share of the non-idle time by source of its prediction: measured, fitted, data sheet."""
        return self._parts("sources")

    def _parts(self, breakdown: str) -> dict[str, float]:
        names = BREAKDOWNS[breakdown]
        return {part: self.figures[name] for part, name in names.items() if name in self.figures}

    @property
    def stages(self) -> StagesInfo:
        """The stages of a placed or pipelined point; empty for others."""
        return self.record.info

    @property
    def kind(self) -> PlanKind:
        """The plan's kind (sharded, pipeline or placed), with the words for it."""
        return self.record.kind

    @property
    def tensor_bytes(self) -> float:
        """The simulated memory of tensors alone, without the rest of the process, in bytes."""
        return sum(self.memory)

    @property
    def host_bound(self) -> bool:
        """Whether the device waits for the host to issue its work."""
        return is_host_bound(self)

    @property
    def identity(self) -> tuple[Any, ...]:
        """A value that is equal for two points only if their strategies and planners are the same."""
        # Points without indices are identified by their plans.
        return (self.planner, self.space, self.choice, self.options, self.record.identity)

    @property
    def proven(self) -> str:
        """The proven gap to the least sums of costs: ``exact``, ``within 0.1 %``, or ``-`` without proof."""
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
    """Return the point of a simulated pipelined or placed plan; nothing is proven about it.

    Args:
        seconds_by_source: the duration of computing and sending in seconds, by source of the prediction.
        sent: the number of times that each collective or message is sent.
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
"""The defaults of figures that are known even if a point does not give them."""
_FIELDS = frozenset(field.name for field in fields(Point)) - {"figures"}
"""The names of a point's fields other than figures."""


def by_strategy(points: Sequence[Point]) -> tuple[dict[int, list[int]], dict[int, StagesRecord]]:
    """Return the indices of the sharded points, grouped by :attr:`Point.space`, and the plans of all other
    points by index."""
    of_spaces: dict[int, list[int]] = {}
    records: dict[int, StagesRecord] = {}
    for row, point in enumerate(points):
        if point.kind is SHARDED:
            of_spaces.setdefault(point.space, []).append(row)
        else:
            records[row] = point.record
    return of_spaces, records


_Item = TypeVar("_Item")


def reduce_points(
    items: Sequence[_Item],
    costs: Callable[[_Item], tuple[float, float]] = attrgetter("memory_bytes", "time_s"),
) -> tuple[_Item, ...]:
    """Return the items that no other item beats in both memory and time, ascending in memory.

    Differences below rounding do not count. Of equal items, only the first is returned.
    """

    def rounded(item: _Item) -> tuple[float, ...]:
        return tuple(float(f"{cost:.12g}") for cost in costs(item))

    kept: list[_Item] = []
    best = float("inf")
    # Ascending in memory, then time: an item stays if it is strictly faster than all leaner ones. sorted() is
    # stable, so the first of equal items stays.
    for item in sorted(items, key=rounded):
        time_s = costs(item)[1]
        # Steps bound by one host take the same time, up to rounding.
        if time_s * (1 + SAME) < best:
            kept.append(item)
            best = time_s
    return tuple(kept)


PROOF = 0.1
"""The largest gap reported as a proof; a larger one says little (an assumption)."""
SAME = 1e-9
"""The relative difference below which figures count as equal: placed and sharded plans are summed in
different orders, with rounding errors of some 1e-16 per term."""


def unbeaten(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points, with ``exact`` set to False where another point has a lower sum of memory or time,
    and no higher one of the other.

    Proofs hold only up to rounding, and do not cover placed plans, so this function compares the sums.
    """
    order = sorted(range(len(points)), key=lambda i: _additive(points[i]))
    found = list(points)
    best = (float("inf"), float("inf"))  # the least time so far, and its memory
    for i in order:
        memory, time_s = _additive(points[i])
        if best[0] < time_s or (best[0] == time_s and best[1] < memory):
            found[i] = points[i].changed(exact=False)
        if time_s < best[0]:
            best = time_s, memory
    return tuple(found)


def _additive(point: Point) -> tuple[float, float]:
    return point.additive_memory_bytes, point.additive_time_s
