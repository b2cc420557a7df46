"""Gathered activations that backward gathers again instead of having them saved.

A group may read a tensor in another layout than its producer's: a column-parallel linear layer gathers shards
of the sequence. For backward, either the gathered copy is saved, or only the producer's shard, which is
gathered again (Korthikanti et al., arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

from math import prod

from tensoropt.ops.families.stages import DEPART
from tensoropt.ops.layouts import PARTIAL, Atoms, Layout, local_shape
from tensoropt.sharding.configurations import AxisSizes
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.regions import left_as_views


def gatherable(graph: GroupGraph) -> frozenset[str]:
    """Return the activations of a training graph whose gathered copies may be made again in backward."""
    source = graph.atoms.graph
    if not source.training:
        return frozenset()
    kept = {*source.outputs, *source.mutations.values()}
    for group in graph.groups:
        kept |= left_as_views(group)
        # A stage keeps its sent tensors until its backward, which begins with them.
        if group.anchor.target == DEPART:
            kept.update(group.reads)
        # A view of a buffer would be gathered from the buffer's new value.
        if not source.mutations.keys().isdisjoint(group.free):
            kept.update(group.writes)
    return frozenset(name for group in graph.groups for name in group.reads) - kept


def is_gathered(atoms: Atoms, mesh: AxisSizes, source: Layout, target: Layout) -> bool:
    """Return whether a resharding enlarges the tensor's shard without reducing partial sums."""
    larger = prod(local_shape(atoms, target, mesh)) > prod(local_shape(atoms, source, mesh))
    return larger and PARTIAL not in source


def ends_of(graph: GroupGraph, name: str) -> tuple[str, ...]:
    maker = graph.group_of[graph.atoms.graph.producer[name].name].name
    return (maker, *(group.name for group in graph.groups if name in group.reads))
