"""Where a group's forward is cut: at the operators that need what the group reads first and last."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from tensoropt.sharding.groups import Group


@dataclass(frozen=True)
class Parts:
    """A group's operators, cut where a tensor that the group reads is needed first or last.

    Attributes:
        starts: position of the first operator of each part.
        first, last: per tensor the parts that read it first and last.
    """

    starts: tuple[int, ...]
    first: Mapping[str, int]
    last: Mapping[str, int]

    def of(self, position: int) -> int:
        """The part an operator belongs to."""
        return bisect_right(self.starts, position) - 1


def parts_of(group: Group) -> Parts:
    """The parts of a group; a group whose reads are all needed by one operator may have a single one."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, op in enumerate(group.operators):
        for name in op.inputs():
            if name in group.reads:
                first.setdefault(name, position)
                last[name] = position
    # A cut before the first use and behind the last one is the coarsest at which the lifetime of every input
    # ends at the end of a part; finer parts would only add moments to simulate.
    ends = {position + 1 for position in last.values() if position + 1 < len(group.operators)}
    cut = Parts(tuple(sorted({0, *first.values(), *ends})), {}, {})
    return Parts(
        cut.starts, {n: cut.of(p) for n, p in first.items()}, {n: cut.of(p) for n, p in last.items()}
    )
