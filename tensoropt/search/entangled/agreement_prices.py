"""Prices that make the copies of a split operator agree: a tighter relaxation.

Every copy t of a fixed operator f pays, beside its share of f's cost, a price u(t, c) for class c; the prices
of all copies of f sum to zero, so a strategy in which they agree costs what it did, and every price gives a
bound. Better ones come by subgradient steps of Polyak's length (Lagrangian decomposition: Guignard and Kim
1987; Held, Wolfe and Crowder 1974), for each line of the hull on its own, all lines in one pass.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tensoropt.frontier.tools import Points
from tensoropt.search.costgraph import FloatArray, IntArray
from tensoropt.search.entangled.relaxation import Relaxation
from tensoropt.search.hull import SLACK
from tensoropt.search.scalar import descend, leaf_values, pass_up

STEPS = 120
PATIENCE = 8


def tighten(bounded: Relaxation, known: Points) -> Relaxation:
    """The relaxation with better prices; ``known``: strategies, which no bound can exceed."""
    weight_m, weight_t = bounded.hull.weight_m, bounded.hull.weight_t
    program, flat = bounded.program, bounded.search.flat
    index = (flat.meta, flat.left_out, flat.left_k, flat.right_out, flat.right_k)
    leaf = (flat.leaf_offsets, flat.leaf_memory, flat.leaf_time)
    root = int(program.base[program.logical[program.root].table])
    least = (weight_m[:, None] * known.memory + weight_t[:, None] * known.time).min(axis=1)
    free = leaf_values(*leaf, weight_m, weight_t, flat.entries)
    copies = _Copies(bounded)
    price = np.zeros((copies.entries, len(weight_m)))
    best, best_price = np.full(len(weight_m), -np.inf), price.copy()
    pace, stale = np.ones(len(weight_m)), np.zeros(len(weight_m), int)
    for _ in range(STEPS):
        table = free.copy()
        table[copies.rows] += price
        pass_up(*index, table)
        better = table[root] > best
        best_price[:, better] = price[:, better]
        best = np.maximum(best, table[root])
        stale = np.where(better, 0, stale + 1)
        pace = np.where(stale >= PATIENCE, pace / 2, pace)
        stale[stale >= PATIENCE] = 0
        entry = descend(*index, *leaf, flat.tree, program.root, table, weight_m, weight_t)[2]
        slope = copies.disagreement(entry)
        length = (slope**2).sum(axis=0)
        room = np.maximum(least - table[root], 0.0)
        if not (length * room).any():
            break
        price = price + np.where(length > 0, pace * room / np.maximum(length, 1e-300), 0.0) * slope
    table = free
    table[copies.rows] += best_price
    pass_up(*index, table)
    value = table[root] - SLACK * (np.abs(table[root]) + np.abs(best_price).sum(axis=0))
    hull = replace(bounded.hull, value=value)
    return replace(bounded, search=bounded.search.tightened(hull, table), hull=hull)


class _Copies:
    """The copies of all fixed operators: where their classes stand among the entries of the leaves."""

    def __init__(self, bounded: Relaxation) -> None:
        problem, program = bounded.program.problem, bounded.program
        groups = [same for same in bounded.split.twins.values() if len(same) > 1]
        rows, self.groups, at = [], [], 0
        for same in groups:
            size = problem.domains[same[0]]
            for t in same:
                first = int(program.base[problem.node_leaf[t]])
                rows.append(np.arange(first, first + size))
            self.groups.append((np.array(same), at, size))
            at += size * len(same)
        self.rows = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        self.entries = at

    def disagreement(self, entry: IntArray) -> FloatArray:
        """(rows, W) per copy and class: whether the copy chose it, less the share of the copies that did."""
        out = np.zeros((self.entries, entry.shape[1]))
        for same, at, size in self.groups:
            chosen = entry[same][:, None, :] == np.arange(size)[None, :, None]  # (copies, classes, W)
            out[at : at + size * len(same)] = (chosen - chosen.mean(axis=0)).reshape(-1, entry.shape[1])
        return out
