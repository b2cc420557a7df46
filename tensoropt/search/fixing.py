"""Heuristic elimination with a certificate: operators that are fixed, and what that can cost.

An operator with too many entangled neighbours is *split*: every one of its edges gets a copy of it, with
cost zero and its own choice. The copies may disagree, so the split problem is a relaxation and its hull
bounds every strategy. Making all copies choose one given class turns it into the conditioned problem,
whose strategies are real. (Rina Dechter's cutset conditioning; mini-buckets for the bound.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tensoropt.search.costgraph import IntArray
from tensoropt.search.order import Order
from tensoropt.search.problem import Leaf, Problem, restrict


@dataclass(frozen=True, eq=False, slots=True)
class Split:
    """The relaxed problem; ``twins[f]``: the variables (f itself first) that stand for fixed operator f.

    ``order`` removes the copies, then the operators in the order that led here; it fixes nothing.
    """

    problem: Problem
    twins: dict[int, tuple[int, ...]]
    order: Order


def split(problem: Problem, order: Order) -> Split:
    """Give every edge of an operator that ``order`` fixes its own copy of it."""
    fixed = order.fixed
    leaves = list(problem.leaves)
    domains, node_leaf = list(problem.domains), list(problem.node_leaf)
    twins: dict[int, list[int]] = {f: [f] for f in fixed}
    free: dict[int, int] = {}

    def copy(f: int) -> int:
        if f not in twins:
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
    relaxed = replace(
        problem, leaves=tuple(leaves), domains=tuple(domains), node_leaf=tuple(node_leaf), edges=edges
    )
    copies = tuple(range(len(problem.domains), len(domains)))
    return Split(
        relaxed,
        {f: tuple(t) for f, t in twins.items()},
        Order((*copies, *fixed, *order.removed), (), order.largest),
    )


def condition(relaxed: Split, classes: dict[int, int]) -> Problem:
    """The split problem with every fixed operator f, and all its copies, at class ``classes[f]``."""
    kept = {}
    for f, chosen in classes.items():
        mask = np.zeros(relaxed.problem.domains[f], bool)
        mask[chosen] = True
        kept.update(dict.fromkeys(relaxed.twins[f], mask))
    return restrict(relaxed.problem, kept)


def candidates(relaxed: Split, picks: tuple[IntArray, ...], most: int) -> list[dict[int, int]]:
    """Classes worth trying: what the copies prefer in the relaxed strategies, most often first.

    Per pick every fixed operator takes its copies' favourite; further candidates take the choice of the
    operator itself and of single copies.
    """
    found: dict[tuple[int, ...], None] = {}
    fixed = sorted(relaxed.twins)
    for pick in picks:
        votes = [np.bincount(pick[list(relaxed.twins[f]), 0]) for f in fixed]
        found.setdefault(tuple(int(np.argmax(v)) for v in votes))
    for pick in picks:
        found.setdefault(tuple(int(pick[f, 0]) for f in fixed))
        width = max(len(t) for t in relaxed.twins.values())
        for i in range(1, width):
            twins = [relaxed.twins[f][min(i, len(relaxed.twins[f]) - 1)] for f in fixed]
            found.setdefault(tuple(int(pick[t, 0]) for t in twins))
    return [dict(zip(fixed, classes, strict=True)) for classes in list(found)[:most]]
