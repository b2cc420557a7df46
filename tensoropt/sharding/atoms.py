"""Atoms: the common factors of every tensor dim's size, on which all views in the graph agree.

A fused ``qkv`` output of size ``3*h*d``, split in three and viewed as heads, has the atoms ``(3, h, d)``.
Contiguous shards of the fused dim would mix q, k and v and be silently wrong; Megatron-LM shards ``h``. Atoms
propagate through views, element-wise operators and contractions, in both directions, until nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from tensoropt.graph import Operator, OperatorGraph
from tensoropt.ops.index_space import AtomGraph as AtomGraph
from tensoropt.ops.index_space import IndexSpace, LoopDim, Operand
from tensoropt.ops.layouts import Atoms
from tensoropt.ops.registry import index_space
from tensoropt.sharding.discovery.discover import Discovery, Kept, discover, discovered_space, signature
from tensoropt.sharding.small_parts import with_small_parts
from tensoropt.sharding.zigzag import with_zigzag


def _is_chain(boundaries: Iterable[int]) -> bool:
    ordered = sorted(boundaries)
    return all(outer % inner == 0 for inner, outer in pairwise(ordered))


class _Refinement:
    """The search for the factors (atoms) of all tensor dims.

    The dims over which one loop of an operator runs must have the same factors. A factor of one dim is
    therefore passed on to the others, operator by operator, until no dim gets a new one.

    Attributes:
        boundaries: (tensor, dim) -> products of the dim's innermost factors, except 1 and the whole size.
        broken: operator -> its loops whose tensors have incompatible factors; these loops are not split.
        touching: (tensor, dim) -> the operators whose loops run over the dim.
        known: tensor -> atoms that must not change, from an earlier refinement.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        kept: Kept | None,
        operators: Sequence[Operator] | None = None,
        known: Mapping[str, Atoms] | None = None,
    ):
        self.graph, self.known = graph, known or {}
        self.operators = graph.operators if operators is None else operators
        self.spaces = {op.name: index_space(op, graph) for op in self.operators}
        self.discovered = self._discover(kept)
        self.boundaries: dict[tuple[str, int], set[int]] = {
            (t.name, dim): set() for t in graph.tensors.values() for dim in range(len(t.shape))
        }
        for name, atoms in self.known.items():
            for dim, sizes in enumerate(atoms):
                self.boundaries[name, dim] = {math.prod(sizes[i:]) for i in range(1, len(sizes))}
        self.broken: dict[str, set[int]] = {name: set() for name in self.spaces}
        self.touching: dict[tuple[str, int], set[str]] = {}
        for name, space in self.spaces.items():
            for operand in (*space.reads, *space.writes):
                for dim, loops in enumerate(operand.dims):
                    if loops:
                        self.touching.setdefault((operand.tensor, dim), set()).add(name)

    def _discover(self, kept: Kept | None) -> dict[str, Discovery]:
        by_operator: dict[str, Discovery] = {}
        by_signature: dict[str, Discovery] = {}
        for op in self.operators:
            if not self.spaces[op.name].known and op.inputs():
                key = signature(op, self.graph)
                if key not in by_signature:
                    by_signature[key] = discover(op, self.graph, kept)
                by_operator[op.name] = by_signature[key]
                self.spaces[op.name] = discovered_space(op, self.graph, by_signature[key])
        return by_operator

    def _positions(self, space: IndexSpace, loop: int) -> list[tuple[tuple[str, int], int]]:
        places = []
        for operand in (*space.reads, *space.writes):
            for dim, loops in enumerate(operand.dims):
                if loop in loops:
                    inner = math.prod(space.dims[i].size for i in loops[loops.index(loop) + 1 :])
                    places.append(((operand.tensor, dim), inner))
        return places

    def _inside(self, place: tuple[str, int], inner: int, size: int) -> set[int]:
        return {b // inner for b in self.boundaries[place] if inner < b < inner * size and b % inner == 0}

    def _offer(self, place: tuple[str, int], new: set[int], changed: set[str]) -> bool:
        size = self.graph.tensors[place[0]].shape[place[1]]
        # 1 and the size itself are boundaries of every dim. Recording them would only cause the graph to be
        # visited again.
        new = {b for b in new if 1 < b < size}
        if new <= self.boundaries[place]:
            return True
        if place[0] in self.known or not _is_chain(self.boundaries[place] | new | {size}):
            return False
        # Boundaries are never removed, and all divide the size of their dim, so the visits end.
        self.boundaries[place] |= new
        changed |= self.touching[place]
        return True

    def _visit(self, name: str) -> set[str]:
        space, changed = self.spaces[name], set[str]()
        for loop, dim in enumerate(space.dims):
            if loop in self.broken[name] or dim.size <= 1 or dim.along:
                continue
            places = self._positions(space, loop)
            union = {1}.union(*(self._inside(place, inner, dim.size) for place, inner in places))
            fits = _is_chain(union | {dim.size})
            for place, inner in places:
                # The two ends of the loop are also boundaries of its dim: no other view's atom may extend
                # across them.
                edges = {b * inner for b in union} | {inner * dim.size, inner}
                # If one place refuses, what other places accepted before stays: an atom that is finer than
                # needed is never wrong.
                fits = fits and self._offer(place, edges, changed)
            if not fits:
                self.broken[name].add(loop)
        return changed

    def refine(self) -> AtomGraph:
        # Operators that compute come first: if factorisations contradict each other, the last operator keeps
        # its dim whole, and that should be a view.
        computing: dict[str, None] = {}
        viewing: dict[str, None] = {}
        queue_of = {n: viewing if _factors_dims(space) else computing for n, space in self.spaces.items()}
        for name, queue in queue_of.items():
            queue[name] = None
        # Dicts as ordered sets. Which operator gives in when factorisations contradict each other depends on
        # the order, and every rank has to arrive at the same atoms.
        while computing or viewing:
            queue = computing or viewing
            name = next(iter(queue))
            del queue[name]
            # Sorted, because sets of names have a different order in every process.
            for other in sorted(self._visit(name)):
                queue_of[other].setdefault(other)
        atoms: dict[str, Atoms] = {
            name: tuple(_factors(size, self.boundaries[name, dim]) for dim, size in enumerate(tensor.shape))
            for name, tensor in self.graph.tensors.items()
        }
        spaces = {name: self._refined(name, atoms) for name in self.spaces}
        uneven = _uneven_dims(self.graph, spaces)
        spaces = {name: _mark_uneven(space, uneven) for name, space in spaces.items()}
        return AtomGraph(self.graph, spaces, atoms, self.discovered)

    def _refined(self, name: str, atoms: Mapping[str, Atoms]) -> IndexSpace:
        space = self.spaces[name]
        new_dims: list[LoopDim] = []
        parts: dict[int, list[int]] = {}
        # Dims whose parts an operator locates by their position, such as experts.
        in_blocks = {loop for dim in space.dims for loop in dim.along[1:]}
        for loop, dim in enumerate(space.dims):
            if loop in self.broken[name] or dim.size <= 1 or dim.along:
                continue
            positions = self._positions(space, loop)
            # Nothing changes any more, so all places of an unbroken loop have the same boundaries, and the
            # first one suffices.
            inside = self._inside(*positions[0], dim.size) if positions else set()
            sizes = _factors(dim.size, inside)
            parts[loop] = []
            for i, size in enumerate(sizes):
                label = dim.name if len(sizes) == 1 else f"{dim.name}.{i}"
                parts[loop].append(len(new_dims))
                # Only a parameter's dim that is a single atom is cut unevenly: unequal parts of an inner atom
                # are not chunks of the dim. Samples and heads may be such parts all the same.
                uneven, growing = dim.uneven and len(sizes) == 1, dim.growing and i == 0
                of_atom = replace(dim, name=label, size=size, uneven=uneven, growing=growing, along=())
                # Parts of an inner atom are no blocks of the dim.
                apart = i > 0 and (dim.blocks or loop in in_blocks)
                new_dims.append(replace(of_atom, splittable=dim.splittable and not apart))
        new_dims += _along_atoms(space, parts, new_dims)

        def operand(old: Operand) -> Operand:
            dims = []
            for i, loops in enumerate(old.dims):
                count = len(atoms[old.tensor][i])
                new = [p for loop in loops for p in parts.get(loop, [])]
                if len(new) != count:
                    # Opaque dims still own their atoms, as loops that nothing may split.
                    new = [self._opaque(new_dims, size) for size in atoms[old.tensor][i]]
                dims.append(tuple(new))
            synced = tuple(p for loop in old.synced for p in parts.get(loop, []))
            means = tuple(p for loop in old.means for p in parts.get(loop, []))
            return Operand(old.tensor, tuple(dims), old.added, synced, means)

        reads = tuple(operand(o) for o in space.reads)
        writes = tuple(operand(o) for o in space.writes)
        return replace(space, dims=tuple(new_dims), reads=reads, writes=writes)

    @staticmethod
    def _opaque(dims: list[LoopDim], size: int) -> int:
        dims.append(LoopDim(f"whole{len(dims)}", size, splittable=False))
        return len(dims) - 1


def _along_atoms(
    space: IndexSpace, parts: Mapping[int, Sequence[int]], dims: Sequence[LoopDim]
) -> list[LoopDim]:
    found = []
    for dim in space.dims:
        if dim.along and all(parts.get(loop) for loop in dim.along):
            first, *others = (parts[loop] for loop in dim.along)
            if dim.aligned and len({dims[of[0]].size for of in (first, *others)}) > 1:
                continue
            for i, atom in enumerate(first[:1] if dim.aligned else first):
                cut = (atom, *(other[0] for other in others))
                label = dim.name if len(first) == 1 or dim.aligned else f"{dim.name}.{i}"
                size, growing = min(dims[c].size for c in cut), any(dims[c].growing for c in cut)
                of_atoms = replace(dim, name=label, size=size, along=cut, growing=growing)
                found.append(replace(of_atoms, splittable=of_atoms.cut_together(dims)))
    return found


def _factors_dims(space: IndexSpace) -> bool:
    return space.cheap and any(len(loops) > 1 for o in (*space.reads, *space.writes) for loops in o.dims)


def _factors(size: int, boundaries: set[int]) -> tuple[int, ...]:
    if size <= 1:
        return (0,) * (size == 0)
    marks = sorted({size, *boundaries, 1}, reverse=True)
    return tuple(outer // inner for outer, inner in pairwise(marks))


def _uneven_dims(graph: OperatorGraph, spaces: Mapping[str, IndexSpace]) -> set[tuple[str, int]]:
    """Return the (tensor, dim) pairs whose shards may differ in size from rank to rank."""
    marked: set[tuple[str, int]] = set()

    def whole(operand: Operand, loop: int) -> list[tuple[str, int]]:
        return [(operand.tensor, d) for d, loops in enumerate(operand.dims) if loops == (loop,)]

    changed = True
    # Marks spread along the graph in both directions, so passes are repeated until one adds nothing new.
    while changed:
        changed = False
        for space in spaces.values():
            operands = (*space.reads, *space.writes)
            for loop, dim in enumerate(space.dims):
                if not (dim.uneven and dim.splittable):
                    continue
                places = [p for o in operands for p in whole(o, loop)]
                # The loop must be a whole dim of every operand that has it; otherwise one operand would be
                # cut through.
                seeded = any(p in marked or graph.tensors[p[0]].kind == "parameter" for p in places)
                spread = len(places) == sum(loop in o.loops for o in operands)
                if seeded and spread and not marked.issuperset(places):
                    marked.update(places)
                    changed = True
    return marked


def _mark_uneven(space: IndexSpace, marked: set[tuple[str, int]]) -> IndexSpace:
    operands = (*space.reads, *space.writes)

    def allowed(loop: int) -> bool:
        return space.dims[loop].uneven and all(
            (o.tensor, d) in marked for o in operands for d, loops in enumerate(o.dims) if loop in loops
        )

    return replace(space, dims=tuple(replace(d, uneven=allowed(i)) for i, d in enumerate(space.dims)))


def refine_graph(graph: OperatorGraph, kept: Kept | None = None) -> AtomGraph:
    """Factor all loops and dims of a graph into atoms; ``kept``: a store of splits found by running
    operators."""
    return with_zigzag(with_small_parts(_Refinement(graph, kept).refine()))


def refine_in_place_of(before: AtomGraph, graph: OperatorGraph, new: Sequence[Operator]) -> AtomGraph:
    """Return a changed graph's atoms: the known ones for tensors that it had before, and new ones for others.

    Args:
        before: the atoms of the graph before the change.
        new: the new or changed operators of ``graph``.
    """
    known = {name: atoms for name, atoms in before.atoms.items() if name in graph.tensors}
    found = _Refinement(graph, None, new, known).refine()
    spaces = {op.name: found.spaces.get(op.name) or before.spaces[op.name] for op in graph.operators}
    refined = AtomGraph(graph, spaces, found.atoms, before.discovered)
    return with_zigzag(with_small_parts(refined))
