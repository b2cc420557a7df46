"""Masks that depend only on the distance between query and key, represented without being written out.

A causal mask of 131,072 tokens has 16 GiB of booleans, and every step of its computation has as many
elements. One value per diagonal describes all of it. Tensors that are filled with one number, compared
between positions of queries and of keys, cut to a triangle, and anything computed from such tensors element
by element, are of this kind (Toeplitz matrices); views that keep the last two dims preserve it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Band:
    """A tensor of shape ``[..., queries, keys]`` that depends on ``key - query`` only.

    Attributes:
        shape: the whole shape, of at least two dims.
        diagonals: ``[queries + keys - 1]``, the values for ``key - query``, starting at ``1 - queries``.
    """

    shape: tuple[int, ...]
    diagonals: torch.Tensor

    @property
    def offsets(self) -> torch.Tensor:
        """The value of ``key - query`` on each diagonal."""
        return torch.arange(1 - self.shape[-2], self.shape[-1], device="cpu")

    @property
    def uniform(self) -> bool:
        """Whether all elements are equal."""
        return bool((self.diagonals == self.diagonals[:1]).all())

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor, written out only along the dims in which it varies."""
        elements = 1 if self.uniform else self.shape[-2] * self.shape[-1]
        return elements * self.diagonals.element_size()

    def tensor(self) -> torch.Tensor:
        """Return the tensor itself; only its last two dims are materialised in memory."""
        if self.uniform:
            return self.diagonals[0].expand(self.shape)
        rows = self.diagonals.unfold(0, self.shape[-1], 1).flip(0)
        return rows.expand(self.shape)


def _uniform_band(value: torch.Tensor, shape: Sequence[int]) -> Band:
    return Band(tuple(shape), value.detach().reshape(1).expand(shape[-2] + shape[-1] - 1))


def banded(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: torch.Tensor) -> Band | None:
    """Return the result of a call on constants as a band; None if it is not a band or the call is not known.

    Args:
        args, kwargs: the operands, which are tensors with values, and bands.
        result: a tensor of the call's shape and dtype.
    """
    shape = tuple(result.shape)
    operands = [v for v in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    if len(shape) < 2 or any(operand.is_meta for operand in operands):
        return None
    name = target.__name__.split(".")[0]
    if name in _FILLS:
        value = _FILLS[name](args)
        # The number itself may be a folded tensor.
        element = (
            value.reshape(()) if isinstance(value, torch.Tensor) else torch.full((), value, device="cpu")
        )
        return _uniform_band(element.to(result.dtype), shape)
    if name in ("tril", "triu"):
        return _triangle(name, args, kwargs, shape)
    if name in _VIEWS and isinstance(args[0], Band):
        return _view(name, args, shape)
    if torch.Tag.pointwise in getattr(target, "tags", ()) or name in _ELEMENTWISE:
        return _elementwise(target, name, args, kwargs, shape)
    return None


_FILLS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "ones": lambda args: 1,
    "zeros": lambda args: 0,
    "full": lambda args: args[1],
    "ones_like": lambda args: 1,
    "zeros_like": lambda args: 0,
    "full_like": lambda args: args[1],
    "new_ones": lambda args: 1,
    "new_zeros": lambda args: 0,
    "new_full": lambda args: args[2],
}
_VIEWS = frozenset(
    {"unsqueeze", "squeeze", "expand", "view", "_unsafe_view", "reshape", "slice", "select", "transpose"}
)
_ELEMENTWISE = frozenset(
    {
        "__and__",
        "__or__",
        "__xor__",
        "_to_copy",
        "to",
        "clone",
        "alias",
        "detach",
        "contiguous",
        "lift_fresh_copy",
        "where",
    }
)
_DISTANCES = frozenset({"sub", "rsub", "lt", "le", "gt", "ge", "eq", "ne"})
"""Calls on two positions whose result depends only on their distance."""


def _triangle(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], shape: tuple[int, ...]
) -> Band | None:
    source = _as_band(args[0], shape)
    if source is None:
        return None
    diagonal = args[1] if len(args) > 1 else kwargs.get("diagonal", 0)
    kept = source.offsets <= diagonal if name == "tril" else source.offsets >= diagonal
    return replace(source, diagonals=torch.where(kept, source.diagonals, torch.zeros_like(source.diagonals)))


def _view(name: str, args: Sequence[Any], shape: tuple[int, ...]) -> Band | None:
    source = args[0]
    before = len(source.shape)
    if name == "slice":
        dim, start = (args[1] if len(args) > 1 else 0) % before, (args[2] if len(args) > 2 else 0) or 0
        step = args[4] if len(args) > 4 else 1
        return None if step != 1 else _cut(source, dim, int(start), shape)
    if name == "transpose":
        if {dim % before for dim in args[1:3]} != {before - 2, before - 1}:
            return None
        return Band(shape, source.diagonals.flip(0))
    # Dims before the last two may appear and disappear: nothing varies along them.
    if shape[-2:] != source.shape[-2:]:
        return Band(shape, source.diagonals[:1].expand(shape[-2] + shape[-1] - 1)) if source.uniform else None
    return Band(shape, source.diagonals)


def _cut(source: Band, dim: int, start: int, shape: tuple[int, ...]) -> Band | None:
    place = dim - len(source.shape)
    size = source.shape[dim]
    start = min(max(start + size if start < 0 else start, 0), size)
    first = 1 - shape[-2]
    if place == -1:
        first += start
    elif place == -2:
        first -= start
    begin = first - (1 - source.shape[-2])
    return Band(shape, source.diagonals[begin : begin + shape[-2] + shape[-1] - 1])


def _elementwise(
    target: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], shape: tuple[int, ...]
) -> Band | None:
    leaves, spec = torch.utils._pytree.tree_flatten((tuple(args), dict(kwargs)))
    # Numbers stay numbers, which determines the result's type.
    places = [
        i
        for i, v in enumerate(leaves)
        if isinstance(v, Band) or (isinstance(v, torch.Tensor) and v.dim() > 0)
    ]
    bands = [_as_band(leaves[i], shape) for i in places]
    if None in bands and name in _DISTANCES and len(places) == 2 and "alpha" not in kwargs:
        # Two positions that are compared are not bands: one varies with the query, the other with the key.
        bands = _positions([leaves[i] for i in places], shape)
    if None in bands:
        return None
    for i, band in zip(places, bands, strict=True):
        assert band is not None
        leaves[i] = band.diagonals
    args, named = torch.utils._pytree.tree_unflatten(leaves, spec)
    if "device" in named:
        named["device"] = torch.device("cpu")
    return Band(shape, target(*args, **named).expand(shape[-2] + shape[-1] - 1))


def _as_band(value: Any, shape: tuple[int, ...]) -> Band | None:
    if isinstance(value, Band):
        if value.shape[-2:] == shape[-2:]:
            return Band(shape, value.diagonals)
        return _uniform_band(value.diagonals[0], shape) if value.uniform else None
    narrow = _narrowed(value)
    return _uniform_band(narrow, shape) if narrow.numel() == 1 else None


def _narrowed(value: torch.Tensor) -> torch.Tensor:
    for dim, stride in enumerate(value.stride()):
        value = value.narrow(dim, 0, 1) if stride == 0 and value.shape[dim] > 1 else value
    return value


def _positions(operands: Sequence[Any], shape: tuple[int, ...]) -> list[Band | None]:
    """Return the positions of queries and of keys, each counted from some start, as their values on each
    diagonal.

    On the diagonal ``d``, query 0 meets key ``d``; because only distances count, that pair is sufficient.
    """
    counted = [_counted(value, shape) for value in operands]
    if {kind for kind, _ in counted} != {"queries", "keys"}:
        return [None]
    offsets = torch.arange(1 - shape[-2], shape[-1], device="cpu")
    return [
        Band(shape, (first + offsets if kind == "keys" else first.expand(len(offsets))).to(first.dtype))
        for kind, first in counted
    ]


def _counted(value: Any, shape: tuple[int, ...]) -> tuple[str, torch.Tensor]:
    nothing = ("", torch.empty(0))
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return nothing
    narrow = _narrowed(value)
    line = narrow.reshape(-1)
    if narrow.numel() == narrow.shape[-1] == shape[-1] > 1:
        kind = "keys"
    elif narrow.dim() > 1 and narrow.numel() == narrow.shape[-2] == shape[-2] > 1:
        kind = "queries"
    else:
        return nothing
    steps = line[:1] + torch.arange(len(line), dtype=line.dtype, device="cpu")
    return (kind, line[0]) if bool((line == steps).all()) else nothing
