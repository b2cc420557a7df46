"""From a point of the result back to its strategy: unroll of the eliminations, in reverse.

Tables remember only which k won. The two points of the factors are found again by their sum, which is
exact on the dyadic grid; so a point costs 20 bytes instead of 28, and only asked-for points are rebuilt.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from tensoropt.frontier.kernels import find_pair
from tensoropt.search.engine import Pass
from tensoropt.search.program import Program
from tensoropt.search.result import Choice


def unroll_point(program: Program, result: Pass, index: int) -> Choice:
    """Strategy and options of point ``index`` of the root table."""
    picked: dict[int, tuple[int, int]] = {}
    stack = [(program.root, 0, index)]
    while stack:
        node, entry, point = stack.pop()
        logical = program.logical[node]
        if logical.left < 0:
            picked[node] = entry, point
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
    return _choice(program, picked)


def unroll_vertex(program: Program, choice: NDArray[np.int32]) -> Choice:
    """Strategy and options of a hull vertex; ``choice`` (logical,) k of every step, point of every leaf."""
    picked: dict[int, tuple[int, int]] = {}
    stack = [(program.root, 0)]
    while stack:
        node, entry = stack.pop()
        logical = program.logical[node]
        k = int(choice[node])
        if logical.left < 0:
            picked[node] = entry, k
            continue
        step = program.steps[logical.table - program.leaves]
        stack.append((logical.left, int(step.left_out[entry] + step.left_k[k])))
        stack.append((logical.right, int(step.right_out[entry] + step.right_k[k])))
    return _choice(program, picked)


def _choice(program: Program, picked: dict[int, tuple[int, int]]) -> Choice:
    graph = program.problem.graph
    strategy: dict[Hashable, int] = {}
    options: dict[Hashable, int] = {}
    for node, (entry, point) in picked.items():
        logical = program.logical[node]
        if logical.operator < 0 and logical.edge < 0:
            continue
        leaf = program.problem.leaves[logical.table]
        at = int(leaf.offsets[entry]) + point
        if logical.operator >= 0:
            name = graph.names[logical.operator]
            strategy[name] = int(leaf.configuration[at])
            options[name] = int(leaf.option[at])
        else:
            edge = graph.edges[logical.edge]
            key = (graph.names[edge.source], graph.names[edge.target], edge.ordinal)
            options[key] = int(leaf.option[at])
    return {name: strategy[name] for name in graph.names}, options
