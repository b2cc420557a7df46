"""Several hosts as one cluster: how many a job has, the network between them, and what each of them has.

A number of hosts is taken to be like this one, or the processes of a job say what their own hosts have
(:func:`tensoropt.detect` under ``torchrun``). The network between them is said; `measure links` times it.
"""

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
"""The link of the catalogue whose latency is taken where only a bandwidth is given."""


class Network(NamedTuple):
    """The links of each host to the others."""

    link: Link
    cards: int


def network(text: str) -> Network:
    """Return the links between hosts.

    Args:
        text: a link of the catalogue or a bandwidth, with the number of cards before it if there are several:
            ``IB-400G``, ``8xIB-400G``, ``2x100Gbit/s``.

    Raises:
        ClusterError: the text is no link.
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


def together(hosts: Sequence[Cluster], between: Network, name: str = "") -> Cluster:
    """Return the cluster of all devices of some hosts, in their order.

    Args:
        hosts: what each of them has.
        between: the network; of hosts that report different ones, the slowest.

    Raises:
        ClusterError: they have different numbers of devices, or are linked otherwise inside.
    """
    first = hosts[0]
    counts = [host.device_count for host in hosts]
    if len(set(counts)) > 1:
        raise ClusterError(
            f"the hosts have {', '.join(map(str, counts))} devices; hosts of one cluster have equally "
            f"many, so show {min(counts)} of each (CUDA_VISIBLE_DEVICES)"
        )
    shapes = {tuple((level.name, level.size) for level in host.levels) for host in hosts}
    if len(shapes) > 1:
        raise ClusterError(
            "the devices of the hosts are linked in different ways inside; describe the cluster in a file, "
            "and leave out what is faster on some"
        )
    inside = [
        min(of, key=lambda level: level.link.bandwidth_bytes_per_s)
        for of in zip(*(h.levels for h in hosts), strict=True)
    ]
    if len(hosts) == 1:
        return first
    return Cluster(
        name=name or f"{len(hosts)} hosts",
        devices=tuple(device for host in hosts for device in host.devices),
        levels=(
            Level(name=_HOST, size=len(hosts), link=between.link, link_count=between.cards),
            *inside,
        ),
        pairs={
            (low + number * counts[0], high + number * counts[0]): value
            for number, host in enumerate(hosts)
            for (low, high), value in host.pairs.items()
        },
        source=f"{_DETECTED} {len(hosts)} hosts",
    )


_HOST = "node"
"""The name of the level of hosts."""
_DETECTED = "detected on"
_ALIKE = "this host, for"
"""How the sources begin of clusters of several hosts."""


def taken_alike(cluster: Cluster, number: int) -> Cluster:
    """Return the cluster of a number of hosts of which only this one was looked at, with that in its
    source."""
    return replace(cluster, source=f"{_ALIKE} {number} hosts that are taken to be alike")


def detected_hosts(cluster: Cluster) -> int:
    """Return of how many hosts a cluster was made by ``detect``; 1 for all others, whoever describes them."""
    found = cluster.source.startswith((_DETECTED, _ALIKE))
    return next((level.size for level in cluster.levels[:1] if found and level.name == _HOST), 1)
