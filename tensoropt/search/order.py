"""Orders in which a search removes the operators of a graph: a greedy one, and the two of the paper.

Operators that cannot be removed exactly within the allowed table size are *fixed* instead (the paper's
heuristic elimination, section 4.2): the search then tries some or all of their configurations, and the result
may not be proven exact.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

from tensoropt.search.reduced_graph import ReducedGraph

_LARGEST_TABLE = 2_000_000
"""The entries of one table (190 MB at ``program._BYTES_PER_ENTRY``) beyond which operators are fixed
instead."""
_LARGEST_STEP = 1_000_000_000
"""The most pairs of entries that making one table may visit; an assumption."""


@dataclass(frozen=True, slots=True)
class Order:
    """The operators of a graph in order of removal, and separately the fixed ones.

    ``largest`` is the number of entries of the largest table that the removals make, ``total`` that of all
    tables if no two were equal.
    """

    removed: tuple[int, ...]
    fixed: tuple[int, ...]
    largest: int
    total: int = 0


def _neighbours(reduced: ReducedGraph) -> list[set[int]]:
    neighbours: list[set[int]] = [set() for _ in reduced.domains]
    for edge in reduced.edges:
        neighbours[edge.source].add(edge.target)
        neighbours[edge.target].add(edge.source)
    return neighbours


class _Greedy:
    def __init__(self, reduced: ReducedGraph, growth: float) -> None:
        n = len(reduced.domains)
        self.domains, self.growth = reduced.domains, growth
        free = {v for v, size in enumerate(reduced.domains) if size > 1}  # a single class joins nothing
        self.neighbours = [mine & free if v in free else set() for v, mine in enumerate(_neighbours(reduced))]
        self.absorbed = [0.0] * n
        self.between: dict[tuple[int, int], float] = {}
        self.version = [0] * n
        self.alive = [v in free for v in range(n)]
        self.heap = [(self.cost(v), v, 0) for v in sorted(free)]
        heapq.heapify(self.heap)

    def copy(self) -> _Greedy:
        other = copy.copy(self)
        other.neighbours = [set(u) for u in self.neighbours]
        other.absorbed, other.version, other.alive = list(self.absorbed), list(self.version), list(self.alive)
        other.between, other.heap = dict(self.between), list(self.heap)
        return other

    def cost(self, v: int) -> float:
        size = float(self.domains[v])
        points = 1.0 + self.growth * self.absorbed[v]
        for u in self.neighbours[v]:
            size *= self.domains[u]
            points *= 1.0 + self.growth * self.between.get((min(u, v), max(u, v)), 0.0)
        return size * points

    def entries(self, v: int) -> float:
        return math.prod(float(self.domains[u]) for u in self.neighbours[v])

    def cheapest(self) -> int | None:
        while self.heap:
            # Entries of the heap are not changed when costs change; outdated ones are recognised by their
            # version and dropped.
            _, v, stamp = self.heap[0]
            if self.alive[v] and stamp == self.version[v]:
                return v
            heapq.heappop(self.heap)
        return None

    def _touch(self, vertices: set[int]) -> None:
        for u in vertices:
            self.version[u] += 1
            heapq.heappush(self.heap, (self.cost(u), u, self.version[u]))

    def fix(self, v: int) -> None:
        # A fixed operator is a constant for its neighbours: unlike a removed one, it joins none of them.
        self.alive[v] = False
        for u in self.neighbours[v]:
            self.neighbours[u].discard(v)
        self._touch(self.neighbours[v])

    def remove(self, v: int) -> None:
        self.alive[v] = False
        around = self.neighbours[v]
        total = 1.0 + self.absorbed[v]
        for u in around:
            total += self.between.pop((min(u, v), max(u, v)), 0.0)
            self.neighbours[u].discard(v)
        if len(around) == 1:
            self.absorbed[next(iter(around))] += total
        elif len(around) == 2:
            a, b = sorted(around)
            self.between[a, b] = self.between.get((a, b), 0.0) + total
        for u in around:
            self.neighbours[u] |= around - {u}
        self._touch(around)

    def most_in_the_way(self, too_large: Callable[[int, _Greedy], bool]) -> int:
        """Return the operator that takes part in most of the tables that would be too large.

        Greedy w-cutset (Bidyuk and Dechter, "On finding minimal w-cutset", UAI 2004). Ties go to the operator
        with the fewest classes, which has the fewest assignments, then to the one added first.
        """
        trial = self.copy()
        part = [0] * len(self.domains)
        while (v := trial.cheapest()) is not None:
            if too_large(v, trial):
                for u in (v, *trial.neighbours[v]):
                    part[u] += 1
            trial.remove(v)
        return max(range(len(part)), key=lambda u: (part[u], -self.domains[u], -u))


def greedy_order(reduced: ReducedGraph, growth: float, allowed: int = _LARGEST_TABLE) -> Order:
    """Return an order that always removes the operator of least cost next (Bodlaender and Koster 2010).

    The cost of removing v is the product of the class counts of v and its neighbours (the true table size,
    which min-fill approximates) times an estimate of the points per table entry: ``1 + growth * n`` for n
    operators that were merged into v, and the same for each of its edges. Ties go to the operator added
    first. If tables would have more than ``allowed`` entries, operators that take part in most of them are
    fixed until no table does. Operators with a single class are removed last, when their neighbours are gone.
    """
    greedy = _Greedy(reduced, growth)
    removed: list[int] = []
    fixed: list[int] = []
    largest, total = 1, 0

    def too_large(v: int, state: _Greedy) -> bool:
        size = state.entries(v)
        return size > allowed or size * reduced.domains[v] > _LARGEST_STEP

    while (v := greedy.cheapest()) is not None:
        if too_large(v, greedy):
            v = greedy.most_in_the_way(too_large)
            greedy.fix(v)
            fixed.append(v)
            continue
        size = int(greedy.entries(v))
        largest, total = max(largest, size), total + size
        greedy.remove(v)
        removed.append(v)
    single = (v for v, size in enumerate(reduced.domains) if size <= 1)
    return Order((*removed, *single), tuple(fixed), largest, total)


def paper_order(reduced: ReducedGraph, linear: bool) -> Order:
    """Return the paper's elimination order: operators with at most two neighbours; without any, one is fixed.

    ``linear=False`` (FT-Elimination, section 4.2): branch elimination (one neighbour) before node elimination
    (two), until nothing is left. ``linear=True`` (FT-LDP, Algorithm 3): mark a chain of operators, eliminate
    the others, then the chain from its first operator to its last.
    """
    neighbours = _neighbours(reduced)
    n = len(reduced.domains)
    alive = [True] * n
    marked = _mark_linear(reduced) if linear else []
    waiting = set(marked)
    removed: list[int] = []
    fixed: list[int] = []

    def entanglement(v: int) -> tuple[int, int]:
        return len(neighbours[v]), -v

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
            drop(max(rest, key=entanglement), fixed)
        # The marked operators come last, in their order: this is Algorithm 3 itself.
        elif waiting:
            chain = [v for v in marked if v in waiting]
            if _is_linear(chain, neighbours):
                for v in chain:
                    drop(v, removed)
            else:  # skips along the marked operators: unmark one that can be eliminated
                ready = [v for v in chain if len(neighbours[v]) <= 2]
                waiting.discard(max(ready) if ready else max(chain, key=entanglement))
        else:
            break
    largest = max((reduced.domains[v] ** 2 for v in removed), default=1)
    return Order(tuple(removed), tuple(fixed), largest)


def _is_linear(chain: list[int], neighbours: list[set[int]]) -> bool:
    place = {v: i for i, v in enumerate(chain)}
    return all(abs(place[u] - place[v]) == 1 for v in chain for u in neighbours[v])


def _mark_linear(reduced: ReducedGraph) -> list[int]:
    n = len(reduced.domains)
    # Edges are oriented from the operator added first to the other one, so there is no cycle.
    length, before = [1] * n, [-1] * n
    arrows = sorted({(min(e.source, e.target), max(e.source, e.target)) for e in reduced.edges})
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
