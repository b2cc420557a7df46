"""Slow, obvious twins of the fast code, and exhaustive search on tiny graphs."""

from __future__ import annotations

import itertools

import numpy as np


def reduce(points):
    """Points that no other one beats, memory ascending; duplicates once."""
    points = {(m, t) for m, t in points if np.isfinite(m) and np.isfinite(t)}
    return sorted(p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points))


def product(left, right):
    return reduce((a[0] + b[0], a[1] + b[1]) for a in left for b in right)


def union(frontiers):
    return reduce(p for f in frontiers for p in f)


def exhaustive(nodes, edges):
    """Frontier over all strategies.

    ``nodes``: {name: list of lists of (memory, time)}; ``edges``: list of (source, target, f) where f(i, j) is a list
    of (memory, time) options.
    """
    names = list(nodes)
    found = []
    for choice in itertools.product(*(range(len(nodes[n])) for n in names)):
        chosen = dict(zip(names, choice, strict=True))
        front = [(0.0, 0.0)]
        for factor in [nodes[n][chosen[n]] for n in names] + [f(chosen[a], chosen[b]) for a, b, f in edges]:
            front = product(front, [tuple(p) for p in factor])
        found.extend(front)
        if len(found) > 2000:
            found = reduce(found)
    return reduce(found)


def lower_bound(frontier, memory):
    """Least time of a frontier within ``memory``; inf when nothing fits."""
    return min((t for m, t in frontier if m <= memory), default=np.inf)
