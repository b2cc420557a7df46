"""Steps of a resharding that sum over ranks, either waited for at once or started and waited for later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tensoropt.ops.layouts import chunk


@dataclass(frozen=True)
class AllReduce:
    """The sum of a tensor over a group of ranks, returned to each of them."""

    group: dist.ProcessGroup | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # The reduction is done in place, and the producer of the input may still need it.
        x = x.clone(memory_format=torch.contiguous_format)
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def begin(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start reducing ``x``, which is given up, in place; return a function that waits for it."""
        sent = x.contiguous()
        under_way = dist.all_reduce(sent, group=self.group, async_op=True)

        def wait() -> torch.Tensor:
            under_way.wait()
            return sent

        return wait


@dataclass(frozen=True)
class ReduceScatter:
    """The sum of a tensor over a group of ranks, in pieces, one for each of them.

    Attributes:
        atom: the atom that is cut.
        parts, position: the number of pieces, and the number of this rank's piece.
    """

    group: dist.ProcessGroup
    atom: int
    parts: int
    position: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        pieces = self._pieces(x)
        flat = x.new_empty(pieces[0].numel())
        dist.reduce_scatter_tensor(flat, pieces.flatten(), group=self.group)
        return self._own(flat, pieces.shape[1:], x.shape[self.atom])

    def begin(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start computing the shard of ``x``, which is given up; return a function that waits for it."""
        size = x.shape[self.atom]
        # Not all of `x`, because it is not needed while the pieces are being sent.
        pieces = self._pieces(x)
        flat = pieces.new_empty(pieces[0].numel())
        under_way = dist.reduce_scatter_tensor(flat, pieces.flatten(), group=self.group, async_op=True)

        def wait() -> torch.Tensor:
            under_way.wait()
            return self._own(flat, pieces.shape[1:], size)

        return wait

    def _pieces(self, x: torch.Tensor) -> torch.Tensor:
        """Each rank's piece, contiguous in memory and in the order of ranks, as the collective needs it."""
        size, atom, parts = x.shape[self.atom], self.atom, self.parts
        shard = -(-size // parts)
        if size == shard * parts:
            return x.unflatten(atom, (parts, shard)).movedim(atom, 0).contiguous()
        pieces = x.new_zeros([parts, *resized(x, atom, shard)])
        for i in range(parts):
            start, length = chunk(size, parts, i)
            pieces[i].narrow(atom, 0, length).copy_(x.narrow(atom, start, length))
        return pieces

    def _own(self, flat: torch.Tensor, shape: Sequence[int], size: int) -> torch.Tensor:
        """This rank's piece of a dim of this size, without padding."""
        result = flat.view(shape)
        length = chunk(size, self.parts, self.position)[1]
        return result.narrow(self.atom, 0, length) if length != shape[self.atom] else result


def resized(x: torch.Tensor, atom: int, size: int) -> list[int]:
    """The shape that a tensor would have if one of its atoms had another size."""
    return [size if i == atom else n for i, n in enumerate(x.shape)]
