"""In which order operators are removed: ours, and the paper's two.

An order is a list of actions on a :class:`~tensoropt.search.program.Builder`.
"""

from __future__ import annotations

import heapq

from tensoropt.search.problem import Problem

Action = tuple[str, int]


def greedy_order(problem: Problem, growth: float) -> tuple[list[int], float]:
    """Remove the operator whose removal costs least (Bodlaender and Koster 2010, greedy upper bounds).

    Cost of removing v: the product of the class counts of v and its neighbours (the true table size)
    times the expected number of points of what has been removed into it, ``1 + growth * removed``.
    Returns the order and the size of the largest table. Ties: the operator added first.
    """
    n = len(problem.domains)
    neighbours: list[set[int]] = [set() for _ in range(n)]
    for edge in problem.edges:
        neighbours[edge.source].add(edge.target)
        neighbours[edge.target].add(edge.source)
    removed = [0.0] * n
    version = [0] * n
    between: dict[tuple[int, int], float] = {}

    def cost(v: int) -> float:
        size = float(problem.domains[v])
        points = 1.0 + growth * removed[v]
        for u in neighbours[v]:
            size *= problem.domains[u]
            points *= 1.0 + growth * between.get((min(u, v), max(u, v)), 0.0)
        return size * points

    heap = [(cost(v), v, 0) for v in range(n)]
    heapq.heapify(heap)
    order: list[int] = []
    largest = 0.0
    alive = [True] * n
    while heap:
        _, v, stamp = heapq.heappop(heap)
        if not alive[v] or stamp != version[v]:
            continue
        alive[v] = False
        order.append(v)
        around = neighbours[v]
        size = 1.0
        absorbed = 1.0 + removed[v]
        for u in around:
            size *= problem.domains[u]
            absorbed += between.pop((min(u, v), max(u, v)), 0.0)
            neighbours[u].discard(v)
        largest = max(largest, size)
        if len(around) == 1:
            removed[next(iter(around))] += absorbed
        elif len(around) == 2:
            a, b = sorted(around)
            between[a, b] = between.get((a, b), 0.0) + absorbed
        for u in around:
            neighbours[u] |= around - {u}
        for u in around:
            version[u] += 1
            heapq.heappush(heap, (cost(u), u, version[u]))
    return order, largest
