"""Attention in blocks: which queries a rank has, and kernels for some queries over some keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.overrides import handle_torch_function, has_torch_function

from tensoropt.ops.calls import OperatorShard
from tensoropt.ops.index_space import Operand
from tensoropt.ops.kernels import ShardContext
from tensoropt.ops.layouts import chunk, flat_index

_aten: Any = torch.ops.aten
Block = tuple[torch.Tensor, torch.Tensor]
"""Output ``[..., heads, queries, d]`` and log-sum-exp ``[..., heads, queries]`` of queries over some keys."""


class QueryPiece(NamedTuple):
    """One rank's part of one factor (atom) of the queries' dim, to locate its queries in the sequence.

    A query's position is a sum over the factors. Its local index ``i`` along this factor adds ``(first + i) *
    stride``, where ``first = start + coordinate(axes) * step``. In zig-zag order (two chunks per rank), the
    rank's second chunk begins at ``mirror - first``.
    """

    size: int
    stride: int
    start: int
    step: int
    axes: tuple[int, ...]
    mirror: int | None = None


def query_pieces(shard: OperatorShard, output: Operand) -> tuple[QueryPiece, ...]:
    """Return the rank's part of each factor (atom) of the queries' dim, dim -2 of ``output``. A shard without
    a coordinate stands for a rank with the most work."""
    sizes = shard.atoms.atoms[output.tensor][-2]
    before = sum(len(dim) for dim in shard.atoms.atoms[output.tensor][:-2])
    layout = shard.layout(output, written=True)
    pieces = []
    for position, size in enumerate(sizes):
        axes = tuple(a for a, c in enumerate(layout) if c == before + position and shard.mesh[a] > 1)
        parts = prod(shard.mesh[a] for a in axes)
        step, stride = -(-size // parts), prod(sizes[position + 1 :])
        if not axes:
            pieces.append(QueryPiece(size, stride, 0, 0, ()))
        elif shard.zigzag and (output.tensor, before + position) in shard.atoms.zigzag:
            # All ranks do equal work: without a coordinate, take the first one.
            known, half = shard.coordinate is not None, step // 2
            shift, along = (half, axes) if known else (0, ())
            pieces.append(QueryPiece(step, stride, 0, shift, along, (2 * parts - 1) * half))
        elif shard.coordinate is None:
            pieces.append(QueryPiece(step, stride, size - step, 0, ()))
        else:
            index = flat_index(shard.mesh, shard.coordinate, axes)
            pieces.append(QueryPiece(chunk(size, parts, index)[1], stride, 0, step, axes))
    return tuple(pieces)


class Stretch(NamedTuple):
    """A run of ``length`` local rows, from row ``first``, that begins at ``position`` in the sequence."""

    first: int
    position: int
    length: int


def stretches(context: ShardContext, pieces: Sequence[QueryPiece]) -> list[Stretch]:
    """Return the runs of consecutive queries that a rank has, in the order of its local rows."""
    starts = [p.start + (context.coordinate(p.axes) * p.step if p.axes else 0) for p in pieces]
    outer, *inner = pieces
    if outer.mirror is None:
        return list(_contiguous(0, pieces, starts))
    # Only the outermost atom comes in zig-zag order.
    half = [outer._replace(size=outer.size // 2), *inner]
    behind = half[0].size * prod(piece.size for piece in inner)
    ends = [outer.mirror - starts[0], *starts[1:]]
    return [*_contiguous(0, half, starts), *_contiguous(behind, half, ends)]


def _contiguous(row: int, pieces: Sequence[QueryPiece], starts: Sequence[int]) -> Iterator[Stretch]:
    """Yield runs of consecutive queries, whose local rows are numbered from ``row``. ``starts`` has the first
    index along the factor (atom) of each piece."""
    # Positions follow one another within the innermost pieces that are whole, and one piece outside them.
    inner, extents = len(pieces) - 1, [piece.size * piece.stride for piece in pieces]
    while inner > 0 and not starts[inner] and extents[inner] == pieces[inner - 1].stride:
        inner -= 1
    length = prod(p.size for p in pieces[inner:])
    for outer in product(*(range(p.size) for p in pieces[:inner])):
        place = sum((starts[j] + i) * pieces[j].stride for j, i in enumerate(outer))
        yield Stretch(row, place + starts[inner] * pieces[inner].stride, length)
        row += length


# -- kernels of one block ---------------------------------------------------------------------------

_CPU_FLASH, _CUDA_FLASH, _BY_PRODUCTS = "flash on CPU", "flash on CUDA", "products"


def block_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, device_type: str | None = None, *, masked: bool = False
) -> str:
    """Return the name of a block's kernel: the device's flash kernel if possible, else matrix products.

    CUDA's flash kernel takes 16-bit types, head sizes up to 256 that are multiples of 8, and no mask.

    Args:
        device_type: type of the device that will run the kernel; by default the device of ``q``.
    """
    if has_torch_function((q, k, v)):
        kernel: str = handle_torch_function(block_kernel, (q, k, v), q, k, v, device_type, masked=masked)
        return kernel
    size = q.shape[-1]
    alike = q.dim() == 4 and size == v.shape[-1] and q.dtype == k.dtype == v.dtype
    if not alike or 0 in q.shape or any(t.stride(-1) != 1 for t in (q, k, v)):
        return _BY_PRODUCTS
    device_type = device_type or q.device.type
    if device_type == "cpu":
        return _CPU_FLASH
    fits = q.dtype in (torch.float16, torch.bfloat16) and size <= 256 and size % 8 == 0
    return _CUDA_FLASH if device_type == "cuda" and fits and not masked else _BY_PRODUCTS


class Queries(NamedTuple):
    """The operands of attention for one block: queries, the keys and values that they see, mask and scale.

    Attributes:
        mask: tensor that is added to the scores and broadcasts to them, in the queries' dtype or wider.
        causal: whether query ``i`` sees only the first ``i + 1`` keys.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    scale: float

    @property
    def for_flash(self) -> torch.Tensor | None:
        """The mask expanded to four dims, as flash kernels take it."""
        if self.mask is None:
            return None
        shape = (1,) * (4 - self.mask.dim()) + self.mask.shape
        return self.mask.view(shape).expand(-1, -1, self.q.shape[-2], self.k.shape[-2])


_Found = tuple[Block, Sequence[torch.Tensor]]
"""A block, and the other tensors that its kernel's backward needs."""
_Gradients = Sequence[torch.Tensor]


def _flash_on_cpu(of: Queries) -> _Found:
    flash = _aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(of.q, of.k, of.v, 0.0, of.causal, attn_mask=of.for_flash, scale=of.scale)
    if of.mask is not None:
        # The kernel says 0 for a query that sees no key of the block.
        lse = lse.masked_fill((of.mask == float("-inf")).all(-1), float("-inf"))
    return (out, lse), ()


def _flash_on_cpu_backward(grad: torch.Tensor, of: Queries, block: Block, _: Any) -> _Gradients:
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients: _Gradients = backward(
        grad, of.q, of.k, of.v, *block, 0.0, of.causal, attn_mask=of.for_flash, scale=of.scale
    )
    return gradients


def _flash_on_cuda(of: Queries) -> _Found:
    out, lse, *_, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
        of.q, of.k, of.v, 0.0, of.causal, scale=of.scale
    )
    # Backward takes the state of random numbers, which it does not read without dropout.
    return (out, lse), (seed, offset)


def _flash_on_cuda_backward(grad: torch.Tensor, of: Queries, block: Block, states: Any) -> _Gradients:
    backward, sizes = _aten._scaled_dot_product_flash_attention_backward, (of.q.shape[-2], of.k.shape[-2])
    seed, offset = next(states), next(states)
    gradients: _Gradients = backward(
        grad, of.q, of.k, of.v, *block, None, None, *sizes, 0.0, of.causal, seed, offset, scale=of.scale
    )
    return gradients


def _scores(of: Queries) -> torch.Tensor:
    scores = (of.q * of.scale) @ _for_heads(of.k, of.q).transpose(-2, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if of.mask is not None:
        scores = scores + of.mask
    if of.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=of.q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def finite(lse: torch.Tensor) -> torch.Tensor:
    """Replace -inf with 0 in log-sum-exps; -inf belongs to queries that see no key."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _for_heads(keys: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    group = q.shape[-3] // keys.shape[-3]
    return keys if group == 1 else keys.repeat_interleave(group, -3)


def _by_products(of: Queries) -> _Found:
    scores = _scores(of)
    lse = scores.logsumexp(-1)
    weights = (scores - (lse if of.mask is None else finite(lse)).unsqueeze(-1)).exp_().to(of.v.dtype)
    return (weights @ _for_heads(of.v, of.q), lse), ()


def _by_products_backward(grad: torch.Tensor, of: Queries, block: Block, _: Any) -> _Gradients:
    out, lse = block
    weights = (_scores(of) - lse.unsqueeze(-1)).exp_()
    of_v = weights.to(of.v.dtype).transpose(-2, -1) @ grad
    of_weights = (grad @ _for_heads(of.v, of.q).transpose(-2, -1)).to(weights.dtype)
    # The derivative of softmax; rows of the merged weights sum to one, those of a block's to less.
    of_rows = (grad * out).sum(-1, keepdim=True, dtype=weights.dtype)
    of_scores = (weights * (of_weights - of_rows) * of.scale).to(of.q.dtype)
    of_q, of_k = of_scores @ _for_heads(of.k, of.q), of_scores.transpose(-2, -1) @ of.q
    return of_q, _summed(of_k, of.k), _summed(of_v, of.v)


def _summed(gradient: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    heads = keys.shape[-3]
    if gradient.shape[-3] == heads:
        return gradient
    return gradient.unflatten(-3, (heads, -1)).sum(-3)


FORWARD = {_CPU_FLASH: _flash_on_cpu, _CUDA_FLASH: _flash_on_cuda, _BY_PRODUCTS: _by_products}
BACKWARD = {
    _CPU_FLASH: _flash_on_cpu_backward,
    _CUDA_FLASH: _flash_on_cuda_backward,
    _BY_PRODUCTS: _by_products_backward,
}
