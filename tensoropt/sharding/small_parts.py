"""Loops that may be cut into small uneven parts: those over samples, positions and heads."""

from __future__ import annotations

from dataclasses import replace

from tensoropt.ops.index_space import AtomGraph, IndexSpace, LoopDim
from tensoropt.ops.registry import spec_of
from tensoropt.sharding.groups import batch_inputs
from tensoropt.sharding.same_atoms import atoms_of_loops, same_atoms


def with_small_parts(atoms: AtomGraph) -> AtomGraph:
    """Return the graph with loops over samples, positions and heads marked: they may be cut unevenly."""
    graph, spaces = atoms.graph, atoms.spaces
    places = {
        name: {loop: found for loop, found in atoms_of_loops(space).items() if loop in _cut(space)}
        for name, space in spaces.items()
        if space.known and not space.discovered and not spec_of(graph.by_name[name].target).equal_shards
    }
    same = same_atoms(found for loops in places.values() for found in loops.values())
    marked = {
        found[0]
        for name, loops in places.items()
        for loop, found in loops.items()
        if spaces[name].dims[loop].small_parts
    }
    for name in batch_inputs(graph):
        batch, *others = atoms.atoms[name]
        marked.add((name, 0))
        if others and others[0] and graph.tensors[name].dtype in _TOKENS:
            marked.add((name, len(batch)))
    allowed = {same[atom] for atom in marked}

    def marked_loops(name: str) -> tuple[LoopDim, ...]:
        return tuple(
            replace(dim, small_parts=loop in places[name] and same[places[name][loop][0]] in allowed)
            for loop, dim in enumerate(spaces[name].dims)
        )

    new = {n: replace(s, dims=marked_loops(n)) if n in places else s for n, s in spaces.items()}
    return replace(atoms, spaces=new)


def _cut(space: IndexSpace) -> set[int]:
    ways = [(loop, dim) for loop, dim in enumerate(space.dims) if dim.splittable]
    return {cut for loop, dim in ways for cut in dim.along or (loop,)}


_TOKENS = ("int64", "int32")
"""The dtypes of token inputs."""
