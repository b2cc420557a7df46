"""Which loops may be cut into small unequal parts: those over samples, positions and heads.

An axis of three ranks cuts a batch of 32 into 11, 11 and 10 samples, and an axis of four cuts 25 heads into
7, 7, 7 and 4. The search prices the largest part, so whether that is worth it is not decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tensoropt.ops.index_space import AtomGraph, IndexSpace, LoopDim
from tensoropt.ops.registry import spec_of
from tensoropt.sharding.groups import batch_inputs

_Atom = tuple[str, int]
"""A tensor, and the number of one of its atoms."""


class _SameAtoms:
    """Sets of atoms that some loop has in common (disjoint-set forest, with paths halved)."""

    def __init__(self) -> None:
        self._above: dict[_Atom, _Atom] = {}

    def first(self, atom: _Atom) -> _Atom:
        """Return the atom that stands for the set of this one."""
        while (above := self._above.get(atom, atom)) != atom:
            self._above[atom] = atom = self._above.get(above, above)
        return atom

    def join(self, atoms: Sequence[_Atom]) -> None:
        """Make one set of the sets of these atoms."""
        for atom in atoms:
            self._above[self.first(atom)] = self.first(atoms[0])


def with_small_parts(atoms: AtomGraph) -> AtomGraph:
    """Return the graph with all loops over samples, positions and heads marked (``small_parts``).

    These are the loops that rules mark (heads), those over the batch of the inputs and over the positions of
    their tokens, and all loops over the same atoms, in operators whose calls do not need equal shards.
    """
    graph, spaces = atoms.graph, atoms.spaces
    places = {
        name: _places_of_loops(space)
        for name, space in spaces.items()
        if space.known and not space.discovered and not spec_of(graph.by_name[name].target).equal_shards
    }
    same, marked = _SameAtoms(), set[_Atom]()
    for name, loops in places.items():
        for loop, found in loops.items():
            same.join(found)
            if spaces[name].dims[loop].small_parts:
                marked.add(found[0])
    for name in batch_inputs(graph):
        batch, *others = atoms.atoms[name]
        marked.add((name, 0))
        if others and others[0] and graph.tensors[name].dtype in _TOKENS:
            marked.add((name, len(batch)))
    allowed = {same.first(atom) for atom in marked}

    def marked_loops(name: str) -> tuple[LoopDim, ...]:
        return tuple(
            replace(dim, small_parts=loop in places[name] and same.first(places[name][loop][0]) in allowed)
            for loop, dim in enumerate(spaces[name].dims)
        )

    new = {n: s.with_dims(marked_loops(n)) if n in places else s for n, s in spaces.items()}
    return replace(atoms, spaces=new)


_TOKENS = ("int64", "int32")
"""The types of inputs that hold a number of a token at each position."""


def _places_of_loops(space: IndexSpace) -> dict[int, list[_Atom]]:
    """Return the atoms over which each loop runs that may be split."""
    places: dict[int, list[_Atom]] = {}
    for operand in (*space.reads, *space.writes):
        for position, loop in enumerate(loop for dim in operand.dims for loop in dim):
            if space.dims[loop].splittable:
                places.setdefault(loop, []).append((operand.tensor, position))
    return places
