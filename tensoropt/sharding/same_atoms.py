"""Equivalent atoms: factors of different tensors' dims that the same loop of an operator runs over."""

from __future__ import annotations

from collections.abc import Iterable

from networkx.utils import UnionFind

from tensoropt.ops.index_space import IndexSpace

Atom = tuple[str, int]
"""A tensor's name, and the number of one of its atoms."""


def atoms_of_loops(space: IndexSpace) -> dict[int, list[Atom]]:
    atoms: dict[int, list[Atom]] = {}
    for operand in (*space.reads, *space.writes):
        for position, loop in enumerate(operand.loops):
            atoms.setdefault(loop, []).append((operand.tensor, position))
    return atoms


def same_atoms(loops: Iterable[Iterable[Atom]]) -> UnionFind:
    """Unite atoms over which the same loop runs in sets; ``sets[atom]`` is the representative of its set."""
    sets = UnionFind()
    for atoms in loops:
        sets.union(*atoms)
    return sets
