"""The blocks of a model whose parameters are gathered together, ahead of their use.

While a block computes, the parameters of the next one are gathered, and in backward the gradients of the
previous one are scattered (ZeRO, Rajbhandari et al., SC 2020, section 7.2.2; as PyTorch's FSDP prefetches,
Zhao et al., VLDB 2023, section 3.3.2). Blocks belong to the graph and are the same for each of its
strategies, so the moments at which a step gathers are known before anything is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from tensoropt.sharding.groups import Group, GroupGraph
from tensoropt.sharding.regions import find_regions, region_of


class Neighbours(NamedTuple):
    """The neighbours of a block, with which its gathering and scattering can overlap.

    Attributes:
        before: another block precedes it in forward; otherwise its parameters are gathered together when it
            begins.
        behind: backward begins another block before it; otherwise they are gathered together when it begins.
    """

    before: bool
    behind: bool


@dataclass(frozen=True)
class Blocks:
    """The blocks of a graph, numbered in execution order.

    Attributes:
        of: the block of each group, by group name.
        first: for each block, the group with which its forward begins.
        last: for each block, the group with which its backward begins; None if it has no backward.
    """

    of: Mapping[str, int]
    first: tuple[str, ...]
    last: tuple[str | None, ...]

    def neighbours(self, group: str) -> Neighbours | None:
        """The neighbours of a group's block; None for a block that backward does not begin."""
        block = self.of[group]
        if self.last[block] is None:
            return None
        return Neighbours(before=block > 0, behind=block in self.behind.values())

    @cached_property
    def behind(self) -> Mapping[int, int]:
        """Map each block that backward begins to the one that it begins next; the last one is not
        included."""
        begun = [block for block, last in enumerate(self.last) if last is not None]
        return dict(pairwise(reversed(begun)))


def find_blocks(graph: GroupGraph) -> Blocks:
    """Return the blocks of a graph: its repeated blocks, and between them one for every group with
    parameters.

    Groups without parameters belong to the block before them.
    """
    regions, of, runs = region_of(find_regions(graph)), dict[str, int](), list[list[Group]]()
    region = None
    for group in graph.groups:
        begins = regions.get(group.name) is not region if group.name in regions else bool(group.parameters)
        if begins or not runs:
            runs.append([])
            region = regions.get(group.name)
        of[group.name] = len(runs) - 1
        runs[-1].append(group)
    last = (next((g.name for g in reversed(run) if needs_kept(graph, g)), None) for run in runs)
    training = graph.atoms.graph.training
    return Blocks(of, tuple(run[0].name for run in runs), tuple(name if training else None for name in last))


def needs_kept(graph: GroupGraph, group: Group) -> bool:
    """Whether a group's backward reads anything but the gradient: not so for sums and moves, nor for one that
    never runs, such as that of a counter."""
    made = (graph.atoms.graph.tensors[name] for op in group.operators for name in op.outputs)
    if not any(tensor.requires_grad for tensor in made):
        return False
    linear = all(graph.atoms.spaces[op.name].linear for op in group.operators)
    return not linear or bool(group.parameters or group.shared)
