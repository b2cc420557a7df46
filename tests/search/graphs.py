"""Seeded random cost graphs with everything the contract allows, small enough for exhaustive search."""

from __future__ import annotations

from functools import cached_property

import numba
import numpy as np

from tensoropt.search import CostGraph
from tests import naive

SHAPES = ("chain", "tree", "clique", "components", "parallel", "cycle", "blocks")


def seeds_of(first, last):
    """Seeds to try; one in six where kernels run as plain Python (NUMBA_DISABLE_JIT=1)."""
    return range(first, last, 6 if numba.config.DISABLE_JIT else 1)


class Twice:
    """A graph twice: as a :class:`CostGraph` and as plain lists for the naive search."""

    style = "float"

    def __init__(self) -> None:
        self.graph = CostGraph()
        self.nodes: dict = {}
        self.edges: list = []
        self.keys: list = []

    def add_operator(self, name, costs):
        self.nodes[name] = [[tuple(p) for p in np.atleast_2d(c)] for c in costs]
        self.graph.add_operator(name, costs)

    def add_edge(self, a, b, costs, **maps):
        rows, cols = (maps.get(m, range(len(self.nodes[end]))) for m, end in (("rows", a), ("cols", b)))
        lookup = {
            (i, j): [tuple(p) for p in np.atleast_2d(costs[row][col])]
            for i, row in enumerate(rows)
            for j, col in enumerate(cols)
        }
        self.keys.append((a, b, sum(1 for s, t, _ in self.edges if (s, t) == (a, b))))
        self.edges.append((a, b, lambda i, j: lookup[i, j]))
        self.graph.add_edge(a, b, costs, **maps)

    @cached_property
    def truth(self) -> list:
        """The frontier by exhaustive search."""
        return naive.exhaustive(self.nodes, self.edges)

    def cost(self, strategy, options):
        """Memory and time of a strategy, added up from the plain lists."""
        total = np.zeros(2)
        for name, configurations in self.nodes.items():
            total += configurations[strategy[name]][options[name]]
        for (a, b, f), key in zip(self.edges, self.keys, strict=True):
            total += f(strategy[a], strategy[b])[options[key]]
        return total


class Case(Twice):
    """A random graph."""

    def __init__(self, seed: int, shape: str | None = None, operators: int = 5, configurations: int = 3):
        super().__init__()
        self.rng = np.random.default_rng(seed)
        self.shape = shape or SHAPES[seed % len(SHAPES)]
        self.style = ("integer", "float", "units", "zero")[int(self.rng.integers(4))]
        count = int(self.rng.integers(1, operators + 1))
        self._blocks: dict = {}
        for i in range(count):
            self._operator(f"o{i}", int(self.rng.integers(1, configurations + 1)), i)
        for a, b in self._pairs(count):
            self._edge(f"o{a}", f"o{b}")

    def _pairs(self, n):
        rng = self.rng
        if self.shape in ("chain", "blocks"):
            return [(i, i + 1) for i in range(n - 1)]
        if self.shape == "cycle":
            return [(i, (i + 1) % n) for i in range(n)] if n > 2 else [(0, 1)][: n - 1]
        if self.shape == "tree":
            return [
                (int(rng.integers(i)), i) if rng.random() < 0.5 else (i, int(rng.integers(i)))
                for i in range(1, n)
            ]
        if self.shape == "clique":
            return [(i, j) for i in range(n) for j in range(i + 1, n)]
        if self.shape == "components":
            return [(i, i + 1) for i in range(n - 1) if rng.random() < 0.5]
        pairs = [(i, i + 1) for i in range(n - 1)]
        return [p if rng.random() < 0.5 else p[::-1] for p in pairs for _ in range(int(rng.integers(1, 4)))]

    def _costs(self, *shape):
        rng = self.rng
        if self.style == "zero" and rng.random() < 0.5:
            return np.zeros((*shape, 2))
        if self.style in ("integer", "zero"):
            values = rng.integers(0, 6, (*shape, 2)).astype(float)
        else:
            values = rng.random((*shape, 2))
            if self.style == "units":
                values = values * np.array([1e11, 1e-3]) * 10.0 ** rng.integers(-4, 5)
        if rng.random() < 0.3:
            values[rng.random(values.shape) < 0.15] = np.inf
        return values

    def _operator(self, name, k, index):
        rng = self.rng
        if self.shape == "blocks" and index >= 2 and index % 2 in self._blocks:
            costs = self._blocks[index % 2]
        elif rng.random() < 0.5:
            costs = self._costs(k, 1)
        else:
            costs = [self._costs(int(rng.integers(0, 4))) for _ in range(k)]
        if not any(np.isfinite(np.asarray(c)).all(axis=-1).any() for c in costs):
            costs = [np.ones((1, 2))] * k
        self._blocks.setdefault(index % 2, costs)
        self.add_operator(name, costs)

    def _edge(self, a, b):
        rng = self.rng
        ka, kb = len(self.nodes[a]), len(self.nodes[b])
        kind = int(rng.integers(4))
        rows, cols = np.arange(ka), np.arange(kb)
        if kind == 0:
            costs = self._costs(ka, kb)
        elif kind == 1:
            costs = self._costs(ka, kb, 2)
        elif kind == 2:
            costs = [[self._costs(int(rng.integers(1, 3))) for _ in range(kb)] for _ in range(ka)]
        else:
            rows, cols = rng.integers(0, 2, ka), rng.integers(0, 2, kb)
            costs = self._costs(2, 2)
        pairs = {(int(r), int(c)) for r in rows for c in cols}
        if not any(np.isfinite(np.atleast_2d(costs[r][c])).all(axis=-1).any() for r, c in pairs):
            return
        self.add_edge(a, b, costs, **({"rows": rows, "cols": cols} if kind == 3 else {}))
