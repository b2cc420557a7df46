"""Links by pairs of ranks, and the hierarchy that they imply."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, pairwise

from tensoropt.cluster.devices import Link
from tensoropt.cluster.hardware import Level


def levels_from_pairs(
    pairs: Mapping[tuple[int, int], Link], device_count: int, name: str
) -> tuple[Level, ...]:
    """Derive the hierarchy from a full pair list: nested blocks of consecutive ranks with faster links
    inside.

    Each level's link is the slowest one inside it. A list without such blocks gives one level.
    """

    def slowest(links: list[Link]) -> Link:
        return min(links, key=lambda link: (link.bandwidth_bytes_per_s, -link.latency_s))

    blocks = [1]
    for block in range(2, device_count):
        # Blocks nest and fill the cluster, because ranks are numbered row-major over the levels.
        if device_count % block or block % blocks[-1]:
            continue
        inside = [pairs[pair].bandwidth_bytes_per_s for pair in pairs if pair[0] // block == pair[1] // block]
        outside = [
            pairs[pair].bandwidth_bytes_per_s for pair in pairs if pair[0] // block != pair[1] // block
        ]
        # Strictly faster inside: equal links show no level.
        if min(inside) > max(outside):
            blocks.append(block)
    blocks.append(device_count)
    levels = []
    for depth, (inner, outer) in enumerate(pairwise(blocks)):
        crossing = [
            link
            for (low, high), link in pairs.items()
            if low // outer == high // outer and low // inner != high // inner
        ]
        levels.append(
            Level(
                name=name if depth == 0 else f"{name}_group{depth}",
                size=outer // inner,
                link=slowest(crossing),
            )
        )
    return tuple(reversed(levels))


def all_pairs(device_count: int) -> list[tuple[int, int]]:
    """Every ``(low, high)`` pair of ranks."""
    return list(combinations(range(device_count), 2))
