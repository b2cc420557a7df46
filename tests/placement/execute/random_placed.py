"""Random placements, and an order of their transfers that takes no simulator to find."""

import itertools
import random
from collections.abc import Mapping, Sequence

from tensoropt.placement import Placement
from tensoropt.placement.graph import PlacedGraph, placed_graph, split_choices
from tensoropt.placement.strategy import PlacedStrategy, ValueTransfer, needed_routes
from tensoropt.sharding.groups import GroupGraph


def random_placed(
    groups: GroupGraph, devices: int, rng: random.Random, share: float = 0.3, micro_batches: int = 1
) -> PlacedStrategy:
    """A random placement of a model, some of its groups cut where it runs in one micro-batch."""
    splits = random_splits(groups, devices, rng, share) if micro_batches == 1 else None
    graph = placed_graph(groups, splits, micro_batches)
    return in_any_order(graph, random_placement(graph, devices, rng))


def random_splits(
    groups: GroupGraph, devices: int, rng: random.Random, share: float = 0.3
) -> Mapping[str, tuple[str, int]]:
    """Cuts of some groups. ``share``: the probability that a group is cut."""
    splits = {}
    for group in groups.groups:
        if rng.random() < share and (choices := split_choices(groups, group, devices)):
            splits[group.name] = rng.choice(choices)
    return splits


def random_placement(graph: PlacedGraph, devices: int, rng: random.Random) -> Placement:
    """Random devices, and legal random orders."""
    device = [rng.randrange(devices) for _ in graph.operators]
    after = _readers_of_operators(graph)
    forward = _random_order(after, rng)
    # Not forward reversed: the executor has to handle this as well.
    backward = _random_order(_reversed_edges(after), rng)
    return Placement(
        tuple(device), _per_device(forward, device, devices), _per_device(backward, device, devices)
    )


def _random_order(after: Sequence[Sequence[int]], rng: random.Random) -> list[int]:
    waiting = [len(row) for row in _reversed_edges(after)]
    ready = [node for node, count in enumerate(waiting) if not count]
    order = []
    while ready:
        node = ready.pop(rng.randrange(len(ready)))
        order.append(node)
        for other in after[node]:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return order


def _readers_of_operators(graph: PlacedGraph) -> list[list[int]]:
    """Of each operator its readers, by position."""
    makers = {v: i for i, op in enumerate(graph.operators) for v in op.writes}
    after: list[set[int]] = [set() for _ in graph.operators]
    for number, op in enumerate(graph.operators):
        for value in op.reads:
            after[makers[value]].add(number)
    return [sorted(row) for row in after]


def _reversed_edges(after: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of each operator those that list it in ``after``."""
    before: list[list[int]] = [[] for _ in after]
    for node, row in enumerate(after):
        for other in row:
            before[other].append(node)
    return before


def _per_device(order: Sequence[int], device: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(o for o in order if device[o] == d) for d in range(count))


def in_any_order(graph: PlacedGraph, placement: Placement) -> PlacedStrategy:
    """A placement with an order of its transfers that its own orders allow.

    Both directions are sorted by when operators of one length each would be done.
    """
    forward, backward = _times(graph, placement)
    makers = {v.name: i for i, op in enumerate(graph.operators) for v in op.writes}
    readers: dict[str, list[int]] = {}
    for number, op in enumerate(graph.operators):
        for value in op.reads:
            readers.setdefault(value.name, []).append(number)

    def key(route: ValueTransfer) -> tuple[bool, int, str, int]:
        name, source, target, back = route
        if not back:
            return back, forward[makers[name]], name, target
        done = [backward[r] for r in readers[name] if placement.device[r] == source]
        return back, max(done), name, source

    return PlacedStrategy(graph, placement, tuple(sorted(needed_routes(graph, placement), key=key)))


def _times(graph: PlacedGraph, placement: Placement) -> tuple[list[int], list[int]]:
    """When each operator is done, forward and backward."""
    after = _readers_of_operators(graph)
    before = _reversed_edges(after)
    return (
        _done(before, placement.forward),
        _done(after, placement.backward_orders) if placement.backward_orders else [],
    )


def _done(before: Sequence[Sequence[int]], orders: Sequence[Sequence[int]]) -> list[int]:
    time = [0] * len(before)
    needs = [set(row) for row in before]
    for order in orders:
        for one, other in itertools.pairwise(order):
            needs[other].add(one)
    left = [len(row) for row in needs]
    after: list[list[int]] = [[] for _ in needs]
    for node, row in enumerate(needs):
        for other in row:
            after[other].append(node)
    ready = [node for node, count in enumerate(left) if not count]
    while ready:
        node = ready.pop()
        time[node] += 1
        for other in after[node]:
            time[other] = max(time[other], time[node])
            left[other] -= 1
            if not left[other]:
                ready.append(other)
    return time
