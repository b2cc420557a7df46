"""From a point of the result back to its strategy: unroll of the eliminations, in reverse.

Tables remember only which k won. The two points of the factors are found again by their sum, which is
exact on the dyadic grid; so a point costs 20 bytes instead of 28, and only asked-for points are rebuilt.

A *pick* (operators + edges, 2) says which entry and which of its points every operator and edge takes.
"""

from __future__ import annotations

import numpy as np

from tensoropt.frontier.kernels import find_pair
from tensoropt.search.engine import Pass
from tensoropt.search.program import Program
from tensoropt.search.reduced_graph import ReducedGraph
from tensoropt.search.result import ChosenStrategy, OptionKey
from tensoropt.types import Indices


def unroll(program: Program, result: Pass, index: int) -> Indices:
    """The pick of point ``index`` of the root table."""
    pick = np.zeros((program.inputs, 2), np.int64)
    # A stack instead of recursion: the tree of factors can be as deep as the graph has operators, which
    # Python's recursion limit would not allow.
    stack = [(program.root, 0, index)]
    while stack:
        node, entry, point = stack.pop()
        logical = program.logical[node]
        if logical.left < 0:
            # A leaf that is no input is the empty product.
            if node < program.inputs:
                pick[node] = entry, point
            continue
        step = program.steps[logical.table - program.leaves]
        table = result.tables[logical.table]
        at = int(table.offsets[entry]) + point
        k = int(table.label[at])
        i, j = int(step.left_out[entry] + step.left_k[k]), int(step.right_out[entry] + step.right_k[k])
        left, right = result.tables[step.left], result.tables[step.right]
        a = slice(int(left.offsets[i]), int(left.offsets[i + 1]))
        b = slice(int(right.offsets[j]), int(right.offsets[j + 1]))
        p, q = find_pair(
            left.memory[a], left.time[a], right.memory[b], right.time[b], table.memory[at], table.time[at]
        )
        assert p >= 0, "a point of a product is the sum of two points"
        stack += [(logical.left, i, p), (logical.right, j, q)]
    return pick


def chosen_strategy(reduced: ReducedGraph, pick: Indices) -> ChosenStrategy:
    """Configurations and options in the caller's numbers and names."""
    graph = reduced.graph
    strategy: dict[str, int] = {}
    options: dict[OptionKey, int] = {}
    n = len(reduced.domains)
    for v, (name, (entry, point)) in enumerate(zip(graph.names, pick.tolist(), strict=False)):
        leaf = reduced.leaves[reduced.node_leaf[v]]
        at = int(leaf.offsets[entry]) + point
        strategy[name] = int(leaf.configuration[at])
        options[name] = int(leaf.option[at])
    for edge, small, (entry, point) in zip(graph.edges, reduced.edges, pick[n:].tolist(), strict=True):
        leaf = reduced.leaves[small.leaf]
        key = (graph.names[edge.source], graph.names[edge.target], edge.ordinal)
        options[key] = int(leaf.option[int(leaf.offsets[entry]) + point])
    return ChosenStrategy(strategy, options)
