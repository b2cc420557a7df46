"""Blocks of a model whose parameters are gathered together, ahead of their use.

While a block computes, the parameters of the next one are gathered, and in backward the gradients of the one
before are scattered (ZeRO, Rajbhandari et al., SC 2020, section 7.2.2; as PyTorch's FSDP prefetches, Zhao et
al., VLDB 2023, section 3.3.2). Blocks are the graph's own: every strategy of it has the same, so that where a
step gathers is known before anything is chosen.
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
    """The blocks beside which those of another one are gathered.

    Attributes:
        before: there is one before it in forward; else its parameters are gathered together as it begins.
        behind: backward begins another one before it; likewise.
    """

    before: bool
    behind: bool


@dataclass(frozen=True)
class Blocks:
    """The blocks of a graph, numbered in execution order.

    Attributes:
        of: group name -> its block.
        first: per block the group with which its forward begins.
        last: per block the group with which its backward begins; None without a backward.
    """

    of: Mapping[str, int]
    first: tuple[str, ...]
    last: tuple[str | None, ...]

    def neighbours(self, group: str) -> Neighbours | None:
        """What lies around a group's block; None of a block that backward does not begin."""
        block = self.of[group]
        if self.last[block] is None:
            return None
        return Neighbours(before=block > 0, behind=block in self.behind.values())

    @cached_property
    def behind(self) -> Mapping[int, int]:
        """Per block that backward begins the one that it begins next; not of the last."""
        begun = [block for block, last in enumerate(self.last) if last is not None]
        return dict(pairwise(reversed(begun)))


def find_blocks(graph: GroupGraph) -> Blocks:
    """The blocks of a graph: its repeated blocks, and between them one for every group with parameters.

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
    """Whether a group's backward reads anything but the gradient: not that of sums and moves, nor one that is
    never run, as that of a counter."""
    made = (graph.atoms.graph.tensors[name] for op in group.operators for name in op.outputs)
    if not any(tensor.requires_grad for tensor in made):
        return False
    linear = all(graph.atoms.spaces[op.name].linear for op in group.operators)
    return not linear or bool(group.parameters or group.shared)
