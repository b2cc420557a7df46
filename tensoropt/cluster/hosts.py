"""Functions that join several hosts into one cluster: copies of this host, or the hosts of a ``torchrun`` job
(:func:`tensoropt.detect`). The caller names the network between them; `measure links` times it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tensoropt.cluster.catalog import link, list_links
from tensoropt.cluster.hardware import Cluster, Level, Link
from tensoropt.cluster.quantities import BANDWIDTH
from tensoropt.errors import ClusterError

_LIKE = "Ethernet-100G"
"""The catalogue's link whose latency is used if only a bandwidth is given."""


class Network(NamedTuple):
    """The network between hosts: each host has ``cards`` links of this kind to the others."""

    link: Link
    cards: int


def network(text: str) -> Network:
    """Return the network between hosts that a text describes.

    Args:
        text: a link of the catalogue or a bandwidth, with the number of cards before it if there are several:
            ``IB-400G``, ``8xIB-400G``, ``2x100Gbit/s``.

    Raises:
        ClusterError: the text names no link.
    """
    cards, _, name = text.partition("x") if re.match(r"\d+x", text) else ("1", "", text)
    if not text or int(cards) < 1:
        raise ClusterError(
            f"the network between hosts is '{text}'; give --network, for example 8xIB-400G or 100Gbit/s"
        )
    if name in list_links():
        return Network(link(name), int(cards))
    try:
        bandwidth = BANDWIDTH.read_written(name, "--network")
    except ClusterError as error:
        raise ClusterError(
            f"{error}; or give a link of the catalogue, for example 8xIB-400G ({', '.join(list_links())})"
        ) from None
    like = link(_LIKE)
    source = f"--network; latency: that of {like.name}"
    return Network(replace(like, name=name, bandwidth_bytes_per_s=bandwidth, source=source), int(cards))


def together(hosts: Sequence[Cluster], between: Network) -> Cluster:
    """Join hosts into one cluster, with ranks in the order of the hosts.

    Args:
        hosts: the cluster of each host alone. Each inner level gets the slowest link of any host.
        between: the network between the hosts.

    Raises:
        ClusterError: the hosts differ in the number of devices or in their levels.
    """
    first = hosts[0]
    counts = [host.device_count for host in hosts]
    if len(set(counts)) > 1:
        raise ClusterError(
            f"the hosts have {', '.join(map(str, counts))} devices, but hosts of one cluster need equally "
            f"many; make {min(counts)} visible on each (CUDA_VISIBLE_DEVICES)"
        )
    shapes = {tuple((level.name, level.size) for level in host.levels) for host in hosts}
    if len(shapes) > 1:
        raise ClusterError(
            "the hosts have different levels of links between their devices; describe the cluster in a file, "
            "with the levels that all hosts have"
        )
    inside = [
        min(of, key=lambda level: level.link.bandwidth_bytes_per_s)
        for of in zip(*(h.levels for h in hosts), strict=True)
    ]
    if len(hosts) == 1:
        return first
    return Cluster(
        name=f"{len(hosts)} hosts",
        devices=tuple(device for host in hosts for device in host.devices),
        levels=(Level(name=_HOST, size=len(hosts), link=between.link, link_count=between.cards), *inside),
        pairs={
            (low + number * counts[0], high + number * counts[0]): value
            for number, host in enumerate(hosts)
            for (low, high), value in host.pairs.items()
        },
        source=f"{_DETECTED} {len(hosts)} hosts",
    )


_HOST = "node"
"""The name of the level that connects hosts."""
_DETECTED = "detected on"
_ALIKE = "this host, for"
"""The first words of the ``source`` of a cluster of several hosts, which :func:`detected_hosts` reads."""


def taken_alike(cluster: Cluster, number: int) -> Cluster:
    """Return the cluster with a ``source`` saying that ``number`` hosts are assumed to be like this one."""
    return replace(cluster, source=f"{_ALIKE} {number} hosts that are assumed to be alike")


def detected_hosts(cluster: Cluster) -> int:
    """Return the number of hosts of a cluster that :func:`tensoropt.detect` found; 1 for other clusters."""
    found = cluster.source.startswith((_DETECTED, _ALIKE))
    return next((level.size for level in cluster.levels[:1] if found and level.name == _HOST), 1)
