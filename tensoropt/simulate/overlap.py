"""Overlap: the executor's asynchronous collectives, and the links that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from tensoropt.cluster import Cluster, Mesh, slower_beside


def _axis_links(axes: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"axis {axis}" for axis in axes)


@dataclass(frozen=True)
class Overlap:
    """The overlap behaviour of a device kind.

    Attributes:
        beside: whether a collective that nothing waits for leaves the device free to compute. NCCL runs on
            its own stream; gloo's threads run on the same cores that compute, so nothing is gained.
        words: the assumption, for people.
        by_axes: the link levels that collectives over some mesh axes occupy.
        slower: how much longer computing takes in the meantime, as a share.
    """

    beside: bool
    words: str
    by_axes: Mapping[tuple[int, ...], tuple[str, ...]] = field(default_factory=dict)
    slower: float = 0.0

    def links(self, axes: tuple[int, ...]) -> tuple[str, ...]:
        """The names of the links that a collective over mesh ``axes`` occupies."""
        # Without a cluster nothing is known about levels: each axis then has its own links.
        return self.by_axes.get(axes) or _axis_links(axes)


BLOCKING = Overlap(False, "nothing overlaps")


def overlap_of(cluster: Cluster, mesh: Mesh, *, beside: bool) -> Overlap:
    """The overlap of the executor on this cluster's devices.

    Args:
        beside: whether anything overlaps with computation (:func:`~tensoropt.costs.prices.runs_beside`).
    """
    by_axes = {
        # Queues are per level, not per axis: two axes inside one node send over the same wires.
        axes: link_levels(cluster, mesh, axes)
        for count in range(1, len(mesh.shape) + 1)
        for axes in combinations(range(len(mesh.shape)), count)
    }
    if cluster.device_type == "cpu":
        words = "collectives run on the ranks' own cores: no communication is hidden, as measured"
        return Overlap(False, words, by_axes)
    if not beside:
        return Overlap(False, "all communication is waited for, as was asked for", by_axes)
    slower = slower_beside(cluster)
    words = (
        "beside computation run gradient buckets, what is gathered and scattered of parameters that are "
        "stored ahead, and reductions of gradients beside the products of weights' gradients, and make "
        f"it {slower:.0%} slower; all other collectives are waited for"
    )
    return Overlap(True, words, by_axes, slower)


def link_levels(cluster: Cluster, mesh: Mesh, axes: tuple[int, ...]) -> tuple[str, ...]:
    """The names of the link levels that groups along ``axes`` cross, outermost first."""
    # Neighbours are sufficient: the ranks of a group ascend, so any level between two of them lies between
    # neighbours.
    crossed = {cluster.crossing_level(a, b).name for group in mesh.groups(axes) for a, b in pairwise(group)}
    return tuple(level.name for level in cluster.levels if level.name in crossed)
