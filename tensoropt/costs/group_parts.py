"""The parts of a group's forward, cut at the operators that are first and last to need a tensor the group
reads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from tensoropt.sharding.groups import Group


@dataclass(frozen=True)
class Parts:
    """A group's operators, cut at the first and last need of each tensor that the group reads.

    Attributes:
        starts: position of the first operator of each part.
        first, last: per tensor, the parts that read it first and last.
    """

    starts: tuple[int, ...]
    first: Mapping[str, int]
    last: Mapping[str, int]

    def of(self, position: int) -> int:
        """The part that an operator belongs to."""
        return bisect_right(self.starts, position) - 1


def parts_of(group: Group) -> Parts:
    """The parts of a group; a group in which one operator needs all the reads may have a single part."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, op in enumerate(group.operators):
        for name in op.inputs():
            if name in group.reads:
                first.setdefault(name, position)
                last[name] = position
    # Cutting before the first use and after the last one is the coarsest cut at which the lifetime of every
    # input ends at the end of a part; finer parts would only add moments to simulate.
    ends = {position + 1 for position in last.values() if position + 1 < len(group.operators)}
    cut = Parts(tuple(sorted({0, *first.values(), *ends})), {}, {})
    return Parts(
        cut.starts, {n: cut.of(p) for n, p in first.items()}, {n: cut.of(p) for n, p in last.items()}
    )
