"""Inputs gathered again in backward instead of kept.

A group reads a tensor in another layout than its maker left it in: the input of a column-parallel product is
gathered from shards of the sequence, the keys and values of context-parallel attention from shards of theirs.
If backward needs that copy, either the copy is kept, or what the maker left is kept and gathered a second
time, right before the backward of the first reader that it comes to; the copy then stays until the last one
(Korthikanti et al., arXiv 2205.05198, section 4.2.2: each rank keeps its part of the input only).
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
    """Return the activations of a training graph whose moved copies may be made again in backward: what stays
    in the model and in the stage, and of which no reader leaves views to others."""
    source = graph.atoms.graph
    if not source.training:
        return frozenset()
    leaving = {*source.outputs, *source.mutations.values()}
    # A stage holds what it has sent until its backward, which begins there.
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
    """Return whether a move makes more of a tensor than there was, and adds nothing up."""
    larger = prod(local_shape(atoms, target, mesh)) > prod(local_shape(atoms, source, mesh))
    return larger and PARTIAL not in source


def ends_of(graph: GroupGraph, name: str) -> tuple[str, ...]:
    """Return the groups that make and read an activation, the maker first."""
    maker = graph.group_of[graph.atoms.graph.producer[name].name].name
    return (maker, *(group.name for group in graph.groups if name in group.reads))


def refuse_gathering(graph: GroupGraph, name: str, again: Collection[str]) -> NoReturn:
    """Say why an activation cannot be gathered again, and what to change.

    Args:
        again: the groups that run again in backward.
    """
    what = f"the plan gathers {name} again in backward"
    if name not in gatherable(graph):
        raise PlanError(
            f"{what}, which is not an activation that stays in a stage of a training step and of which no "
            "reader leaves views; leave it out"
        )
    maker, *readers = ends_of(graph, name)
    if maker in again:
        raise PlanError(f"{what}, and runs {maker} again, which makes it; leave one of them out")
    if name not in graph.hubs and readers[0] in again:
        raise PlanError(
            f"{what}, and runs its only reader {readers[0]} again, which gathers it anyway; leave it out"
        )
    raise PlanError(f"{what}, which is read as it is made, or smaller, or summed up; leave it out")
