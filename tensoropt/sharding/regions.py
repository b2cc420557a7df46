"""Recompute regions: repeated blocks whose intermediate results may be recomputed instead of kept.

A recomputed region keeps its inputs and none of its intermediate results. In backward its forward runs a
second time, including reshardings, and what it would have kept is alive only while its own backward runs
(Chen et al., arXiv 1604.06174, section 4). A region is a whole block because a part of one saves nothing at
the peak: when the block's backward begins, all of its intermediate results are alive in either case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from tensoropt.sharding.groups import Group, GroupGraph

MIN_GROUPS = 3
"""The fewest groups of a block: a smaller one keeps little besides its input, which is kept anyway. The
number is an assumption."""


@dataclass(frozen=True)
class Region:
    """A block that is recomputed as a whole.

    Attributes:
        name: the block's module path (``transformer.h.0``); a block that runs several times gets ``#2``, ...
        groups: names of its groups, in execution order.
    """

    name: str
    groups: tuple[str, ...]


def find_regions(graph: GroupGraph) -> tuple[Region, ...]:
    """Return the blocks of a training graph that can be recomputed, in execution order.

    Blocks are submodules with a number in their path (the items of a ``ModuleList``), at least two. If lists
    are nested (stages of blocks), the level is chosen at which recomputing everything needs the least memory:
    the inputs of the blocks, everything outside them, and the largest block's inside. Empty for inference. A
    part of a graph has those blocks of the whole that it contains.
    """
    if not graph.atoms.graph.training:
        return ()
    if graph.regions is not None:
        return tuple(Region(name, groups) for name, groups in graph.regions)
    levels = (_blocks(graph, depth) for depth in range(_deepest(graph)))
    candidates = [blocks for blocks in levels if len(blocks) > 1]
    return min(candidates, key=lambda blocks: _bytes_when_recomputed(graph, blocks), default=())


def region_of(regions: Iterable[Region]) -> dict[str, Region]:
    """The region of each group, by group name."""
    return {name: region for region in regions for name in region.groups}


def _deepest(graph: GroupGraph) -> int:
    return max((sum(map(str.isdigit, _path(g))) for g in graph.groups), default=0)


def _path(group: Group) -> list[str]:
    return group.anchor.module.split(".")


def _block(group: Group, depth: int) -> str:
    """The module path up to its number ``depth`` (from 0), or "" if it has fewer numbers."""
    path = _path(group)
    numbers = [i for i, part in enumerate(path) if part.isdigit()]
    return ".".join(path[: numbers[depth] + 1]) if len(numbers) > depth else ""


def _blocks(graph: GroupGraph, depth: int) -> tuple[Region, ...]:
    found: list[Region] = []
    times: dict[str, int] = {}
    # Neighbours only: a block that runs a second time later is a separate region, because otherwise
    # everything between the two runs would have to be inside.
    for name, run in groupby(graph.groups, key=lambda g: _block(g, depth)):
        groups = tuple(run)
        if not name or len(groups) < MIN_GROUPS:
            continue
        # The executor makes one call of a region, so the region must not wait for itself in the middle.
        if not _has_backward(graph, groups) or not _runs_at_once(graph, groups):
            continue
        times[name] = times.get(name, 0) + 1
        label = name if times[name] == 1 else f"{name}#{times[name]}"
        found.append(Region(label, tuple(g.name for g in groups)))
    return tuple(found)


def _has_backward(graph: GroupGraph, groups: Sequence[Group]) -> bool:
    """Whether gradients reach a block; one with frozen parameters below all others keeps nothing."""
    return any(graph.atoms.graph.tensors[name].requires_grad for g in groups for name in g.writes)


def _runs_at_once(graph: GroupGraph, groups: Sequence[Group]) -> bool:
    """Whether no operator outside the groups both needs one of their results and feeds another (a convex
    part)."""
    atoms = graph.atoms.graph
    inside = {op.name for g in groups for op in g.operators}
    # Nothing before the first of them reads their results, and nothing after the last feeds them: in a model
    # with many blocks, only the operators of one are examined.
    places = [atoms.places[name] for name in inside]
    later: set[str] = set()
    made: set[str] = set()
    for op in atoms.operators[min(places) : max(places) + 1]:
        reads = op.inputs()
        if op.name in inside:
            if not later.isdisjoint(reads):
                return False
            made.update(op.outputs)
        elif not (made.isdisjoint(reads) and later.isdisjoint(reads)):
            later.update(op.outputs)
    return True


def _bytes_when_recomputed(graph: GroupGraph, regions: Sequence[Region]) -> float:
    """The bytes that groups write, unsplit: outside the regions, out of them, and inside the largest."""
    tensors = graph.atoms.graph.tensors
    written = {g.name: sum(tensors[n].bytes for n in g.writes) for g in graph.groups}
    inside = {name: region.name for region in regions for name in region.groups}
    # A group's reads are activations only, because inputs and parameters are alive in any case.
    makers = {n: g.name for g in graph.groups for n in g.writes}
    leaving = {
        n
        for g in graph.groups
        for n in g.reads
        if makers[n] in inside and inside[makers[n]] != inside.get(g.name)
    }
    outside = sum(size for name, size in written.items() if name not in inside)
    largest = max(sum(written[name] for name in region.groups) for region in regions)
    return outside + sum(tensors[n].bytes for n in leaving) + largest
