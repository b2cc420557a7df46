"""An elimination as a program: a list of steps, each of which computes one table from two.

All of the paper's eliminations (node, edge, branch; section 4.2) and Algorithm 3 are one kind of step here:

    out[o] = union over k of product(left[left_out[o] + left_k[k]], right[right_out[o] + right_k[k]])

where o runs over the configurations of the remaining neighbours and k over those of the removed operator (a
single k: a plain product). Tables are indexed by *classes* of configurations that a table cannot distinguish
(placement factoring), and an entry is found by adding strides. Equal steps (identical layers) are made once;
for each use, a *logical* node says which table it refers to.

Tables may use a share of this machine's memory; an error is raised before they exceed it.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np

from tensoropt.errors import TensorOptError
from tensoropt.search.reduced_graph import ReducedGraph
from tensoropt.types import Indices
from tensoropt.units import format_bytes


class TableTooLargeError(TensorOptError, MemoryError):
    """Tables would not fit in the memory allowed for them."""


def memory_allowance() -> int:
    """Return the size in bytes that tables may have: half of the machine's currently free memory."""
    # Half is an assumption: it leaves room for index arrays, messages, and other programs.
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


_Scope = tuple[int, ...]

_WORTH_CHECKING = 1_000_000
"""The number of entries below which a table is made without checking free memory (96 MB at most)."""
_BYTES_PER_ENTRY = 96  # two indices, an offset, and scalar bounds for at least four lines


@dataclass(frozen=True, eq=False, slots=True)
class _ProgramStep:
    """The computation of one table: its entry o combines, for each k, entry ``left_out[o] + left_k[k]`` of
    table ``left`` with entry ``right_out[o] + right_k[k]`` of table ``right``."""

    left: int
    right: int
    left_out: Indices
    left_k: Indices
    right_out: Indices
    right_k: Indices


@dataclass(frozen=True, eq=False, slots=True)
class _Logical:
    """A node of the binary tree of table uses. ``left``, ``right``: the nodes of the two tables from which
    ``table`` is computed, -1 for input tables."""

    table: int
    left: int = -1
    right: int = -1


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """The tables and steps of an elimination. Tables 0..leaves-1 are the input tables (costs of operators and
    edges; the last is the empty product); then there is one per step.

    ``sizes`` (tables,) are numbers of entries. ``base`` (tables,) is each table's first entry when all tables
    are in one array. ``root`` is the logical node of the whole graph, a table with one entry.
    """

    reduced: ReducedGraph
    leaves: int
    steps: tuple[_ProgramStep, ...]
    logical: tuple[_Logical, ...]
    root: int
    sizes: Indices
    base: Indices

    @property
    def inputs(self) -> int:
        """The number of operators and edges, whose logical nodes come first, in the graph's order."""
        return len(self.reduced.domains) + len(self.reduced.edges)

    @property
    def entries(self) -> int:
        """The number of entries of all tables together."""
        return int(self.sizes.sum())

    @property
    def work(self) -> int:
        """The number of pairs of table entries that one search pass visits."""
        return sum(len(s.left_out) * len(s.left_k) for s in self.steps)


@dataclass(eq=False, slots=True)
class _Factor:
    """A table that depends on the operators ``scope``; ``maps[d]`` gives for each class of operator
    ``scope[d]`` the index along the table's dim d."""

    scope: _Scope
    shape: tuple[int, ...]
    maps: tuple[Indices, ...]
    node: int
    weight: int = 1


class ProgramBuilder:
    """A builder that makes an elimination program by removing one operator of a graph after another."""

    def __init__(self, reduced: ReducedGraph) -> None:
        self.reduced = reduced
        self.steps: list[_ProgramStep] = []
        self.logical: list[_Logical] = []
        self.sizes = [len(leaf.offsets) - 1 for leaf in reduced.leaves] + [1]
        self.factors: dict[int, _Factor] = {}
        self.of_operator: list[set[int]] = [set() for _ in reduced.domains]
        self._next = 0
        self._known: dict[object, int] = {}
        self._joint: dict[object, tuple[Indices, Indices]] = {}
        self._maps: dict[bytes, Indices] = {}
        self._identities: set[int] = set()
        self._indices: dict[object, tuple[Indices, Indices]] = {}
        self._single = np.zeros(1, np.int64)
        for v, (size, leaf) in enumerate(zip(reduced.domains, reduced.node_leaf, strict=True)):
            whole = self._map(np.arange(size))
            self._identities.add(id(whole))
            self._add(_Factor((v,), (size,), (whole,), self._use(leaf)))
        for edge in reduced.edges:
            scope, maps = (edge.source, edge.target), (self._map(edge.rows), self._map(edge.cols))
            self._add(_Factor(scope, (edge.height, edge.width), maps, self._use(edge.leaf)))

    def _use(self, table: int, left: int = -1, right: int = -1) -> int:
        self.logical.append(_Logical(table, left, right))
        return len(self.logical) - 1

    def _add(self, factor: _Factor) -> None:
        self.factors[self._next] = factor
        for v in factor.scope:
            self.of_operator[v].add(self._next)
        self._next += 1

    def _take(self, index: int) -> _Factor:
        factor = self.factors.pop(index)
        for v in factor.scope:
            self.of_operator[v].discard(index)
        return factor

    def _map(self, values: Indices) -> Indices:
        values = np.ascontiguousarray(values, np.int64)
        return self._maps.setdefault(values.tobytes(), values)

    def joint(self, maps: list[Indices]) -> tuple[Indices, Indices]:
        """Group the indices at which every map has equal values; return (group of each index, one index per
        group)."""
        # Maps are interned, so identity is equality; ``_maps`` keeps them alive, so that no id is reused.
        key = tuple(sorted({id(m) for m in maps}))
        if key not in self._joint and any(id(m) in self._identities for m in maps):
            whole = next(m for m in maps if id(m) in self._identities)  # distinguishes all values by itself
            self._joint[key] = whole, whole
        if key not in self._joint:
            code = np.zeros(len(maps[0]), np.int64)
            for m in {id(m): m for m in maps}.values():
                # Digits of a mixed radix: values agree under all maps exactly if their codes are equal.
                code = code * (int(m.max()) + 1) + m
            _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
            self._joint[key] = self._map(inverse.reshape(-1)), first
        return self._joint[key]

    def eliminate(self, v: int) -> None:
        """Remove operator ``v``: combine the tables that depend on it into one that depends only on the other
        operators of these tables. Each of its entries is the frontier over all configurations of ``v``."""
        mine = [self._take(i) for i in sorted(self.of_operator[v])]
        if len(mine) == 1:  # the empty product
            mine.append(_Factor((), (), (), self._use(len(self.reduced.leaves)), 0))
        # The last factor is the one without which the others span the fewest operators, because only its
        # product is never written out. Among equals it is the one that has absorbed most: what identical
        # layers share is multiplied before it, and therefore only once.
        last = min(mine, key=lambda f: (self._span([g for g in mine if g is not f]), -f.weight))
        rest = [f for f in mine if f is not last]
        product: list[_Factor] = []
        while rest:
            factor = min(rest, key=lambda f: (self._span([*product, f]), f.weight))
            rest.remove(factor)
            product = [self._product(product[0], factor, -1) if product else factor]
        self._add(self._product(product[0], last, v))

    def _span(self, factors: list[_Factor]) -> int:
        return math.prod(self.reduced.domains[u] for u in {u for f in factors for u in f.scope})

    def _product(self, left: _Factor, right: _Factor, remove: int) -> _Factor:
        union = left.scope + tuple(u for u in right.scope if u not in left.scope)
        # Sorted, so that a product of equal factors has equal index arrays in whichever order they came.
        scope = tuple(sorted(u for u in union if u != remove))
        maps, representatives = [], []
        for u in scope:
            m, r = self.joint([f.maps[f.scope.index(u)] for f in (left, right) if u in f.scope])
            maps.append(m)
            representatives.append(r)
        # Before the index arrays are made, which are as large as the table.
        self._announce(scope, math.prod(len(r) for r in representatives))
        values = self._single  # a plain product is a union over a single k
        if remove >= 0:
            removed = [f.maps[f.scope.index(remove)] for f in (left, right) if remove in f.scope]
            _, values = self.joint(removed)
        sides = [self._strides(f, scope, representatives, remove, values) for f in (left, right)]
        tables = self.logical[left.node].table, self.logical[right.node].table
        table = self._step(_ProgramStep(*tables, *sides[0], *sides[1]))
        shape, node = tuple(len(r) for r in representatives), self._use(table, left.node, right.node)
        return _Factor(scope, shape, tuple(maps), node, left.weight + right.weight)

    def _announce(self, scope: _Scope, entries: int) -> None:
        needed = entries * _BYTES_PER_ENTRY
        if entries < _WORTH_CHECKING or needed <= memory_allowance():
            return
        names = ", ".join(repr(self.reduced.graph.names[u]) for u in scope[:4] if u < len(self.reduced.graph))
        raise TableTooLargeError(
            f"a table over {len(scope)} operators ({names}) would have {entries:.3g} entries and need "
            f"{format_bytes(needed)}, more than half of the free memory; give these operators fewer "
            "configurations, or use the method 'auto', which needs smaller tables"
        )

    def _strides(
        self, factor: _Factor, scope: _Scope, representatives: list[Indices], remove: int, values: Indices
    ) -> tuple[Indices, Indices]:
        """Return two arrays: one number for each entry of the result, one for each class of the removed
        operator. The sum of two is the index of a factor's entry. Equal arguments return the same arrays."""
        place = {u: d for d, u in enumerate(factor.scope)}
        key = (
            factor.shape,
            tuple(id(m) for m in factor.maps),
            tuple((place.get(u, -1), id(r)) for u, r in zip(scope, representatives, strict=True)),
            (place.get(remove, -1), id(values)),
        )
        if key in self._indices:
            return self._indices[key]
        out = np.zeros(1, np.int64)
        step, stride = {}, 1
        for u, m, size in zip(factor.scope[::-1], factor.maps[::-1], factor.shape[::-1], strict=True):
            step[u] = m * stride
            stride *= size
        for u, r in zip(scope, representatives, strict=True):
            shift = step[u][r] if u in step else np.zeros(len(r), np.int64)
            out = (out[:, None] + shift[None, :]).reshape(-1)
        removed = step[remove][values] if remove in step else np.zeros(len(values), np.int64)
        self._indices[key] = out, removed
        return self._indices[key]

    def _step(self, step: _ProgramStep) -> int:
        arrays = (step.left_out, step.left_k, step.right_out, step.right_k)
        # _strides returns the same arrays for equal queries, so this recognises equal steps without comparing
        # contents.
        key = (step.left, step.right, *(id(a) for a in arrays))
        if key not in self._known:
            self._known[key] = len(self.sizes)
            self.sizes.append(len(step.left_out))
            self.steps.append(step)
        return self._known[key]

    def finish(self) -> Program:
        """Multiply the remaining tables, of one entry each, smallest first; return the program."""
        assert not any(f.scope for f in self.factors.values()), "every operator must be eliminated"
        while len(self.factors) > 1:
            a, b = sorted(self.factors, key=lambda i: (self.factors[i].weight, i))[:2]
            self._add(self._product(self._take(a), self._take(b), -1))
        root = next(iter(self.factors.values())).node
        sizes = np.array(self.sizes, np.int64)
        base = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        leaves = len(self.reduced.leaves) + 1
        return Program(self.reduced, leaves, tuple(self.steps), tuple(self.logical), root, sizes, base)
