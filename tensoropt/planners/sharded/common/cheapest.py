"""Find the strategy of least cost in a cost graph with one objective, such as time alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tensoropt.search import CostGraph, track_frontier
from tensoropt.types import Floats


def cheapest(
    nodes: Mapping[str, Floats], edges: Sequence[tuple[str, str, Floats]]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return each node's configuration in the cheapest strategy, and a note on the gap if it is not proven.

    Args:
        nodes: the cost of each of a node's K configurations, (K,); inf marks an impossible one.
        edges: (node a, node b, cost of each pair of their configurations (Ka, Kb)).

    Raises:
        NoStrategyError: no strategy is possible.
    """
    graph = CostGraph()
    for name, costs in nodes.items():
        graph.add_operator(name, np.stack([np.zeros_like(costs), costs], axis=-1))
    for a, b, costs in edges:
        graph.add_edge(a, b, np.stack([np.zeros_like(costs), costs], axis=-1))
    frontier = track_frontier(graph)
    notes = () if frontier.exact else (*frontier.notes, f"at most {frontier.gap[0]:.1%} above the optimum")
    return frontier.strategy(0), notes
