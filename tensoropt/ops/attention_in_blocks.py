"""Causal attention of a part of the queries: one kernel per block of keys, merged by log-sum-exps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from tensoropt.ops.calls import OperatorShard
from tensoropt.ops.index_space import Operand
from tensoropt.ops.kernels import ShardContext
from tensoropt.ops.layouts import chunk, flat_index

BLOCKS_FORM = "kernels.causal_attention_in_blocks"
"""The kernel that replaces causal attention if its queries are split."""

_aten: Any = torch.ops.aten
Block = tuple[torch.Tensor, torch.Tensor]
"""Output ``[..., heads, queries, d]`` and log-sum-exp ``[..., heads, queries]`` of queries over some keys."""


class QueryPiece(NamedTuple):
    """One rank's part of one atom of the queries' dim.

    Element ``i`` is query ``(first + i) * stride``, where ``first = start + coordinate(axes) * step``; in
    zig-zag order the second half begins at ``mirror - first``.
    """

    size: int
    stride: int
    start: int
    step: int
    axes: tuple[int, ...]
    mirror: int | None = None


def query_pieces(shard: OperatorShard, output: Operand) -> tuple[QueryPiece, ...]:
    """Return a rank's part of each atom of the queries, dim -2 of ``output``; by default the last rank's."""
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


class _Keys(NamedTuple):
    """Keys ``first`` to ``end - 1``; causal: query ``i`` of the run sees only the first ``i + 1`` of them."""

    first: int
    end: int
    causal: bool


class _Run(NamedTuple):
    """Consecutive local queries ``first`` to ``end - 1``, and the keys they see."""

    first: int
    end: int
    keys: tuple[_Keys, ...]


class Stretch(NamedTuple):
    """``length`` consecutive local rows from ``first`` on, at ``position`` of the sequence."""

    first: int
    position: int
    length: int


def stretches(context: ShardContext, pieces: Sequence[QueryPiece]) -> list[Stretch]:
    """Return a rank's stretches of queries in the order of its rows."""
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
    """Yield the stretches of the local queries from ``row`` on, which begin at ``starts``."""
    # Positions follow one another within the innermost pieces that are whole, and one piece outside them.
    inner = len(pieces) - 1
    while inner > 0 and not starts[inner] and pieces[inner].size == _extent(pieces, inner):
        inner -= 1
    length = prod(p.size for p in pieces[inner:])
    for outer in product(*(range(p.size) for p in pieces[:inner])):
        place = sum((starts[j] + i) * pieces[j].stride for j, i in enumerate(outer))
        yield Stretch(row, place + starts[inner] * pieces[inner].stride, length)
        row += length


def _extent(pieces: Sequence[QueryPiece], place: int) -> int:
    return pieces[place - 1].stride // pieces[place].stride


def _runs(context: ShardContext, pieces: Sequence[QueryPiece], keys: int) -> tuple[_Run, ...]:
    runs = []
    for first, position, length in stretches(context, pieces):
        growing = min(max(keys - position, 0), length)
        if growing:
            before = (_Keys(0, position, causal=False),) if position else ()
            own = _Keys(position, position + growing, causal=True)
            runs.append(_Run(first, first + growing, (*before, own)))
        if growing < length:
            runs.append(_Run(first + growing, first + length, (_Keys(0, keys, causal=False),)))
    return tuple(runs)


def causal_attention_in_blocks(
    context: ShardContext,
    name: str,
    pieces: Sequence[QueryPiece],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Return causal attention of a rank's queries over all keys.

    Args:
        pieces: the rank's part of each atom of the queries' dim (:func:`query_pieces`).
        q: ``[..., heads, local queries, d]``.
        k, v: ``[..., key heads, keys, d]``; query head ``h`` reads key head ``h // (heads / key heads)``.
        scale: by default ``1 / sqrt(d)``.
    """
    runs = _runs(context, pieces, k.shape[-2])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    result: torch.Tensor = _AttentionInBlocks.apply(q, k, v, runs, scale)
    return result


class _AttentionInBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: tuple[_Run, ...], scale: float
    ) -> torch.Tensor:
        kernel = block_kernel(q, k, v)
        states: list[torch.Tensor] = []
        merged = []
        for run in runs:
            found: Block | None = None
            for keys in run.keys:
                block, state = FORWARD[kernel](*_cut(q, k, v, run, keys), None, keys.causal, scale)
                states += state
                found = block if found is None else _merged(found, block)
            assert found is not None
            merged.append(found)
        out, lse = _joined(merged, q, v)
        ctx.save_for_backward(q, k, v, out, lse, *states)
        ctx.kernel, ctx.runs, ctx.scale = kernel, runs, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        q, k, v, out, lse, *states = ctx.saved_tensors
        of_q, of_k, of_v = (torch.zeros_like(t) for t in (q, k, v))
        state = iter(states)
        for run in ctx.runs:
            rows = slice(run.first, run.end)
            merged = out[..., rows, :], lse[..., rows].contiguous()
            for keys in run.keys:
                columns = slice(keys.first, keys.end)
                parts = BACKWARD[ctx.kernel](
                    grad[..., rows, :],
                    *_cut(q, k, v, run, keys),
                    *merged,
                    None,
                    keys.causal,
                    ctx.scale,
                    state,
                )
                of_q[..., rows, :] += parts[0]
                of_k[..., columns, :] += parts[1]
                of_v[..., columns, :] += parts[2]
                del parts
        return of_q, of_k, of_v, None, None


def _cut(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: _Run, keys: _Keys
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_keys = slice(keys.first, keys.end)
    return q[..., run.first : run.end, :], k[..., of_keys, :], v[..., of_keys, :]


def _merged(one: Block, other: Block) -> Block:
    lse = torch.logaddexp(one[1], other[1])
    # In the precision of the log-sum-exps, at least float32.
    out, more = (part * (of - lse).exp_().unsqueeze(-1) for part, of in (one, other))
    return out.add_(more).to(one[0].dtype), lse


def _joined(blocks: Sequence[Block], q: torch.Tensor, v: torch.Tensor) -> Block:
    """Concatenate the blocks of several runs, in the memory order of fused kernels: heads inside queries."""
    if len(blocks) == 1:
        return blocks[0]
    if not blocks:
        return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1])
    out = torch.cat([out.transpose(-3, -2) for out, _ in blocks], -3).transpose(-3, -2)
    return out, torch.cat([lse for _, lse in blocks], -1)


# -- kernels of one block ---------------------------------------------------------------------------

_Mask = torch.Tensor | None
"""Added to the scores of a block, in the queries' dtype or wider; broadcasts to them."""
_CPU_FLASH, _CUDA_FLASH, _BY_PRODUCTS = "flash on CPU", "flash on CUDA", "products"


def block_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    device_type: str | None = None,
    *,
    masked: bool = False,
) -> str:
    """Return the kernel of one block: the device's flash kernel, or products where that does not apply.

    On CUDA it takes 16-bit types, heads of up to 256 in multiples of 8, and no mask.

    Args:
        device_type: the device type of the run, for fake tensors; by default the tensors'.
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


def _flash_on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: _Mask, causal: bool, scale: float
) -> tuple[Block, Sequence[torch.Tensor]]:
    flash = _aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q, k, v, 0.0, causal, attn_mask=_for_flash(mask, q, k), scale=scale)
    if mask is not None:
        # The kernel says 0 for a query that sees no key of the block.
        lse = lse.masked_fill((mask == float("-inf")).all(-1), float("-inf"))
    return (out, lse), ()


def _flash_on_cpu_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: _Mask,
    causal: bool,
    scale: float,
    _: Any,
) -> Sequence[torch.Tensor]:
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    mask = _for_flash(mask, q, k)
    gradients: Sequence[torch.Tensor] = backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    return gradients


def _for_flash(mask: _Mask, q: torch.Tensor, k: torch.Tensor) -> _Mask:
    if mask is None:
        return None
    return mask.view((1,) * (4 - mask.dim()) + mask.shape).expand(-1, -1, q.shape[-2], k.shape[-2])


def _flash_on_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: _Mask, causal: bool, scale: float
) -> tuple[Block, Sequence[torch.Tensor]]:
    out, lse, *_, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, scale=scale
    )
    # Backward takes the state of random numbers, which it does not read without dropout.
    return (out, lse), (seed, offset)


def _flash_on_cuda_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: _Mask,
    causal: bool,
    scale: float,
    states: Any,
) -> Sequence[torch.Tensor]:
    backward, sizes = _aten._scaled_dot_product_flash_attention_backward, (q.shape[-2], k.shape[-2])
    seed, offset = next(states), next(states)
    gradients: Sequence[torch.Tensor] = backward(
        grad, q, k, v, out, lse, None, None, *sizes, 0.0, causal, seed, offset, scale=scale
    )
    return gradients


def _scores(q: torch.Tensor, k: torch.Tensor, mask: _Mask, causal: bool, scale: float) -> torch.Tensor:
    scores = (q * scale) @ _for_heads(k, q).transpose(-2, -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        scores = scores + mask
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def finite(lse: torch.Tensor) -> torch.Tensor:
    """Return log-sum-exps with 0 for queries that see nothing."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _for_heads(keys: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    group = q.shape[-3] // keys.shape[-3]
    return keys if group == 1 else keys.repeat_interleave(group, -3)


def _by_products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: _Mask, causal: bool, scale: float
) -> tuple[Block, Sequence[torch.Tensor]]:
    scores = _scores(q, k, mask, causal, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - (lse if mask is None else finite(lse)).unsqueeze(-1)).exp_().to(v.dtype)
    return (weights @ _for_heads(v, q), lse), ()


def _by_products_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: _Mask,
    causal: bool,
    scale: float,
    _: Any,
) -> Sequence[torch.Tensor]:
    weights = (_scores(q, k, mask, causal, scale) - lse.unsqueeze(-1)).exp_()
    of_v = weights.to(v.dtype).transpose(-2, -1) @ grad
    of_weights = (grad @ _for_heads(v, q).transpose(-2, -1)).to(weights.dtype)
    # The derivative of softmax; rows of the merged weights sum to one, those of a block's to less.
    of_rows = (grad * out).sum(-1, keepdim=True, dtype=weights.dtype)
    of_scores = (weights * (of_weights - of_rows) * scale).to(q.dtype)
    of_q, of_k = of_scores @ _for_heads(k, q), of_scores.transpose(-2, -1) @ q
    return of_q, _summed(of_k, k), _summed(of_v, v)


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
