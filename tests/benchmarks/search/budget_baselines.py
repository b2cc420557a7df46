"""What others do instead of a frontier: weighted sums, an integer program per budget, memory in bins."""

from __future__ import annotations

import time

import numpy as np
from numba import njit
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from tensoropt.search.flat_tables import FlatTables
from tensoropt.search.hull import HullSearch, flatten
from tensoropt.search.order import greedy_order
from tensoropt.search.reduced_graph import reduce_graph
from tensoropt.search.shared import build_program


def lambda_bisection(graph, tolerance: float) -> int:
    """How many strategies the usual scalarisation finds: only the convex hull's vertices."""
    reduced = reduce_graph(FlatTables.of(graph))
    program = build_program(reduced, greedy_order(reduced, 0.1))
    hull = HullSearch(program, flatten(program)).find_hull(int(1 / tolerance))
    return 0 if hull is None else len(hull.memory)


def integer_program(graph, budget: float, limit_s: float) -> tuple[float, float | None]:
    """(seconds of HiGHS, least time within ``budget``; None when ``limit_s`` was not enough).

    One binary per configuration of an operator, one variable in [0, 1] per entry of an edge (binary where
    an entry has several options), tied to both ends as in Alpa and FlexFlow's successors; an edge's
    entries are over placements, so equal configurations cost nothing.
    """
    reduced = reduce_graph(FlatTables.of(graph))
    memory, cost, whole = [], [], []
    rows, cols, values, right = [], [], [], []
    first_of = []
    for leaf in reduced.node_leaf:
        table = reduced.leaves[leaf]
        first_of.append((len(memory), table))
        memory += table.memory.tolist()
        cost += table.time.tolist()
        whole += [1] * len(table.memory)

    def constrain(plus, minus, value: float) -> None:
        for sign, columns in ((1.0, plus), (-1.0, minus)):
            rows.extend([len(right)] * len(columns))
            cols.extend(columns)
            values.extend([sign] * len(columns))
        right.append(value)

    for first, table in first_of:
        constrain(range(first, first + len(table.memory)), [], 1.0)
    for edge in reduced.edges:
        table = reduced.leaves[edge.leaf]
        first = len(memory)
        memory += table.memory.tolist()
        cost += table.time.tolist()
        options = np.diff(table.offsets)
        whole += np.repeat((options > 1).astype(int), options).tolist()
        entry = np.repeat(np.arange(len(options)), options)
        sides = ((edge.source, edge.rows, entry // edge.width, edge.height),
                 (edge.target, edge.cols, entry % edge.width, edge.width))  # fmt: skip
        for operator, classes, side, size in sides:
            start, node = first_of[operator]
            of_point = classes[np.repeat(np.arange(len(node.offsets) - 1), np.diff(node.offsets))]
            for c in range(size):
                constrain((first + np.flatnonzero(side == c)).tolist(),
                          (start + np.flatnonzero(of_point == c)).tolist(), 0.0)  # fmt: skip
    n = len(memory)
    equal = coo_array((values, (rows, cols)), shape=(len(right), n)).tocsr()
    scale = sum(float(t.time.max()) for _, t in first_of)
    start_s = time.perf_counter()
    found = milp(
        np.array(cost) / scale,
        integrality=np.array(whole),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(equal, right, right),
            LinearConstraint(np.array(memory)[None] / budget, -np.inf, 1.0),
        ],
        options={"time_limit": limit_s, "mip_rel_gap": 1e-6},
    )
    return time.perf_counter() - start_s, found.fun * scale if found.status == 0 else None


@njit(nogil=True)
def _binned_step(left, right, left_out, left_k, right_out, right_k):
    bins = left.shape[1]
    out = np.full((left_out.shape[0], bins), np.inf)
    for o in range(left_out.shape[0]):
        for k in range(left_k.shape[0]):
            a, b = left[left_out[o] + left_k[k]], right[right_out[o] + right_k[k]]
            for i in range(bins):
                if a[i] < np.inf:
                    for j in range(bins - i):
                        x = a[i] + b[j]
                        if x < out[o, i + j]:
                            out[o, i + j] = x
    return out


def binned(graph, most: float, bins: int, limit_s: float) -> tuple[np.ndarray, np.ndarray] | None:
    """Galvatron's dynamic program: memory up to ``most`` in ``bins`` steps, rounded up, least time of each.

    On our elimination order and with equal layers computed once, which favours it. Returns the budgets
    and times of what it found, None after ``limit_s``.
    """
    reduced = reduce_graph(FlatTables.of(graph))
    program = build_program(reduced, greedy_order(reduced, 0.1))
    step_bytes = most / (bins - 1)
    tables = []
    for leaf in reduced.leaves:
        table = np.full((len(leaf.offsets) - 1, bins), np.inf)
        entry = np.repeat(np.arange(len(table)), np.diff(leaf.offsets))
        at = np.ceil(leaf.memory / step_bytes * (1 - 1e-12)).astype(int)
        fits = at < bins
        np.minimum.at(table, (entry[fits], at[fits]), leaf.time[fits])
        tables.append(table)
    unit = np.full((1, bins), np.inf)
    unit[0, 0] = 0.0
    tables.append(unit)
    deadline = time.perf_counter() + limit_s
    for step in program.steps:
        left, right = tables[step.left], tables[step.right]
        index = [(step.left_out, step.left_k), (step.right_out, step.right_k)]
        if np.isfinite(left).sum() > np.isfinite(right).sum():  # the sparser one outside
            left, right, index = right, left, index[::-1]
        rest = []
        block = max(1, 2_000_000_000 // (max(len(step.left_k), 1) * bins * bins))
        for o in range(0, len(step.left_out), block):
            if time.perf_counter() > deadline:
                return None
            (a, b), (c, d) = index
            rest.append(_binned_step(left, right, a[o : o + block], b, c[o : o + block], d))
        tables.append(np.concatenate(rest))
    best = np.minimum.accumulate(tables[program.logical[program.root].table][0])
    found = np.isfinite(best)
    return (np.arange(bins) * step_bytes)[found], best[found]
