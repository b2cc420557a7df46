"""Heuristic elimination with a certificate: operators that are fixed, and what that can cost.

An operator with too many entangled neighbours is *split*: every one of its edges gets a copy of it with its
own choice. The copies may disagree, so the split problem is a relaxation and its hull bounds every strategy.
In ``shared`` each copy pays its share of the operator's cost, or the original alone would pay and choose the
cheapest (cost shifting: Choi, Chavira and Darwiche, "Node splitting", UAI 2007). Making all copies choose one
given class turns ``problem`` into the conditioned problem, whose strategies are real. (Rina Dechter's cutset
conditioning; mini-buckets for the bound.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tensoropt.search.costgraph import FloatArray, IntArray
from tensoropt.search.order import Order
from tensoropt.search.problem import Leaf, Problem, restrict


@dataclass(frozen=True, eq=False, slots=True)
class Split:
    """The split problem; ``twins[f]``: the variables (f itself first) that stand for fixed operator f.

    ``problem``: f pays and its copies are free. ``shared``: each pays an equal share, which bounds better.
    ``order`` removes the copies, then the operators in the order that led here; it fixes nothing.
    """

    problem: Problem
    shared: Problem
    twins: dict[int, tuple[int, ...]]
    order: Order


def split(problem: Problem, order: Order) -> Split:
    """Give every edge of an operator that ``order`` fixes its own copy of it."""
    fixed = order.fixed
    leaves = list(problem.leaves)
    domains, node_leaf = list(problem.domains), list(problem.node_leaf)
    twins: dict[int, list[int]] = {f: [] for f in fixed}
    free: dict[int, int] = {}

    def copy(f: int) -> int:
        if f not in twins:
            return f
        if not twins[f]:
            twins[f].append(f)
            return f
        size = domains[f]
        if size not in free:
            none = np.full(size, -1, np.int64)
            leaves.append(Leaf(np.arange(size + 1), np.zeros(size), np.zeros(size), none, none))
            free[size] = len(leaves) - 1
        domains.append(size)
        node_leaf.append(free[size])
        twins[f].append(len(domains) - 1)
        return len(domains) - 1

    edges = tuple(replace(e, source=copy(e.source), target=copy(e.target)) for e in problem.edges)
    paid = replace(
        problem, leaves=tuple(leaves), domains=tuple(domains), node_leaf=tuple(node_leaf), edges=edges
    )
    copies = tuple(range(len(problem.domains), len(domains)))
    whole = {f: tuple(t) or (f,) for f, t in twins.items()}
    return Split(
        paid, _shared(paid, whole), whole, Order((*copies, *fixed, *order.removed), (), order.largest)
    )


def _shared(problem: Problem, twins: dict[int, tuple[int, ...]]) -> Problem:
    """The split problem with every fixed operator's cost shared among its copies, on the same grid.

    Every copy has a leaf of its own.
    """
    leaves, node_leaf = list(problem.leaves), list(problem.node_leaf)
    for f, same in twins.items():
        leaf = leaves[problem.node_leaf[f]]
        memory = _share(leaf.memory, len(same), problem.memory_grid)
        time = _share(leaf.time, len(same), problem.time_grid)
        rest = len(same) - 1
        for t in same:  # a leaf of its own, that prices can tell apart
            m, s = (leaf.memory - rest * memory, leaf.time - rest * time) if t == f else (memory, time)
            leaves.append(replace(leaf, memory=m, time=s))
            node_leaf[t] = len(leaves) - 1
    return replace(problem, leaves=tuple(leaves), node_leaf=tuple(node_leaf))


def _share(costs: FloatArray, parts: int, grid: float) -> FloatArray:
    return np.floor(costs / parts / grid) * grid


def condition(problem: Problem, twins: dict[int, tuple[int, ...]], classes: dict[int, int]) -> Problem:
    """A split problem with fixed operators f, and all their ``twins``, at class ``classes[f]``."""
    kept = {}
    for f, chosen in classes.items():
        mask = np.zeros(problem.domains[f], bool)
        mask[chosen] = True
        kept.update(dict.fromkeys(twins[f], mask))
    return restrict(problem, kept)


def candidates(
    relaxed: Split, operators: tuple[int, ...], picks: tuple[IntArray, ...]
) -> list[dict[int, int]]:
    """Classes of some operators worth trying: what their copies prefer in the relaxed strategies.

    Per pick every operator takes its copies' favourite; further candidates take the choice of single copies.
    """
    found: dict[tuple[int, ...], None] = {}
    twins = [relaxed.twins.get(v, (v,)) for v in operators]
    for pick in picks:
        votes = [np.bincount(pick[list(same), 0]) for same in twins]
        found.setdefault(tuple(int(np.argmax(v)) for v in votes))
    for pick in picks:
        for i in range(max(len(same) for same in twins)):
            found.setdefault(tuple(int(pick[same[min(i, len(same) - 1)], 0]) for same in twins))
    return [dict(zip(operators, classes, strict=True)) for classes in found]
