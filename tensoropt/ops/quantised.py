"""Weights of 8 or 4 bits: their encodings (schemes), and linear layers that compute with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tensoropt.errors import TensorOptError, suggest

_BLOCK = 64
"""The number of inputs that share a scale in 4-bit schemes; bitsandbytes' default."""
_GROUP = 256
"""The largest number of scales that share a scale of their own (a group); bitsandbytes' number."""
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
"""The numbers of 4-bit NormalFloat (QLoRA, appendix E)."""
_FP4 = tuple(
    sign * value / 12 for sign in (1.0, -1.0) for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
)
"""The 4-bit floats of bitsandbytes (sign, 2 exponent bits, 1 mantissa bit), divided by the largest."""
_TABLES = {"nf4": _NF4, "fp4": _FP4}
_DOUBLE = "-double"
SCHEMES = ("int8", *_TABLES, *(f"{name}{_DOUBLE}" for name in _TABLES))
_MOST_AT_ONCE = 1 << 24
"""The largest number of elements made in float32 at once, 64 MiB; an assumption."""


class Scheme(NamedTuple):
    """An encoding of a matrix as bytes.

    Attributes:
        table: the 16 numbers that 4-bit codes stand for; empty for ``int8``.
        nested: whether the scales are encoded as bytes, too.
    """

    table: tuple[float, ...]
    nested: bool

    @classmethod
    def of(cls, name: str) -> Scheme:
        """Return the scheme called ``name``; raise TensorOptError if there is none."""
        if name not in SCHEMES:
            raise TensorOptError(
                f"'{name[:40]}' is not a scheme for storing weights as bytes; {suggest(name, SCHEMES)}"
            )
        return cls(_TABLES.get(name.removesuffix(_DOUBLE), ()), name.endswith(_DOUBLE))

    @property
    def per_byte(self) -> int:
        return 2 if self.table else 1


class WeightBytes(NamedTuple):
    """A quantised matrix, or some of its rows and blocks (inputs that share a scale).

    Attributes:
        codes: ``[outputs, inputs]`` int8, or two 4-bit codes per byte in ``[outputs, inputs / 2]`` uint8.
        scales: ``[outputs]`` for int8, else ``[outputs, blocks]``, as uint8 codes if they are nested.
        nested: ``[outputs, groups]``, one scale for each group of scales.
        offset: mean of all scales, added to the decoded ones.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    nested: torch.Tensor | None = None
    offset: torch.Tensor | None = None


@lru_cache
def nested_table() -> tuple[float, ...]:
    """Return the 256 numbers that encoded scales stand for, as in bitsandbytes' ``create_dynamic_map``.

    Dettmers, *8-Bit Approximations for Parallelism in Deep Learning*, ICLR 2016.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade
        middles = (0.1 + 0.9 * (place + 0.5) / count for place in range(count))
        sizes = [10.0 ** (decade - 6) * middle for middle in middles]
        numbers += [*sizes, *(-size for size in sizes)]
    return tuple(sorted(numbers))


@lru_cache
def _pairs(table: tuple[float, ...]) -> list[list[float]]:
    return [[first, second] for first in table for second in table]


def quantised(weight: torch.Tensor, name: str) -> WeightBytes:
    """Quantise a matrix ``[outputs, inputs]``; raise TensorOptError unless blocks divide the inputs."""
    scheme, (rows, columns) = Scheme.of(name), weight.shape
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).contiguous()
    if not scheme.table:
        scales = wide.abs().amax(1).clamp(min=torch.finfo(wide.dtype).tiny) / 127
        return WeightBytes((wide / scales.unsqueeze(1)).round().to(torch.int8), scales.to(torch.float32))
    if columns % _BLOCK:
        raise TensorOptError(
            f"{name} has one scale per {_BLOCK} inputs of a row, but {columns} inputs do not divide into "
            "such blocks; take int8, or a model of other sizes"
        )
    blocks = wide.view(rows, columns // _BLOCK, _BLOCK)
    scales = blocks.abs().amax(2)
    of_blocks = scales.clamp(min=torch.finfo(wide.dtype).tiny).unsqueeze(2)
    halves = _nearest(blocks / of_blocks, scheme.table).view(rows, columns // 2, 2)
    codes = halves[..., 0] << 4 | halves[..., 1]
    if not scheme.nested:
        return WeightBytes(codes, scales.to(torch.float32))
    offset = scales.mean()
    groups = (scales - offset).view(rows, -1, math.gcd(scales.shape[1], _GROUP))
    nested = groups.abs().amax(2)
    of_groups = nested.clamp(min=torch.finfo(wide.dtype).tiny).unsqueeze(2)
    bytes_of = _nearest(groups / of_groups, nested_table()).view(scales.shape)
    return WeightBytes(codes, bytes_of, nested.to(torch.float32), offset.to(torch.float32))


def _nearest(values: torch.Tensor, table: tuple[float, ...]) -> torch.Tensor:
    numbers = torch.tensor(table, dtype=values.dtype, device=values.device)
    ordered, places = numbers.sort(stable=True)
    found = torch.bucketize(values, (ordered[1:] + ordered[:-1]) / 2)
    return places.to(torch.uint8)[found]


def _dequantised(stored: WeightBytes, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix ``[outputs, inputs]`` in ``dtype``, computed in float32 or wider and rounded once."""
    scheme, codes = Scheme.of(name), stored.codes
    rows, columns = codes.shape[0], codes.shape[1] * scheme.per_byte
    made = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    wide = torch.promote_types(dtype, torch.float32)
    for part in _parts(rows, columns):
        scales = stored.scales[part]
        if not scheme.table:
            made[part] = codes[part].to(wide).mul_(scales.to(wide).view(-1, 1))
            continue
        if stored.nested is not None:
            scales = _scales(scales, stored.nested[part], stored.offset)
        # As pairs, because a position per byte is half of one per number.
        pairs = torch.tensor(_pairs(scheme.table), dtype=wide, device=codes.device)
        numbers = pairs.index_select(0, codes[part].flatten().int()).view(*scales.shape, -1)
        made[part] = numbers.mul_(scales.to(wide).unsqueeze(-1)).view(-1, columns)
        del numbers
    return made


def _parts(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _MOST_AT_ONCE // max(columns, 1))
    return (slice(first, first + step) for first in range(0, rows, step))


def _scales(stored: torch.Tensor, nested: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
    table = torch.tensor(nested_table(), dtype=nested.dtype, device=stored.device)
    scales = table.index_select(0, stored.flatten().int()).view(*nested.shape, -1)
    scales = scales.mul_(nested.unsqueeze(-1)).view(stored.shape)
    return scales if offset is None else scales.add_(offset)


def _product(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    nested: torch.Tensor | None,
    offset: torch.Tensor | None,
    bias: torch.Tensor | None,
    scheme: str,
) -> torch.Tensor:
    weight = _dequantised(WeightBytes(codes, scales, nested, offset), scheme, x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, *stored, bias, ctx.scheme = inputs
    ctx.save_for_backward(*stored)
    ctx.dtype, ctx.dtype_of_bias = x.dtype, None if bias is None else bias.dtype


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    of_x = of_bias = None
    if ctx.needs_input_grad[0]:
        of_x = grad @ _dequantised(WeightBytes(*ctx.saved_tensors), ctx.scheme, ctx.dtype)
    if ctx.needs_input_grad[5]:
        of_bias = grad.flatten(0, -2).sum(0).to(ctx.dtype_of_bias)
    return of_x, None, None, None, None, of_bias, None


class QuantisedProduct(torch.autograd.Function):
    """``x @ weight.T + bias`` with a frozen quantised weight; forward and backward each dequantise it."""

    forward = staticmethod(_product)
    setup_context = staticmethod(_remember)
    backward = staticmethod(_gradients)


# -- as an operator of PyTorch, which an export keeps whole ------------------------------------------------

OPERATOR = "tensoropt_quantised.linear.default"
"""The name of the same product as an operator, in modules and in exported graphs."""
_NAME = "tensoropt_quantised::linear"
torch.library.define(
    _NAME,
    "(Tensor x, Tensor codes, Tensor scales, Tensor? nested, Tensor? offset, Tensor? bias, str scheme) "
    "-> Tensor",
)
torch.library.impl(_NAME, "CompositeExplicitAutograd", _product)
torch.library.register_autograd(_NAME, _gradients, setup_context=_remember)


@torch.library.register_fake(_NAME)
def _shape_of_product(x: torch.Tensor, codes: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])


class QuantisedLinear(nn.Module):
    """A linear layer with a frozen quantised weight, whose parameters are the fields of :class:`WeightBytes`.

    Args:
        bias: the layer's bias, or None.
        compute: dtype of the product; by default the input's. The result has the input's dtype.
    """

    def __init__(
        self,
        stored: WeightBytes,
        scheme: str,
        bias: nn.Parameter | None = None,
        compute: torch.dtype | None = None,
    ):
        super().__init__()
        self.scheme, self.compute = scheme, compute
        for name, value in stored._asdict().items():
            frozen = None if value is None else nn.Parameter(value, requires_grad=False)
            self.register_parameter(name, frozen)
        self.register_parameter("bias", bias)
        per_byte = Scheme.of(scheme).per_byte
        self.out_features, self.in_features = stored.codes.shape[0], stored.codes.shape[1] * per_byte

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = x if self.compute is None else x.to(self.compute)
        product: torch.Tensor = torch.ops.tensoropt_quantised.linear(
            read, self.codes, self.scales, self.nested, self.offset, self.bias, self.scheme
        )
        return product.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, scheme={self.scheme}"
