"""A tensor's pieces on all ranks of a mesh: they are cut according to placements, and compared with the
whole."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import prod

import torch

from tensoropt.ops.layouts import PARTIAL, Atoms, Layout, chunk, layout_names

Coordinate = tuple[int, ...]


def distribute(
    value: torch.Tensor, atoms: Atoms, placements: Layout, mesh: Sequence[int], generator: torch.Generator
) -> dict[Coordinate, torch.Tensor]:
    """Every rank's piece of ``value``: slices where it is sharded, random summands where it is partial."""
    partial = [axis for axis, code in enumerate(placements) if code == PARTIAL and mesh[axis] > 1]
    members = list(itertools.product(*(range(mesh[axis]) for axis in partial)))
    summands = {m: _noise(value, generator) for m in members[1:]}
    # Noise rather than zeros on the other ranks exposes a kernel that mistakes a partial sum for the whole.
    summands[members[0]] = value - sum(summands.values()) if summands else value
    ranks = itertools.product(*(range(size) for size in mesh))
    return {at: shard(summands[tuple(at[a] for a in partial)], atoms, placements, mesh, at) for at in ranks}


def _noise(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if value.is_floating_point() or value.is_complex():
        return torch.randn(value.shape, generator=generator, dtype=value.dtype)
    return torch.randint(0, 5, value.shape, generator=generator, dtype=value.dtype)


def shard(
    value: torch.Tensor, atoms: Atoms, placements: Layout, mesh: Sequence[int], at: Coordinate
) -> torch.Tensor:
    """The part of ``value`` that the sharding axes leave at coordinate ``at``."""
    flat = value.reshape([size for dim in atoms for size in dim])
    for axis, code in enumerate(placements):
        if code >= 0:
            start, length = chunk(flat.shape[code], mesh[axis], at[axis])
            flat = flat.narrow(code, start, length)
    sizes = iter(flat.shape)
    return flat.reshape([prod(next(sizes) for _ in dim) for dim in atoms]).contiguous()


def difference(
    whole: torch.Tensor,
    pieces: Mapping[Coordinate, torch.Tensor],
    atoms: Atoms,
    placements: Layout,
    mesh: Sequence[int],
    tolerance: float,
) -> tuple[str, str] | None:
    """How the pieces differ from ``whole``: (``shape`` or ``value``, details); None if they do not.

    On every rank the piece, summed over the partial axes, must be its shard of ``whole``.
    """
    partial = [axis for axis, code in enumerate(placements) if code == PARTIAL]
    label = "x".join(layout_names(placements))
    for at, piece in pieces.items():
        expected = shard(whole, atoms, placements, mesh, at)
        if piece.shape != expected.shape:
            return "shape", f"{tuple(piece.shape)} instead of {tuple(expected.shape)} as {label}"
        members = itertools.product(*(range(n) if a in partial else (at[a],) for a, n in enumerate(mesh)))
        total = sum((pieces[m] for m in members), torch.zeros_like(piece)) if partial else piece
        if not _close(total, expected, tolerance):
            return "value", f"rank {at} is {_far(total, expected)} off as {label}"
    return None


def _close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    if expected.is_complex():
        # Part by part, because complex numbers may have infinities and NaN in either part.
        return found.is_complex() and _close(_parts(found), _parts(expected), tolerance)
    if found.is_complex():
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    finite = expected.nan_to_num(posinf=0.0, neginf=0.0).abs()
    # Cancelled sums are as inexact as their largest summand, so the absolute tolerance grows with the tensor.
    scale = 1.0 + (float(finite.max()) if finite.numel() else 0.0)
    found = found.to(expected.dtype)
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _parts(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value.resolve_conj())


def _far(found: torch.Tensor, expected: torch.Tensor) -> str:
    wide = torch.complex128 if found.is_complex() or expected.is_complex() else torch.float64
    found, expected = found.to(wide), expected.to(wide)
    return f"{100 * float((found - expected).norm() / expected.norm().clamp_min(1e-300)):.3g} %"
