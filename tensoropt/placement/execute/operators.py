"""Functions that placed plans call: split a tensor, join its pieces, run a piece of an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from tensoropt.engine.runtime import Runtime
from tensoropt.ops.layouts import PARTIAL, Atoms, chunk, flat_index, local_shape
from tensoropt.placement.graph import PlacedOperator


@dataclass(frozen=True)
class Cut:
    """A way to cut a tensor into pieces.

    Attributes:
        atoms: for each dim of the tensor, the factors of its size.
        code: the index of the factor that is cut, or ``PARTIAL`` if the pieces are terms of a sum.
        count: the number of pieces.
    """

    atoms: Atoms
    code: int
    count: int

    @property
    def flat(self) -> tuple[int, ...]:
        return tuple(size for dim in self.atoms for size in dim)

    @property
    def whole(self) -> tuple[int, ...]:
        return tuple(prod(dim) for dim in self.atoms)

    def shape(self, index: int) -> tuple[int, ...]:
        return local_shape(self.atoms, (self.code,), (self.count,), (index,))

    def piece(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Return a copy of one piece."""
        start, length = chunk(self.flat[self.code], self.count, index)
        # Atoms are factors of dims, so a cut along one is a slice of the tensor reshaped to its atoms.
        part = whole.reshape(self.flat).narrow(self.code, start, length)
        return part.clone(memory_format=torch.contiguous_format).view(self.shape(index))

    def put(self, whole: torch.Tensor, index: int, piece: torch.Tensor) -> None:
        """Overwrite one piece of a contiguous tensor."""
        start, length = chunk(self.flat[self.code], self.count, index)
        part = whole.view(self.flat).narrow(self.code, start, length)
        part.copy_(piece.reshape(part.shape))

    def joined(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor made of all pieces, or the sum of all terms."""
        if self.code == PARTIAL:
            # The first addition makes a tensor of its own; later terms are added in place, and no input is
            # changed.
            total = pieces[0] + pieces[1]
            for piece in pieces[2:]:
                total.add_(piece)
            return total
        sizes = list(self.flat)
        shaped = []
        for index, piece in enumerate(pieces):
            sizes[self.code] = chunk(self.flat[self.code], self.count, index)[1]
            shaped.append(piece.reshape(sizes))
        return torch.cat(shaped, self.code).view(self.whole)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, cut: Cut) -> tuple[torch.Tensor, ...]:
        ctx.cut, ctx.dtype, ctx.device = cut, whole.dtype, whole.device
        return tuple(cut.piece(whole, i) for i in range(cut.count))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # type: ignore[override]
        cut: Cut = ctx.cut
        pieces = [
            # A piece that nobody read has no gradient, but the whole needs one everywhere.
            torch.zeros(cut.shape(i), dtype=ctx.dtype, device=ctx.device) if g is None else g
            for i, g in enumerate(gradients)
        ]
        return cut.joined(pieces), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cut: Cut, *pieces: torch.Tensor) -> torch.Tensor:
        ctx.cut = cut
        return cut.joined(pieces)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        cut: Cut = ctx.cut
        if cut.code == PARTIAL:
            # Every term of a sum has the gradient of the sum.
            return None, *(gradient for _ in range(cut.count))
        return None, *(cut.piece(gradient, i) for i in range(cut.count))


def split(cut: Cut, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
    result = _Split.apply(whole, cut)
    assert isinstance(result, tuple)
    return result


def join(cut: Cut, *pieces: torch.Tensor) -> torch.Tensor:
    return _Join.apply(cut, *pieces)


class Piece:
    """The :class:`~tensoropt.ops.kernels.ShardContext` for the kernels of one piece of an operator."""

    def __init__(self, runtime: Runtime, op: PlacedOperator, device: torch.device):
        self.runtime, self.device = runtime, device
        self.mesh, self.index = op.mesh, op.index
        self.alone = False

    @property
    def place(self) -> tuple[int, ...]:
        return (self.runtime.micro_batch, self.index)

    @property
    def seed(self) -> int:
        return self.runtime.seed

    @property
    def step(self) -> int:
        return self.runtime.step

    def coordinate(self, axes: tuple[int, ...]) -> int:
        return flat_index(self.mesh, self.place, axes)

    def all_reduce(self, value: torch.Tensor, axes: tuple[int, ...], op: str = "sum") -> torch.Tensor:
        assert self.mesh[1] == 1 or 1 not in axes, "a piece that reduces with others is never made"
        return value

    def all_to_all(
        self,
        value: torch.Tensor,
        axes: tuple[int, ...],
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> torch.Tensor:
        raise AssertionError("a piece that exchanges rows with others is never made")

    def send_around(self, value: torch.Tensor, axes: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        raise AssertionError("a piece of ring attention is never made")

    def total(self, name: str, value: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        """Return a count over the whole batch, such as of loss targets, which is computed before the step."""
        if all(self.mesh[axis] == 1 for axis in axes):
            return value
        # Counted once per process, which may run several devices.
        return self.runtime.counts[name].to(value.device)
