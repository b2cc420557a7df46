"""Recovers the strategies of result points: the eliminations are unrolled in reverse.

Tables record only which k won. The two points of the factors are looked up by their sum, which is exact on
the dyadic grid; so a point costs 20 bytes instead of 28, and only requested points are rebuilt, all of them
in one compiled call.

A *pick* (operators + edges, 2) says which entry, and which of its points, every operator and edge uses.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tensoropt.frontier.kernels import find_pair
from tensoropt.search.engine import Pass
from tensoropt.search.program import Program
from tensoropt.search.reduced_graph import ReducedGraph
from tensoropt.search.result import ChosenStrategies
from tensoropt.search.scalar import flatten
from tensoropt.types import Indices


def unroll(program: Program, result: Pass, points: Indices) -> Indices:
    """(n, operators + edges, 2) the picks of these points of the root table."""
    flat = flatten(program)
    counts = np.concatenate([np.diff(table.offsets) for table in result.tables])
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    memory, time, label = (
        np.concatenate([getattr(table, name) for table in result.tables])
        for name in ("memory", "time", "label")
    )
    picks = np.zeros((len(points), program.inputs, 2), np.int64)
    index = (flat.meta, flat.left_out, flat.left_k, flat.right_out, flat.right_k, flat.tree)
    found = _unroll_points(*index, offsets, memory, time, label, program.root, np.asarray(points), picks)
    assert found, "a point of a product is the sum of two points"
    return picks


@njit(cache=True, nogil=True)
def _unroll_points(
    meta, left_out, left_k, right_out, right_k, tree, offsets, memory, time, label, root, points, picks
):
    """Fill ``picks``; return whether every sum was matched. ``offsets`` (entries + 1,): the points of all
    tables' entries, one table after another, in ``memory``, ``time`` and ``label``.
    """
    inputs = picks.shape[1]
    # A stack instead of recursion: the tree of factors can be as deep as the graph has operators.
    stack = np.empty((tree.shape[0] + 1, 3), np.int64)
    for n in range(points.shape[0]):
        stack[0, 0], stack[0, 1], stack[0, 2] = root, 0, points[n]
        depth = 1
        while depth > 0:
            depth -= 1
            node, entry, point = stack[depth, 0], stack[depth, 1], stack[depth, 2]
            base, s, left_node, right_node = tree[node]
            if s < 0:
                # A leaf that is not an input is the empty product.
                if node < inputs:
                    picks[n, node, 0] = entry
                    picks[n, node, 1] = point
                continue
            _, left, right, _, _, at_out, at_k = meta[s]
            at = offsets[base + entry] + point
            k = label[at]
            i = left_out[at_out + entry] + left_k[at_k + k]
            j = right_out[at_out + entry] + right_k[at_k + k]
            a0, a1 = offsets[left + i], offsets[left + i + 1]
            b0, b1 = offsets[right + j], offsets[right + j + 1]
            p, q = find_pair(memory[a0:a1], time[a0:a1], memory[b0:b1], time[b0:b1], memory[at], time[at])
            if p < 0:
                return False
            stack[depth, 0], stack[depth, 1], stack[depth, 2] = left_node, i, p
            stack[depth + 1, 0], stack[depth + 1, 1], stack[depth + 1, 2] = right_node, j, q
            depth += 2
    return True


def chosen_strategies(reduced: ReducedGraph, picks: Indices) -> ChosenStrategies:
    """The configurations and options, in the caller's numbering, of picks (n, operators + edges, 2)."""
    graph, count = reduced.graph, len(picks)
    operators = len(graph.names)
    configurations = np.empty((count, operators), np.int64)
    options = np.empty((count, operators), np.int64)
    edge_options = np.empty((count, len(graph.edges)), np.int64)
    for v in range(operators):
        leaf = reduced.leaves[reduced.node_leaf[v]]
        at = leaf.offsets[picks[:, v, 0]] + picks[:, v, 1]
        configurations[:, v], options[:, v] = leaf.configuration[at], leaf.option[at]
    first = len(reduced.domains)
    for number, small in enumerate(reduced.edges):
        leaf = reduced.leaves[small.leaf]
        at = leaf.offsets[picks[:, first + number, 0]] + picks[:, first + number, 1]
        edge_options[:, number] = leaf.option[at]
    return ChosenStrategies.of(graph, configurations, options, edge_options)
