"""Random placements with an order of their transfers that takes no simulator to find."""

import random
from collections.abc import Sequence

import networkx as nx

from tensoropt.placement import Placement
from tensoropt.placement.graph import PlacedGraph, placed_graph
from tensoropt.placement.strategy import PlacedStrategy, ValueTransfer, needed_routes
from tensoropt.sharding.groups import GroupGraph
from tensoropt.verify.random_strategies import graph_of_reads, random_placement, random_splits


def random_placed(
    groups: GroupGraph, devices: int, rng: random.Random, share: float = 0.3, micro_batches: int = 1
) -> PlacedStrategy:
    """A random placement of a model, some of its groups cut where it runs in one micro-batch."""
    splits = random_splits(groups, devices, rng, share) if micro_batches == 1 else None
    graph = placed_graph(groups, splits, micro_batches)
    return in_any_order(graph, random_placement(graph, devices, rng))


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
    reads = graph_of_reads(graph)
    return _done(reads, placement.forward), _done(reads.reverse(), placement.backward)


def _done(before: nx.DiGraph, orders: Sequence[Sequence[int]]) -> list[int]:
    done = before.copy()
    for order in orders:
        nx.add_path(done, order)
    times = {op: time for time, ops in enumerate(nx.topological_generations(done)) for op in ops}
    return [times[op] for op in range(len(times))]
