"""Inputs gathered again in backward instead of saved.

A group may read a tensor in another layout than its maker's: a column-parallel product gathers shards of the
sequence. Then either the copy is saved, or the maker's shard is, and gathered again for the backward of its
readers (Korthikanti et al., arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import NoReturn

from tensoropt.errors import PlanError
from tensoropt.ops.families.stages import DEPART
from tensoropt.ops.layouts import PARTIAL, Atoms, Layout, local_shape
from tensoropt.sharding.configurations import AxisSizes
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.regions import left_as_views


def gatherable(graph: GroupGraph) -> frozenset[str]:
    """Return the activations of a training graph whose moved copies may be made again in backward."""
    source = graph.atoms.graph
    if not source.training:
        return frozenset()
    leaving = {*source.outputs, *source.mutations.values()}
    # A stage keeps its sent tensors until its backward, which begins with them.
    departing = (group.reads for group in graph.groups if group.anchor.target == DEPART)
    leaving.update(*departing)
    read, viewed = set[str](), set[str]()
    for group in graph.groups:
        read.update(group.reads)
        viewed |= left_as_views(group)
    changed = source.mutations.keys()
    # A view of a buffer would be gathered from the buffer's new value.
    of_buffers = {name for group in graph.groups if changed & set(group.free) for name in group.writes}
    return frozenset(read - viewed - leaving - of_buffers)


def is_gathered(atoms: Atoms, mesh: AxisSizes, source: Layout, target: Layout) -> bool:
    """Return whether a move enlarges a tensor's shard without a reduction."""
    larger = prod(local_shape(atoms, target, mesh)) > prod(local_shape(atoms, source, mesh))
    return larger and PARTIAL not in source


def ends_of(graph: GroupGraph, name: str) -> tuple[str, ...]:
    maker = graph.group_of[graph.atoms.graph.producer[name].name].name
    return (maker, *(group.name for group in graph.groups if name in group.reads))


def refuse_gathering(graph: GroupGraph, name: str, again: Collection[str]) -> NoReturn:
    """Raise PlanError: why an activation cannot be gathered again, given the recomputed groups ``again``."""
    what = f"the plan gathers {name} again in backward"
    if name not in gatherable(graph):
        raise PlanError(
            f"{what}; this is possible only for activations of training that stay in one pipeline stage and "
            "that no reader returns a view of; leave it out"
        )
    maker, *readers = ends_of(graph, name)
    if maker in again:
        raise PlanError(f"{what}, and also recomputes {maker}, which makes it; leave one of them out")
    if name not in graph.hubs and readers[0] in again:
        raise PlanError(
            f"{what}, and also recomputes its only reader {readers[0]}, which gathers it; leave it out"
        )
    raise PlanError(f"{what}, but no reader gathers it in forward; leave it out")
