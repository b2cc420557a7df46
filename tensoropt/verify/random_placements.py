"""Random legal placements of a model: random devices, orders and splits.

None of them is meant to be good; they test rules, lowering and the simulator.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from tensoropt.placement import Placement
from tensoropt.placement.graph import PlacedGraph, split_choices
from tensoropt.sharding.groups import GroupGraph


def random_splits(
    groups: GroupGraph, devices: int, rng: random.Random, share: float = 0.3
) -> Mapping[str, tuple[str, int]]:
    """Return some groups, each cut in one of the ways in which it can be.

    Args:
        share: how often a group that can be cut is cut.
    """
    found = {}
    for group in groups.groups:
        if rng.random() < share and (choices := split_choices(groups, group, devices)):
            found[group.name] = rng.choice(choices)
    return found


def random_placement(graph: PlacedGraph, devices: int, rng: random.Random) -> Placement:
    """Return random devices, and random orders in which everything can run, with backward no mirror of
    forward.

    An operator that changes a buffer runs on its own device, of course; there are no other requirements.
    """
    device = [rng.randrange(devices) for _ in graph.operators]
    after = readers_of_operators(graph)
    forward = random_order(after, rng)
    # Drawn anew rather than forward reversed: the executor has to handle this as well.
    backward = random_order(reversed_edges(after), rng)
    return Placement(
        tuple(device), _per_device(forward, device, devices), _per_device(backward, device, devices)
    )


def random_order(after: Sequence[Sequence[int]], rng: random.Random) -> list[int]:
    """Return every operator after those it waits for, otherwise in random order."""
    waiting = [len(row) for row in reversed_edges(after)]
    ready = [node for node, count in enumerate(waiting) if not count]
    found = []
    while ready:
        node = ready.pop(rng.randrange(len(ready)))
        found.append(node)
        for other in after[node]:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return found


def readers_of_operators(graph: PlacedGraph) -> list[list[int]]:
    """Return, for each operator, the operators that read what it makes, by position."""
    # By position: orders and devices are lists over the operators.
    makers = {v: i for i, op in enumerate(graph.operators) for v in op.writes}
    after: list[set[int]] = [set() for _ in graph.operators]
    for number, op in enumerate(graph.operators):
        for value in op.reads:
            after[makers[value]].add(number)
    return [sorted(row) for row in after]


def reversed_edges(after: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, for each operator, those that have it in their row of ``after``."""
    before: list[list[int]] = [[] for _ in after]
    for node, row in enumerate(after):
        for other in row:
            before[other].append(node)
    return before


def _per_device(order: Sequence[int], device: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(o for o in order if device[o] == d) for d in range(count))
