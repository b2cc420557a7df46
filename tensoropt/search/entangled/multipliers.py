"""Lagrange multipliers that make the copies of a split operator agree: a tighter relaxation.

Every copy t of a fixed operator f pays, in addition to its share of f's cost, a multiplier u(t, c) for class
c. The multipliers of all copies of f sum to zero, so a strategy in which they agree costs the same as before,
and any multipliers give a bound. Subgradient steps with Polyak's length improve them (Lagrangian
decomposition: Guignard and Kim 1987; Held, Wolfe and Crowder 1974), for each line of the hull separately, all
lines in one pass.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tensoropt.frontier.tools import Points
from tensoropt.search.entangled.relaxation import Relaxation
from tensoropt.search.hull import SLACK
from tensoropt.search.scalar import descend, leaf_values, pass_up
from tensoropt.types import Floats, Indices

STEPS = 120
"""The number of subgradient steps; an assumption."""
STALE_STEPS = 8
"""After this many steps without a better bound, a line's step length is halved (as in Held, Wolfe and Crowder
1974; the number is an assumption)."""


def tighten(bounded: Relaxation, known: Points) -> Relaxation:
    """The relaxation with better multipliers; ``known``: strategies, which no bound can exceed."""
    weight_m, weight_t = bounded.hull.weight_m, bounded.hull.weight_t
    program, flat = bounded.program, bounded.search.flat
    index = (flat.meta, flat.left_out, flat.left_k, flat.right_out, flat.right_k)
    leaf = (flat.leaf_offsets, flat.leaf_memory, flat.leaf_time)
    root = int(program.base[program.logical[program.root].table])
    least = (weight_m[:, None] * known.memory + weight_t[:, None] * known.time).min(axis=1)
    free = leaf_values(*leaf, weight_m, weight_t, flat.entries)
    where = _Copies(bounded)
    multiplier = np.zeros((where.entries, len(weight_m)))
    best, best_multiplier = np.full(len(weight_m), -np.inf), multiplier.copy()
    pace, stale = np.ones(len(weight_m)), np.zeros(len(weight_m), int)
    for _ in range(STEPS):
        table = free.copy()
        table[where.rows] += multiplier
        pass_up(*index, table)
        better = table[root] > best
        best_multiplier[:, better] = multiplier[:, better]
        best = np.maximum(best, table[root])
        stale = np.where(better, 0, stale + 1)
        pace = np.where(stale >= STALE_STEPS, pace / 2, pace)
        stale[stale >= STALE_STEPS] = 0
        entry = descend(*index, *leaf, flat.tree, program.root, table, weight_m, weight_t)[2]
        # A subgradient of the bound. It sums to zero over the copies of an operator, and so do the
        # multipliers.
        slope = where.disagreement(entry)
        length = (slope**2).sum(axis=0)
        # Polyak's step: the distance to the best known value over the squared length of the subgradient.
        room = np.maximum(least - table[root], 0.0)
        # Every line is tight: its copies agree, or the bound has met a known strategy.
        if not (length * room).any():
            break
        multiplier = multiplier + np.where(length > 0, pace * room / np.maximum(length, 1e-300), 0.0) * slope
    table = free
    table[where.rows] += best_multiplier
    pass_up(*index, table)
    # Multipliers are not on a grid, so sums with them round; the slack accounts for them as well.
    value = table[root] - SLACK * (np.abs(table[root]) + np.abs(best_multiplier).sum(axis=0))
    hull = replace(bounded.hull, value=value)
    return replace(bounded, search=bounded.search.tightened(hull, table), hull=hull)


class _Copies:
    """The copies of all fixed operators: the positions of their classes among the entries of the leaves."""

    def __init__(self, bounded: Relaxation) -> None:
        reduced, program = bounded.program.reduced, bounded.program
        groups = [same for same in bounded.split.copies.values() if len(same) > 1]
        rows, self.groups, at = [], [], 0
        for same in groups:
            size = reduced.domains[same[0]]
            for t in same:
                first = int(program.base[reduced.node_leaf[t]])
                rows.append(np.arange(first, first + size))
            self.groups.append((np.array(same), at, size))
            at += size * len(same)
        self.rows = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        self.entries = at

    def disagreement(self, entry: Indices) -> Floats:
        """(rows, W) per copy and class: whether the copy chose it, minus the share of the copies that did."""
        out = np.zeros((self.entries, entry.shape[1]))
        for same, at, size in self.groups:
            chosen = entry[same][:, None, :] == np.arange(size)[None, :, None]  # (copies, classes, W)
            out[at : at + size * len(same)] = (chosen - chosen.mean(axis=0)).reshape(-1, entry.shape[1])
        return out
