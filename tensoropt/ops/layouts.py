"""Integer codes (placements) for how one mesh axis distributes a tensor, and tuples of them (layouts).

If the axis shards the tensor, the code is at least 0: the index of the factor (atom) that is split, among all
factors of the tensor's dims. Negative codes say how the ranks of the axis have an unsplit tensor and its
gradient. ``R/P``, for example, is a whole tensor on every rank, with gradients that must be summed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import islice

# Negative, so that a single comparison distinguishes shards (an atom's number) from the rest.
REPLICATE = -1
PARTIAL_GRAD = -2
PARTIAL = -3
GATHERED_ONCE = -4
REDUCED_LAST = -5
GATHERED_AHEAD = -6

Layout = tuple[int, ...]
Atoms = tuple[tuple[int, ...], ...]
"""For each dim of a tensor the sizes of its factors (atoms), outermost first; none for a dim of size 1."""

_NAMES = {
    REPLICATE: "R",
    PARTIAL_GRAD: "R/P",
    PARTIAL: "P/R",
    GATHERED_ONCE: "held",
    REDUCED_LAST: "held/P",
    GATHERED_AHEAD: "ahead",
}
"""Placement code -> its name in plans."""
_CODES = {name: code for code, name in _NAMES.items()}


def placement_name(code: int) -> str:
    """Return the name of a placement in plans, such as ``S(n)`` (split), ``R`` (whole) or ``R/P``."""
    return f"S({code})" if code >= 0 else _NAMES[code]


def placement_code(name: str) -> int:
    """Return the code of a placement, given its name in plans; ``ValueError`` for any other text."""
    if name.startswith("S(") and name.endswith(")"):
        return int(name[2:-1])
    if name not in _CODES:
        raise ValueError(
            f"'{name}' is not a placement; expected S(n), R, R/P or P/R, or held, held/P or ahead for a "
            "parameter on the micro-batch axis"
        )
    return _CODES[name]


@cache
def layout_names(layout: Layout) -> tuple[str, ...]:
    """Return the names of a layout's placements, one per axis."""
    return tuple(placement_name(code) for code in layout)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return the (start, length) of shard ``index`` of ``parts``, cut as in ``torch.chunk`` and DTensor."""
    # Rounded up, with smaller or empty last shards: optimizers and checkpoints see shards as DTensors, so the
    # cuts have to agree.
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(step, size - start)


def flat_index(mesh: Sequence[int], coordinate: Sequence[int], axes: Sequence[int]) -> int:
    """Return a rank's index among the ranks along ``axes``; the first axis is outermost."""
    index = 0
    for axis in axes:
        index = index * mesh[axis] + coordinate[axis]
    return index


def local_atoms(
    atoms: Atoms, layout: Layout, mesh: Sequence[int], coordinate: Sequence[int] | None = None
) -> Atoms:
    """Return the sizes of each dim's factors (atoms) in the shard at ``coordinate``, or in the largest."""
    sizes = [size for dim in atoms for size in dim]
    for axis, code in enumerate(layout):
        if code >= 0:
            index = 0 if coordinate is None else coordinate[axis]
            # In axis order: a further axis on the same atom cuts what the previous one has left.
            sizes[code] = chunk(sizes[code], mesh[axis], index)[1]
    rest = iter(sizes)
    return tuple(tuple(islice(rest, len(dim))) for dim in atoms)


@lru_cache(maxsize=1 << 18)
def local_shape(
    atoms: Atoms, layout: Layout, mesh: tuple[int, ...], coordinate: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Return the shape of a tensor's shard at ``coordinate``; by default of the largest shard."""
    return tuple(math.prod(dim) for dim in local_atoms(atoms, layout, mesh, coordinate))
