"""Collectives that several parameters, or their gradients, share: the data that is sent is flat.

A parameter that is cut unevenly has smaller shards at the end of a dim
(:func:`~tensoropt.ops.layouts.chunk`), which are sent padded to the largest size, because collectives need
pieces of one size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tensoropt.ops.layouts import Atoms, chunk, local_atoms, local_shape
from tensoropt.sharding.reshard.redistribute import EdgeSpec, Move, Rank, Sizes, as_asked
from tensoropt.sharding.reshard.reductions import resized
from tensoropt.sharding.reshard.steps import lies_inside


@dataclass(frozen=True)
class Packed:
    """A rank's part in a shared collective; the data that it sends is flat.

    Attributes:
        group: the ranks that take part.
        parts: the number of these ranks.
        pack: converts the shard, or the gradient, into what is sent.
        unpack: converts what arrives into the result.
    """

    group: dist.ProcessGroup | None
    parts: int
    pack: Move
    unpack: Move


def packed_gather(runtime: Rank, spec: EdgeSpec) -> Packed:
    """The gathering of a parameter in one step; shards smaller than the largest are sent with padding."""
    (step,) = spec.forward
    ends = (spec.source, spec.target)
    own, whole = (_sizes(local_atoms(spec.atoms, end, spec.mesh, runtime.place)) for end in ends)
    shape = local_shape(spec.atoms, spec.target, spec.mesh, runtime.place)
    parts, atom = runtime.parts(step.axes), step.atom
    padded = _with_size(own, atom, -(-whole[atom] // parts))
    # `chunk` makes only the last pieces smaller: if the last one is full, all are.
    even = parts * padded[atom] == whole[atom]
    lengths = [chunk(whole[atom], parts, i)[1] for i in range(parts)]

    def pack(x: torch.Tensor) -> torch.Tensor:
        x = x if spec.dtype is None else x.to(spec.dtype)
        return _padded(x.reshape(own), atom, padded[atom]).contiguous().flatten()

    def unpack(flat: torch.Tensor) -> torch.Tensor:
        pieces = flat.view(parts, *padded)
        if even:
            return as_asked(pieces.movedim(0, atom).reshape(shape))
        if not lies_inside(padded, atom):
            # The padding comes after all the rest.
            return flat[: math.prod(whole)].view(shape)
        return torch.cat([pieces[i].narrow(atom, 0, lengths[i]) for i in range(parts)], atom).view(shape)

    return Packed(runtime.group(step.axes), parts, pack, unpack)


def packed_scatter(runtime: Rank, spec: EdgeSpec) -> Packed:
    """The reduction of such a parameter's gradient to the shards, in one step, padded in the same way."""
    (step,) = spec.backward
    ends = (spec.target, spec.back or spec.source)
    whole, own = (_sizes(local_atoms(spec.atoms, end, spec.mesh, runtime.place)) for end in ends)
    shape = local_shape(spec.atoms, spec.back or spec.source, spec.mesh, runtime.place)
    parts, atom = runtime.parts(step.axes), step.atom
    padded = _with_size(own, atom, -(-whole[atom] // parts))
    pieces = [chunk(whole[atom], parts, i) for i in range(parts)]

    def pack(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.reshape(whole)
        if parts * padded[atom] == whole[atom]:
            return gradient.unflatten(atom, (parts, padded[atom])).movedim(atom, 0).contiguous().flatten()
        packed = gradient.new_empty((parts, *padded))
        for place, (start, length) in zip(packed, pieces, strict=True):
            place.narrow(atom, 0, length).copy_(gradient.narrow(atom, start, length))
            place.narrow(atom, length, padded[atom] - length).zero_()
        return packed.flatten()

    def unpack(flat: torch.Tensor) -> torch.Tensor:
        return flat.view(padded).narrow(atom, 0, own[atom]).reshape(shape)

    return Packed(runtime.group(step.axes), parts, pack, unpack)


def _sizes(atoms: Atoms) -> Sizes:
    return tuple(size for dim in atoms for size in dim)


def _with_size(sizes: Sizes, atom: int, size: int) -> Sizes:
    return (*sizes[:atom], size, *sizes[atom + 1 :])


def _padded(x: torch.Tensor, atom: int, size: int) -> torch.Tensor:
    """A tensor padded with zeros at the end of an atom."""
    if x.shape[atom] == size:
        return x
    result = x.new_empty(resized(x, atom, size))
    result.narrow(atom, 0, x.shape[atom]).copy_(x)
    result.narrow(atom, x.shape[atom], size - x.shape[atom]).zero_()
    return result
