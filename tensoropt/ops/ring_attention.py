"""Attention for a part of the queries: one kernel per block of keys; log-sum-exps serve to merge the results.

Every rank has all keys and values, or ranks send them around a ring (Liu et al., arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tensoropt.ops.attention_in_blocks import (
    BACKWARD,
    FORWARD,
    Block,
    Queries,
    QueryPiece,
    Stretch,
    block_kernel,
    finite,
    stretches,
)
from tensoropt.ops.calls import RING_SEND, InnerCollective, OperatorShard
from tensoropt.ops.kernels import ShardContext
from tensoropt.ops.layouts import chunk

RING_FORM = "kernels.ring_attention"
"""The name of the kernel of attention with keys and values split along with the queries."""
BLOCKS_FORM = "kernels.causal_attention_in_blocks"
"""The name of the kernel that replaces causal attention if its queries are split."""
RING = "ring"
"""The name of the loop that splits queries, keys and values along one axis."""


class Ring(NamedTuple):
    """A ring of ranks around which keys and values are sent.

    Attributes:
        axes, parts: mesh axes along which the ring lies, and the number of its ranks.
        place: for estimates, the position in the ring of a rank with the most work; None for the running
            rank's own.
        keys: for each position in the ring, (start in the sequence, length) of each run of keys there.
        rows: largest number of keys that a rank has, which determines the size of messages.
    """

    axes: tuple[int, ...]
    parts: int
    place: int | None
    keys: tuple[tuple[tuple[int, int], ...], ...]
    rows: int


def ring_of(shard: OperatorShard, axes: tuple[int, ...], *, causal: bool) -> Ring:
    """Return the ring, over the mesh axes ``axes``, of one shard of an attention operator."""
    keys = shard.space.reads[1]
    sizes = shard.atoms.atoms[keys.tensor]
    # Their outermost atom is the one that is cut.
    (size, *inner), position = sizes[-2], sum(map(len, sizes[:-2]))
    parts, width = prod(shard.mesh[axis] for axis in axes), prod(inner)
    step, known = -(-size // parts), shard.coordinate is not None
    zigzag = shard.zigzag and (keys.tensor, position) in shard.atoms.zigzag
    of_places: list[tuple[tuple[int, int], ...]] = []
    for place in range(parts):
        if zigzag:
            first, last, half = place * step // 2, (2 * parts - 1 - place) * step // 2, step // 2
            of_places.append(((first * width, half * width), (last * width, half * width)))
        else:
            # Without a coordinate all shards count as the largest, so the first ones overlap.
            largest = max(size - (parts - place) * step, 0), step
            first, length = chunk(size, parts, place) if known else largest
            of_places.append(((first * width, length * width),))
    # The last queries see the most keys, unless all ranks do equal work.
    busiest = parts - 1 if causal and not zigzag else 0
    return Ring(axes, parts, None if known else busiest, tuple(of_places), step * width)


def ring_collectives(shard: OperatorShard, ring: Ring) -> tuple[InnerCollective, ...]:
    """Return a rank's messages (keys, values, their gradients); only the last does not overlap with work."""
    elements = 0
    for operand in shard.space.reads[1:3]:
        shape = shard.shape(operand, written=False)
        elements += prod(shape) // shape[-2] * ring.rows
    size = elements * shard.atoms.graph.tensors[shard.space.reads[1].tensor].element_bytes
    share = (ring.parts - 1) / ring.parts
    forward = InnerCollective(RING_SEND, ring.axes, size, beside=share)
    backward = InnerCollective(RING_SEND, ring.axes, size, backward=True, beside=share)
    last = InnerCollective(RING_SEND, ring.axes, size, backward=True)
    return (*(forward,) * (ring.parts - 1), *(backward,) * (2 * ring.parts - 2), last)


def ring_attention(
    context: ShardContext,
    name: str,
    ring: Sequence[Any],
    pieces: Sequence[QueryPiece],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Return attention of a rank's queries over the keys of all ranks of a ring.

    Args:
        ring: data of a :class:`Ring`.
        pieces: the rank's part of each factor (atom) of the queries' dim, if ``causal``.
        q: ``[..., heads, local queries, d]``.
        k, v: ``[..., key heads, local keys, d]``; query head ``h`` reads key head ``h // (heads / key
            heads)``.
        mask: broadcasts to ``[..., heads, local queries, all keys]``; bool or additive, without gradient.
        scale: factor of the scores; by default ``1 / sqrt(d)``.
    """
    of_ranks = Ring(*ring)
    queries = stretches(context, pieces) if causal else None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    result: Tensor = _RingAttention.apply(q, k, v, mask, _Turns(context, of_ranks, queries), scale)
    return result


def causal_attention_in_blocks(
    context: ShardContext,
    name: str,
    pieces: Sequence[QueryPiece],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
) -> Tensor:
    """Return causal attention of a rank's queries over all keys, which this rank has.

    Args:
        pieces: the rank's part of each factor (atom) of the queries' dim.
        q: ``[..., heads, local queries, d]``; ``k`` and ``v`` are ``[..., key heads, all keys, d]``.
        scale: factor of the scores; by default ``1 / sqrt(d)``.
    """
    keys = k.shape[-2]
    alone = Ring((), 1, 0, (((0, keys),),), keys)
    return ring_attention(context, name, alone, pieces, q, k, v, None, True, scale)


class _Pair(NamedTuple):
    """A block of attention: some of the rank's queries and some of the keys.

    Attributes:
        rows: (first, end) of the block's queries among the rank's local queries.
        columns: (first, end) of the block's keys among the keys that the rank has in this step of the ring.
        causal: whether query ``i`` of the block sees only its first ``i + 1`` keys.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    causal: bool


class _Turns:
    """A rank's steps around the ring; in each, the rank's ``queries`` see keys of one rank: those up to their
    positions, or all of them if ``queries`` is None."""

    def __init__(self, context: ShardContext, ring: Ring, queries: Sequence[Stretch] | None):
        self.context, self.ring, self.queries = context, ring, queries
        self.place = context.coordinate(ring.axes) if ring.place is None else ring.place

    def __iter__(self) -> Iterator[int]:
        return ((self.place - step) % self.ring.parts for step in range(self.ring.parts))

    def send(self, value: Tensor) -> Callable[[], Tensor]:
        return self.context.send_around(value, self.ring.axes)

    def pairs(self, place: int, queries: int) -> Iterator[_Pair]:
        """Yield the blocks of ``queries`` local queries and the keys of the rank at ``place`` in the ring."""
        column = 0
        for position, length in self.ring.keys[place]:
            if self.queries is None:
                # No order: the queries see all of the place's keys at once.
                yield _Pair((0, queries), (0, sum(each for _, each in self.ring.keys[place])), False)
                return
            for stretch in self.queries:
                yield from _seen(stretch, Stretch(column, position, length))
            column += length

    def seen(self, mask: Tensor | None, place: int, q: Tensor) -> Tensor | None:
        if mask is None:
            return None
        if mask.shape[-1] > 1:
            parts = [mask.narrow(-1, position, length) for position, length in self.ring.keys[place]]
            mask = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if mask.dtype != torch.bool:
            # PyTorch's CPU kernel reads a float32 mask beside float64 queries as if it were float64.
            return mask.to(torch.promote_types(mask.dtype, q.dtype))
        return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))


def _seen(queries: Stretch, keys: Stretch) -> Iterator[_Pair]:
    (row, begin, length), (column, first, width) = queries, keys
    end, last = begin + length, first + width
    # Keys before the first query are seen by all of them.
    if first < begin:
        before = min(last, begin)
        yield _Pair((row, row + length), (column, column + before - first), causal=False)
    # Queries after all of these keys see all of them.
    low, high = max(first, begin), min(last, end)
    if low < high:
        columns = column + low - first, column + high - first
        yield _Pair((row + low - begin, row + high - begin), columns, causal=True)
        if high < end:
            yield _Pair((row + high - begin, row + length), columns, causal=False)


class _Message(NamedTuple):
    """The layout of one message: keys, then values, each in the memory order of its tensor."""

    keys: torch.Size
    values: torch.Size
    orders: tuple[tuple[int, ...], tuple[int, ...]]
    rows: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor, rows: int) -> _Message:
        return cls(k.shape, v.shape, (_memory_order(k), _memory_order(v)), rows)

    def zeros(self, like: Tensor) -> Tensor:
        sizes = (prod(shape) // shape[-2] * self.rows for shape in (self.keys, self.values))
        return like.new_zeros(sum(sizes))

    def parts(self, message: Tensor, length: int) -> tuple[Tensor, Tensor]:
        begin, views = 0, []
        for shape, order in zip((self.keys, self.values), self.orders, strict=True):
            local = [*shape[:-2], length, shape[-1]]
            of_rank = message.narrow(0, begin, prod(local)).view([local[dim] for dim in order])
            views.append(of_rank.permute([order.index(dim) for dim in range(len(order))]))
            begin += prod(shape) // shape[-2] * self.rows
        return views[0], views[1]


def _memory_order(value: Tensor) -> tuple[int, ...]:
    strides = value.stride()
    if 0 in strides:
        return tuple(range(value.dim()))
    return tuple(sorted(range(value.dim()), key=lambda dim: -strides[dim]))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, turns: _Turns, scale: float
    ) -> Tensor:
        kernel, message = block_kernel(q, k, v, masked=mask is not None), _Message.of(k, v, turns.ring.rows)
        states: list[Tensor] = []
        out, lse = _nothing_seen(q, v)
        # Alone, a rank reads its keys where they are.
        current = _packed(message, k, v) if turns.ring.parts > 1 else None
        for step, place in enumerate(turns):
            sent = turns.send(current) if current is not None and step < turns.ring.parts - 1 else None
            keys, values = (k, v) if current is None else message.parts(current, _length(turns, place))
            seen = turns.seen(mask, place, q)
            for pair in turns.pairs(place, q.shape[-2]):
                found, state = FORWARD[kernel](_cut(q, keys, values, seen, pair, scale))
                states += state
                rows = slice(*pair.rows)
                _merge(out[..., rows, :], lse[..., rows], found)
                del found
            del keys, values, seen
            if sent is not None:
                current, sent = sent(), None
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, lse, *states)
        ctx.kernel, ctx.message, ctx.turns, ctx.scale = kernel, message, turns, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        q, k, v, mask, out, lse, *states = ctx.saved_tensors
        turns, message, state = ctx.turns, ctx.message, iter(states)
        of_q = torch.zeros_like(q, dtype=lse.dtype)
        arrives, lse = None, finite(lse)
        current = _packed(message, k, v) if turns.ring.parts > 1 else None
        for step, place in enumerate(turns):
            sent = turns.send(current) if current is not None and step < turns.ring.parts - 1 else None
            if current is None:
                (keys, values), given = (k, v), None
                of_keys, of_values = torch.zeros_like(k), torch.zeros_like(v)
            else:
                length, given = _length(turns, place), message.zeros(k)
                keys, values = message.parts(current, length)
                of_keys, of_values = message.parts(given, length)
            seen = turns.seen(mask, place, q)
            for pair in turns.pairs(place, q.shape[-2]):
                rows, columns = slice(*pair.rows), slice(*pair.columns)
                block = out[..., rows, :], lse[..., rows].contiguous()
                seeing = _cut(q, keys, values, seen, pair, ctx.scale)
                parts = BACKWARD[ctx.kernel](grad[..., rows, :], seeing, block, state)
                of_q[..., rows, :] += parts[0]
                of_keys[..., columns, :] += parts[1]
                of_values[..., columns, :] += parts[2]
                del parts, block, seeing
            if given is None:
                return of_q.to(q.dtype), of_keys, of_values, None, None, None
            del keys, values, of_keys, of_values, seen
            if arrives is not None:
                given += arrives()
                arrives = None  # frees the buffers of the finished message
            arrives = turns.send(given)
            del given
            if sent is not None:
                current, sent = sent(), None
        del current
        assert arrives is not None
        of_keys, of_values = message.parts(arrives(), k.shape[-2])
        return of_q.to(q.dtype), of_keys, of_values, None, None, None


def _length(turns: _Turns, place: int) -> int:
    return sum(length for _, length in turns.ring.keys[place])


def _packed(message: _Message, k: Tensor, v: Tensor) -> Tensor:
    packed = message.zeros(k)
    for part, own in zip(message.parts(packed, k.shape[-2]), (k, v), strict=True):
        part.copy_(own)
    return packed


def _cut(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, pair: _Pair, scale: float) -> Queries:
    rows, columns = slice(*pair.rows), slice(*pair.columns)
    if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    return Queries(q[..., rows, :], k[..., columns, :], v[..., columns, :], mask, pair.causal, scale)


def _nothing_seen(q: Tensor, v: Tensor) -> Block:
    """Return (zeros, log-sum-exps of -inf), in float32 or wider and in the memory order of fused kernels."""
    wide = torch.promote_types(q.dtype, torch.float32)
    *lead, heads, queries = q.shape[:-1]
    out = q.new_zeros((*lead, queries, heads, v.shape[-1]), dtype=wide).transpose(-3, -2)
    return out, q.new_full(q.shape[:-1], float("-inf"), dtype=wide)


def _merge(out: Tensor, lse: Tensor, block: Block) -> None:
    """Merge attention over another block of keys into the output and log-sum-exp so far, in place."""
    total = torch.logaddexp(lse, block[1])
    least = finite(total)
    out.mul_((lse - least).exp_().unsqueeze(-1))
    out.add_(block[0] * (block[1] - least).exp_().unsqueeze(-1))
    lse.copy_(total)
