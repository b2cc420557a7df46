"""What runs beside what: the executor's asynchronous collectives, and the links they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from tensoropt.cluster import Cluster, Mesh, slower_beside


def _axis_links(axes: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"axis {axis}" for axis in axes)


@dataclass(frozen=True)
class Overlap:
    """How a device kind overlaps.

    Attributes:
        beside: whether a collective that nobody waits for leaves the device free to compute. NCCL runs on a
            stream of its own; gloo's threads run on the very cores that compute, so nothing is gained.
        words: the assumption, for people.
        by_axes: the link levels that collectives over some mesh axes occupy.
        slower: how much longer computing takes meanwhile, as a share.
    """

    beside: bool
    words: str
    by_axes: Mapping[tuple[int, ...], tuple[str, ...]] = field(default_factory=dict)
    slower: float = 0.0

    def links(self, axes: tuple[int, ...]) -> tuple[str, ...]:
        """Names of what a collective over mesh ``axes`` occupies."""
        # Without a cluster nothing is known of levels: each axis then has links of its own.
        return self.by_axes.get(axes) or _axis_links(axes)


BLOCKING = Overlap(False, "nothing overlaps")


def overlap_of(cluster: Cluster, mesh: Mesh, *, beside: bool) -> Overlap:
    """What the executor overlaps on this cluster's devices.

    Args:
        beside: whether anything runs beside computation (:func:`~tensoropt.costs.prices.runs_beside`).
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
    """Names of the link levels that groups along ``axes`` cross, outermost first."""
    # Neighbours are enough: ranks of a group ascend, so that any level between two of them lies between
    # neighbours.
    crossed = {cluster.crossing_level(a, b).name for group in mesh.groups(axes) for a, b in pairwise(group)}
    return tuple(level.name for level in cluster.levels if level.name in crossed)
