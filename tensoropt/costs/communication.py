"""Durations of collectives among the ranks along mesh axes.

In order of trust, durations come from a fit to timings of the same collective (``measured``), a formula with
links fitted to messages between two ranks (``fitted``), or with data-sheet figures (``data sheet``).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import networkx as nx

from tensoropt.cluster import Cluster, Link, Mesh
from tensoropt.cluster.hardware import Level
from tensoropt.errors import MeasurementError
from tensoropt.ops.calls import BY_VALUES, RING_SEND
from tensoropt.profiling.link_fits import LinkFit
from tensoropt.profiling.link_timing import COLLECTIVES
from tensoropt.profiling.links import LinkFits
from tensoropt.types import DATA_SHEET, FITTED, MEASURED

# The start of one collective, in addition to its hops: NCCL's baseLat of ring/simple (src/graph/tuning.cc).
# For gloo it is part of the hop's latency.
_LAUNCH_S = {"cuda": 8.4e-6, "cpu": 0.0}
_MOST_RANKS_FOR_BEST_RING = 8  # 2,520 rings; the GPUs of one machine

_PRICED = (*COLLECTIVES, RING_SEND)
"""The kinds of communication with a predicted duration."""
_Prediction = Callable[[float], float]


class _GroupLink(NamedTuple):
    """The latencies and bandwidths of a ring through the slowest group of ranks along some axes.

    Attributes:
        hop_s: the mean latency, in seconds, of a message to the next rank in the ring (hop).
        slowest_hop_s: the largest latency of a hop.
        seconds_per_byte: the inverse bandwidth of a group's share of its slowest link.
        hop_seconds_per_byte: the inverse bandwidth of the slowest hop, which uses only one network card.
        exchange_seconds_per_byte: the duration of an all-to-all per byte of one rank's input.
    """

    size: int
    hop_s: float
    slowest_hop_s: float
    seconds_per_byte: float
    hop_seconds_per_byte: float
    exchange_seconds_per_byte: float


class CommunicationModel:
    """The predicted durations of collectives on one mesh of a cluster.

    Args:
        cluster: a cluster with as many devices as the mesh has ranks.
        fits: measurements of this mesh (:func:`~tensoropt.profiling.links.measure_links`); may be partial.
    """

    def __init__(self, cluster: Cluster, mesh: Mesh, fits: LinkFits | None = None) -> None:
        self.cluster, self.mesh, self.fits = cluster, mesh, fits
        self._fitted = _fitted_cluster(cluster, fits) if fits is not None and fits.pairs else None
        self._links: dict[tuple[int, ...], _GroupLink] = {}
        self._predictions: dict[tuple[str, tuple[int, ...]], tuple[_Prediction, str]] = {}

    @property
    def described(self) -> str:
        return repr((self.cluster.to_dict(), self.mesh, self.fits))

    def time_s(self, kind: str, axes: Sequence[int], num_bytes: float) -> float:
        """Return the seconds of one collective that all groups of ranks along ``axes`` run at the same time.

        Args:
            kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``all_to_all_v``,
                ``broadcast`` or ``ring_send``.
            axes: mesh axes; no axes, axes of size 1 and 0 bytes all cost nothing.
            num_bytes: the size in bytes of the tensor, of one rank's output (all-gather) or input
                (reduce-scatter, all-to-all), of the busiest rank's input (``all_to_all_v``), or of one
                message (``ring_send``).

        Raises:
            MeasurementError: the kind is unknown.
            ClusterError: the mesh lacks an axis.
        """
        # The prediction is looked up before 0 bytes return early, so that an unknown kind or axis is refused
        # for any size.
        predict = self._prediction(kind, tuple(axes))[0]
        return predict(num_bytes) if num_bytes else 0.0

    def source(self, kind: str, axes: Sequence[int]) -> str:
        return self._prediction(kind, tuple(axes))[1]

    def pair_time_s(self, first: int, second: int, num_bytes: float) -> float:
        if first == second or not num_bytes:
            return 0.0
        fit = self._pair_fit(first, second)
        if fit is not None:
            return fit.time_s(num_bytes)
        link = self.cluster.link(first, second)
        launch = _LAUNCH_S[self.cluster.device_type]
        return launch + link.latency_s + num_bytes / link.bandwidth_bytes_per_s

    def pair_source(self, first: int, second: int) -> str:
        return DATA_SHEET if self._pair_fit(first, second) is None else MEASURED

    def _pair_fit(self, first: int, second: int) -> LinkFit | None:
        return self.fits.pairs.get((min(first, second), max(first, second))) if self.fits else None

    def _prediction(self, kind: str, axes: tuple[int, ...]) -> tuple[_Prediction, str]:
        known = self._predictions.get((kind, axes))
        if known is None:
            known = self._predictions[kind, axes] = self._make(kind, self.mesh.normalise_axes(axes))
        return known

    def _make(self, kind: str, axes: tuple[int, ...]) -> tuple[_Prediction, str]:
        # All ranks wait until the busiest one is done, as if each of them sent as much.
        kind = "all_to_all" if kind == BY_VALUES else kind
        if kind not in _PRICED:
            raise MeasurementError(f"unknown collective '{kind}'; valid: {', '.join(_PRICED)}")
        # Axes of size 1 change no group: without them, more measurements match.
        axes = tuple(axis for axis in axes if self.mesh.shape[axis] > 1)
        if not axes:
            return (lambda num_bytes: 0.0), DATA_SHEET
        fits = () if self.fits is None else self.fits.collectives.get((kind, axes), ())
        if fits:
            # There is one fit for each group of the axes. The ranks of all groups meet in the next collective
            # over other axes, so the slowest group counts.
            return (lambda num_bytes: max(fit.time_s(num_bytes) for fit in fits)), MEASURED
        cluster, source = (self.cluster, DATA_SHEET) if self._fitted is None else (self._fitted, FITTED)
        # The alpha of a point-to-point fit already includes the start of a collective.
        launch = _LAUNCH_S[cluster.device_type] if source is DATA_SHEET else 0.0
        if axes not in self._links:
            self._links[axes] = group_link(cluster, self.mesh, axes)
        return _formula(kind, self._links[axes], launch), source


def _formula(kind: str, link: _GroupLink, launch_s: float) -> _Prediction:
    ranks, hop, per_byte = link.size, link.hop_s, link.seconds_per_byte
    ring, depth = (ranks - 1) / ranks, math.ceil(math.log2(ranks))
    match kind:
        case "all_reduce":
            return lambda n: (
                launch_s
                # NCCL and MPICH choose the algorithm by size: the tree wins if latency dominates, the ring if
                # bytes do.
                + min(2 * (ranks - 1) * hop + 2 * ring * n * per_byte, 2 * depth * hop + 2 * n * per_byte)
            )
        case "all_gather" | "reduce_scatter":
            return lambda n: launch_s + (ranks - 1) * hop + ring * n * per_byte
        case "all_to_all":
            # The latency is that of a pairwise exchange with p - 1 rounds.
            return lambda n: launch_s + (ranks - 1) * hop + n * link.exchange_seconds_per_byte
        case "broadcast":
            return lambda n: launch_s + depth * hop + n * per_byte
        case _:  # RING_SEND
            return lambda n: launch_s + link.slowest_hop_s + n * link.hop_seconds_per_byte


def group_link(cluster: Cluster, mesh: Mesh, axes: Sequence[int]) -> _GroupLink:
    """Return the worst latencies and bandwidths of any group while all groups along ``axes`` communicate."""
    groups = mesh.groups(axes)
    # All groups are counted before any of them is priced: a group's share of a node's cards depends on how
    # many other groups leave the node at the same time.
    leaving = _groups_leaving(cluster, groups)
    links = [_group_link(cluster, group, leaving) for group in groups]
    return _GroupLink._make(max(figures) for figures in zip(*links, strict=True))


def _groups_leaving(cluster: Cluster, groups: Sequence[tuple[int, ...]]) -> Counter[tuple[int, int]]:
    leaving: Counter[tuple[int, int]] = Counter()
    for group, (depth, _, outer, block) in itertools.product(groups, _blocks(cluster)):
        for members in _members(group, outer):
            children = {rank // block for rank in members}
            # A group whose members all lie inside one child does not use the links of this level.
            if len(children) > 1:
                leaving.update((depth, child) for child in children)
    return leaving


def _blocks(cluster: Cluster) -> Iterator[tuple[int, Level, int, int]]:
    """Yield (depth from 0, level of links, ranks that it joins, ranks in each part), outermost first."""
    outer = cluster.device_count
    for depth, level in enumerate(cluster.levels):
        yield depth, level, outer, outer // level.size
        outer //= level.size


def _group_link(cluster: Cluster, group: tuple[int, ...], leaving: Counter[tuple[int, int]]) -> _GroupLink:
    size = len(group)
    # A group's ranks are ascending and levels are row-major, so the natural ring crosses each outer link as
    # rarely as possible.
    hops = tuple(zip(group, (*group[1:], group[0]), strict=True))
    latencies = [cluster.link(a, b).latency_s for a, b in hops]
    bandwidth, exchange = math.inf, 0.0
    for depth, level, outer, block in _blocks(cluster):
        for members in _members(group, outer):
            children = list(_members(members, block))
            if len(children) < 2:
                continue
            # A cluster file lists all pairs of a node or of the cluster (cluster/files.py), so one pair shows
            # whether the whole level has links of its own.
            if (children[0][0], children[1][0]) in cluster.pairs:
                bandwidth = min(bandwidth, _pair_ring_bandwidth(cluster, members))
                exchange = max(exchange, _pair_exchange(cluster, members) / size)
                continue
            for child in children:
                # A group gets its share of the child's links, at most one per member.
                share = min(level.link_count / leaving[depth, child[0] // block], len(child))
                rate = level.link.bandwidth_bytes_per_s * share
                bandwidth = min(bandwidth, rate)
                # Each other member receives 1/size of a member's input; the amount that leaves a child is the
                # product of the member counts on either side.
                exchange = max(exchange, len(child) * (len(members) - len(child)) / size / rate)
    return _GroupLink(
        size=size,
        hop_s=sum(latencies) / size,
        slowest_hop_s=max(latencies),
        seconds_per_byte=1 / bandwidth,
        hop_seconds_per_byte=1 / _slowest_hop(cluster, hops, leaving),
        exchange_seconds_per_byte=exchange,
    )


def _slowest_hop(
    cluster: Cluster, hops: Sequence[tuple[int, int]], leaving: Counter[tuple[int, int]]
) -> float:
    """Return the bandwidth, in bytes/s, of the slowest of simultaneous messages, one per pair in ``hops``."""
    rates = []
    for (depth, level, outer, block), (a, b) in itertools.product(_blocks(cluster), hops):
        if a // outer != b // outer or a // block == b // block:
            continue  # inside one child, or between those of an outer level
        link, share = cluster.link(a, b), 1.0
        if (min(a, b), max(a, b)) not in cluster.pairs:
            # Each group that leaves the child has one message that does.
            share = min(level.link_count / leaving[depth, a // block], 1.0)
        rates.append(link.bandwidth_bytes_per_s * share)
    return min(rates)


def _members(ranks: Sequence[int], block: int) -> Iterator[tuple[int, ...]]:
    for _, members in itertools.groupby(ranks, key=lambda rank: rank // block):
        yield tuple(members)


def _pair_ring_bandwidth(cluster: Cluster, members: Sequence[int]) -> float:
    """Return the bandwidth, in bytes/s, of collectives among ranks whose pairs have their own links.

    It is the higher one of two bandwidths. The first is that of simultaneous rings over dedicated wires: the
    smallest total of a rank's wires. The second is that of a single ring: its slowest link, in the best order
    of ranks (for more than 8 ranks, the natural order).
    """

    def figures(first: int, second: int) -> tuple[float, bool]:
        if first == second:
            return 0.0, False
        link = cluster.link(first, second)
        return link.bandwidth_bytes_per_s, link.dedicated

    return _ring_bandwidth(tuple(tuple(figures(a, b) for b in members) for a in members))


@lru_cache(maxsize=4096)
def _ring_bandwidth(table: tuple[tuple[tuple[float, bool], ...], ...]) -> float:
    """Return the bandwidth of rings in bytes/s; ``table[i][j]``: (bytes/s, is dedicated) of the link i, j."""
    size = len(table)
    # Several simultaneous rings reach every rank only if dedicated wires connect all of them.
    wires = [sum(bandwidth for bandwidth, dedicated in row if dedicated) for row in table]
    wired = nx.Graph((a, b) for a in range(size) for b in range(size) if table[a][b][1])
    several = min(wires) if len(wired) == size and nx.is_connected(wired) else 0.0

    def slowest(ring: tuple[int, ...]) -> float:
        return min(table[a][b][0] for a, b in zip(ring, (*ring[1:], ring[0]), strict=True))

    orders: Iterator[tuple[int, ...]] = iter([tuple(range(size))])
    # The number of rings is (size - 1)! / 2, so the best ring is found by enumeration in small groups only.
    if size <= _MOST_RANKS_FOR_BEST_RING:
        orders = (
            (0, *rest)
            for rest in itertools.permutations(range(1, size))
            if rest[0] <= rest[-1]  # a reversed ring is the same ring
        )
    return max(several, max(slowest(order) for order in orders))


def _pair_exchange(cluster: Cluster, members: Sequence[int]) -> float:
    """Return the duration of an all-to-all, in seconds per byte that each rank sends to each other rank."""
    worst = 0.0
    for rank in members:
        links: list[Link] = [cluster.link(rank, other) for other in members if other != rank]
        wires = max((1 / link.bandwidth_bytes_per_s for link in links if link.dedicated), default=0.0)
        others = sum(1 / link.bandwidth_bytes_per_s for link in links if not link.dedicated)
        worst = max(worst, wires, others)
    return worst


def _fitted_cluster(cluster: Cluster, fits: LinkFits) -> Cluster | None:
    """Return the cluster with links as fitted, each level as its slowest pair; None if a level has no fit."""

    def replaced(link: Link, pairs: list[tuple[int, int]]) -> Link | None:
        # A fit's last segment has the slope of large messages, its first one the latency of small ones.
        lines = [fits.pairs[pair].segments[-1] for pair in pairs]
        first = [fits.pairs[pair].segments[0].alpha_s for pair in pairs]
        slope = max((line.seconds_per_byte for line in lines), default=0.0)
        # A flat line gives no bandwidth; its level or pair counts as not fitted.
        if slope <= 0:
            return None
        return replace(link, latency_s=max(first), bandwidth_bytes_per_s=1 / slope, source="fitted")

    levels = []
    for level in cluster.levels:
        crossing = [pair for pair in fits.pairs if cluster.crossing_level(*pair) is level]
        link = replaced(level.link, crossing)
        # All levels or none: a formula over several levels has one source, which must not be half true.
        if link is None:
            return None
        levels.append(replace(level, link=link))
    pairs = {
        pair: replaced(link, [pair]) if pair in fits.pairs else link for pair, link in cluster.pairs.items()
    }
    return replace(
        cluster,
        levels=tuple(levels),
        pairs={pair: link for pair, link in pairs.items() if link is not None},
    )
