"""In which order operators are removed: ours, and the paper's two.

All of them end with an :class:`Order`. Operators that cannot be removed exactly within the allowed size
are *fixed* instead (the paper's heuristic elimination, section 4.2): the search then tries some of their
configurations, and the result is not proven exact.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tensoropt.search.problem import Problem

LARGEST_TABLE = 2_000_000
LARGEST_STEP = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Order:
    """Operators in order of removal, the fixed ones apart.

    ``largest``: entries of the largest table; ``total``: of all tables, if no two were equal.
    """

    removed: tuple[int, ...]
    fixed: tuple[int, ...]
    largest: int
    total: int = 0


def _neighbours(problem: Problem) -> list[set[int]]:
    neighbours: list[set[int]] = [set() for _ in problem.domains]
    for edge in problem.edges:
        neighbours[edge.source].add(edge.target)
        neighbours[edge.target].add(edge.source)
    return neighbours


def _most_entangled(neighbours: list[set[int]], alive: list[bool]) -> int:
    """The operator with the most neighbours, the one added first among equals."""
    return max((v for v in range(len(alive)) if alive[v]), key=lambda v: (len(neighbours[v]), -v))


def greedy_order(problem: Problem, growth: float, allowed: int = LARGEST_TABLE) -> Order:
    """Remove the operator whose removal costs least (greedy; Bodlaender and Koster 2010).

    Cost of removing v: the product of the class counts of v and its neighbours (the true table size,
    which is what min-fill approximates) times the expected number of points of what has been removed
    into it, ``1 + growth * removed``. Ties: the operator added first. Tables beyond ``allowed`` entries
    make the most entangled operator a fixed one.
    """
    n = len(problem.domains)
    neighbours = _neighbours(problem)
    absorbed = [0.0] * n
    between: dict[tuple[int, int], float] = {}
    version = [0] * n
    alive = [True] * n

    def cost(v: int) -> float:
        size = float(problem.domains[v])
        points = 1.0 + growth * absorbed[v]
        for u in neighbours[v]:
            size *= problem.domains[u]
            points *= 1.0 + growth * between.get((min(u, v), max(u, v)), 0.0)
        return size * points

    def entries(v: int) -> float:
        size = 1.0
        for u in neighbours[v]:
            size *= problem.domains[u]
        return size

    heap = [(cost(v), v, 0) for v in range(n)]
    heapq.heapify(heap)
    removed: list[int] = []
    fixed: list[int] = []
    largest, total_entries = 1, 0

    def touch(vertices: set[int]) -> None:
        for u in vertices:
            version[u] += 1
            heapq.heappush(heap, (cost(u), u, version[u]))

    while heap:
        _, v, stamp = heapq.heappop(heap)
        if not alive[v] or stamp != version[v]:
            continue
        size = entries(v)
        if size > allowed or size * problem.domains[v] > LARGEST_STEP:
            heapq.heappush(heap, (cost(v), v, version[v]))
            v = _most_entangled(neighbours, alive)
            alive[v] = False
            fixed.append(v)
            for u in neighbours[v]:
                neighbours[u].discard(v)
            touch(neighbours[v])
            continue
        alive[v] = False
        removed.append(v)
        largest = max(largest, int(size))
        total_entries += int(size)
        around = neighbours[v]
        total = 1.0 + absorbed[v]
        for u in around:
            total += between.pop((min(u, v), max(u, v)), 0.0)
            neighbours[u].discard(v)
        if len(around) == 1:
            absorbed[next(iter(around))] += total
        elif len(around) == 2:
            a, b = sorted(around)
            between[a, b] = between.get((a, b), 0.0) + total
        for u in around:
            neighbours[u] |= around - {u}
        touch(around)
    return Order(tuple(removed), tuple(fixed), largest, total_entries)


def paper_order(problem: Problem, linear: bool) -> Order:
    """The paper's eliminations: operators with at most two neighbours, and heuristic ones when stuck.

    ``linear=False`` (FT-Elimination, section 4.2): branch elimination (one neighbour) before node
    elimination (two), until nothing is left. ``linear=True`` (FT-LDP, Algorithm 3): mark a linear
    graph, eliminate the others, then walk along it from its first operator to its last.
    """
    neighbours = _neighbours(problem)
    n = len(problem.domains)
    alive = [True] * n
    marked = _mark_linear(problem) if linear else []
    waiting = set(marked)
    removed: list[int] = []
    fixed: list[int] = []
    largest = 1

    def drop(v: int, into: list[int]) -> None:
        alive[v] = False
        waiting.discard(v)
        into.append(v)
        for u in neighbours[v]:
            neighbours[u].discard(v)
            if into is removed:
                neighbours[u] |= neighbours[v] - {u}

    while True:
        rest = [v for v in range(n) if alive[v] and v not in waiting]
        easy = [v for v in rest if len(neighbours[v]) <= 2]
        if easy:
            drop(min(easy, key=lambda v: (len(neighbours[v]), v)), removed)
        elif rest:
            drop(max(rest, key=lambda v: (len(neighbours[v]), -v)), fixed)
        elif waiting:
            chain = [v for v in marked if v in waiting]
            if _is_linear(chain, neighbours):
                for v in chain:
                    drop(v, removed)
            else:  # skips along the marked operators: unmark one that can be eliminated
                ready = [v for v in chain if len(neighbours[v]) <= 2]
                waiting.discard(min(ready, key=lambda v: -v) if ready else _most_entangled(neighbours, alive))
        else:
            break
    for v in removed:
        largest = max(largest, problem.domains[v] ** 2)
    return Order(tuple(removed), tuple(fixed), largest)


def _is_linear(chain: list[int], neighbours: list[set[int]]) -> bool:
    place = {v: i for i, v in enumerate(chain)}
    return all(abs(place[u] - place[v]) == 1 for v in chain for u in neighbours[v])


def _mark_linear(problem: Problem) -> list[int]:
    """A longest chain of operators along the edges, in the order in which operators were added."""
    n = len(problem.domains)
    length, before = [1] * n, [-1] * n
    arrows = sorted({(min(e.source, e.target), max(e.source, e.target)) for e in problem.edges})
    incoming: dict[int, list[int]] = {}
    for a, b in arrows:
        incoming.setdefault(b, []).append(a)
    for b in range(n):
        for a in incoming.get(b, []):
            if length[a] + 1 > length[b]:
                length[b], before[b] = length[a] + 1, a
    v = max(range(n), key=lambda u: (length[u], -u), default=-1)
    chain = []
    while v >= 0:
        chain.append(v)
        v = before[v]
    return chain[::-1]
