"""Atoms of different tensors over which one loop runs."""

from __future__ import annotations

from collections.abc import Iterable

from networkx.utils import UnionFind

from tensoropt.ops.index_space import IndexSpace

Atom = tuple[str, int]
"""A tensor, and the number of one of its atoms."""


def atoms_of_loops(space: IndexSpace) -> dict[int, list[Atom]]:
    atoms: dict[int, list[Atom]] = {}
    for operand in (*space.reads, *space.writes):
        for position, loop in enumerate(operand.loops):
            atoms.setdefault(loop, []).append((operand.tensor, position))
    return atoms


def same_atoms(loops: Iterable[Iterable[Atom]]) -> UnionFind:
    """Unite the atoms that one loop runs over; ``sets[atom]`` is the representative of its set."""
    sets = UnionFind()
    for atoms in loops:
        sets.union(*atoms)
    return sets
