"""Which meshes of a cluster are searched, and what constraints leave of their spaces."""

from __future__ import annotations

from collections.abc import Sequence

from tensoropt.cluster import Cluster, Mesh
from tensoropt.costs.restrictions import Restrictions, check_devices, restrict
from tensoropt.plan.problem import Problem
from tensoropt.sharding.constraints import Constraints, match

MAX_AXES = 3
"""Axes of a mesh at most, to bound the work; that three are enough is an assumption."""


def searched_meshes(cluster: Cluster) -> tuple[Mesh, ...]:
    """The cluster's meshes of up to :data:`MAX_AXES` axes, at most one axis more than it has link levels.

    Inside one uniform level a third axis offers no link that two axes lack, and multiplies the work (CPU
    seconds for GPT-2 on 8 devices, tables + search: 4.4 + 0.5 for 2x4, 9.5 + 7 for 2x2x2, per micro-batch
    count).
    """
    return cluster.meshes(_most_axes(cluster))


def not_searched(cluster: Cluster) -> tuple[str, ...]:
    """What the choice of meshes left out, in words."""
    count = len(cluster.meshes(MAX_AXES)) - len(searched_meshes(cluster))
    return (f"not searched: meshes of more than {_most_axes(cluster)} axes ({count})",) if count else ()


def _most_axes(cluster: Cluster) -> int:
    return min(MAX_AXES, 1 + len(cluster.levels))


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
