"""Which meshes of a cluster are searched, and what constraints leave of their spaces."""

from __future__ import annotations

from collections.abc import Sequence

from tensoropt.cluster import Cluster, Mesh
from tensoropt.costs.restrictions import Restrictions, check_devices, restrict
from tensoropt.plan.problem import Problem
from tensoropt.sharding.constraints import Constraints, match
from tensoropt.sharding.groups import GroupGraph

MAX_AXES = 3
"""Axes of a mesh at most, to bound the work; that three are enough is an assumption."""


MOST_COMBINATIONS = 3**MAX_AXES
"""Ways to combine a group's axis strategies over the axes of a mesh up to which all are searched; an
assumption. Tables and searches grow with the square: GPT-2 on 2x2x2 has 8 strategies and 512 ways, and two
micro-batch counts of it took 73 s of tables alone."""


def searched_meshes(cluster: Cluster) -> tuple[Mesh, ...]:
    """The cluster's meshes of up to :data:`MAX_AXES` axes."""
    return cluster.meshes(MAX_AXES)


def is_wide(mesh: Mesh, graph: GroupGraph) -> bool:
    """Whether a mesh offers a group more configurations than are all searched."""
    most = max((len(group.strategies) for group in graph.groups), default=1)
    return mesh.axis_count == MAX_AXES and most**mesh.axis_count > MOST_COMBINATIONS


def left_to_search(
    constraints: Constraints | None,
    problem: Problem,
    cluster: Cluster,
    meshes: Sequence[Mesh],
    counts: Sequence[int],
) -> Restrictions:
    """What is left of the spaces of each mesh and micro-batch count, with what is to be said about it.

    Raises:
        ConstraintError: constraints speak of nothing, contradict each other or hold nowhere.
    """
    if constraints is None:
        return Restrictions()
    matched = match(constraints, problem.graph)
    supported = check_devices(constraints, cluster)
    found = restrict(matched, problem.graph, problem.micro, meshes, counts)
    return Restrictions(found.spaces, (*found.notes, *supported))
