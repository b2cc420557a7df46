"""The meshes of a cluster that are searched, and what constraints leave of their spaces."""

from __future__ import annotations

from collections.abc import Sequence

from tensoropt.cluster import Cluster, Mesh
from tensoropt.costs.restrictions import Restrictions, check_devices, restrict
from tensoropt.plan.problem import Problem
from tensoropt.sharding.constraints import Constraints, match
from tensoropt.sharding.groups import GroupGraph

MAX_AXES = 3
"""The most axes of a mesh, to bound the work; that three are enough is an assumption."""


MOST_COMBINATIONS = 3**MAX_AXES
"""The number of ways to combine a group's axis strategies over the axes of a mesh up to which all are
searched; an assumption. Tables and searches grow with the square: GPT-2 on 2x2x2 has 8 strategies and 512
ways, and for two micro-batch counts the tables alone took 73 s."""


def is_wide(mesh: Mesh, graph: GroupGraph) -> bool:
    """Return whether a mesh offers a group too many configurations to search all of them."""
    most = max((len(group.strategies) for group in graph.groups), default=1)
    return mesh.axis_count == MAX_AXES and most**mesh.axis_count > MOST_COMBINATIONS


def left_to_search(
    constraints: Constraints | None,
    problem: Problem,
    cluster: Cluster,
    meshes: Sequence[Mesh],
    counts: Sequence[int],
) -> Restrictions:
    """Return what is left of the spaces of each mesh and micro-batch count, with notes about it.

    Raises:
        ConstraintError: constraints refer to nothing, contradict each other or can be satisfied nowhere.
    """
    if constraints is None:
        return Restrictions()
    matched = match(constraints, problem.graph)
    supported = check_devices(constraints, cluster)
    found = restrict(matched, problem.graph, problem.micro, meshes, counts)
    return Restrictions(found.spaces, (*found.notes, *supported))
