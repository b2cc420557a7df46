"""Embeddings and embedding bags: ranks that split the vocabulary compute partial sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.graph import Ref
from tensoropt.ops.calls import CostClass, LocalCall, OperatorShard, Precision, Samples, Shape, aten
from tensoropt.ops.index_space import Builder, Opaque, alike
from tensoropt.ops.kernels import ShardContext, start_of

_MEAN_OF_BAG, _MAXIMUM = 1, 2
"""Modes of ``aten.embedding_bag``; 0 is the sum."""


@alike("padding_idx sparse")
def _embedding(b: Builder) -> None:
    """Describe ``y[..., h] = sum_v [index[...] == v] w[v, h]``, in which the vocabulary is summed over."""
    w, index = b.arg(0), b.arg(1)
    vocabulary, hidden = b.tensor(w).shape
    # Scaling gradients by frequency counts over the whole batch, which no shard sees.
    alone = not b.arg(3, "scale_grad_by_freq", False)
    rows = b.loops(b.tensor(index).shape, splittable=alone)
    # Vocabulary sizes are often odd numbers (GPT-2: 50,257), so uneven cuts are allowed.
    v = b.loop("vocabulary", vocabulary, splittable=alone, uneven=True, blocks=True)
    h = b.loop("hidden", hidden)
    b.read(w, [v, h])
    b.read(index, rows)
    b.write([*rows, h])


@alike("padding_idx sparse")
def _embedding_bag(b: Builder) -> None:
    """Describe ``y[bag, h] = sum w[index, h]`` over the items of a bag (or their mean or maximum).

    The vocabulary may be split, except for maxima. Bags may be split if the offsets are constants that show
    equally long bags. Neither may be split if gradients are scaled by frequency.
    """
    w, index, offsets = b.arg(0), b.arg(1), b.arg(2)
    by_frequency, mode, factors, last = b.arg(3), b.arg(4), b.arg(6), b.arg(7)
    if any(name in b.graph.consumers or name in b.graph.outputs for name in b.op.outputs[1:]):
        raise Opaque(b.op.name)  # positions are relative to the whole batch
    vocabulary, hidden = b.tensor(w).shape
    bags, items = b.output().shape[0], b.tensor(index).shape[0]
    alike = not last and _count_by(b, offsets, items // max(bags, 1)) and items % max(bags, 1) == 0
    # Scaling gradients by frequency counts over the whole batch, which no shard sees.
    bag = b.loop("bag", bags, splittable=alike and not by_frequency, blocks=True)
    item = b.loop("item", items // max(bags, 1), splittable=False)
    contracted = mode != _MAXIMUM and not by_frequency
    v = b.loop("vocabulary", vocabulary, splittable=contracted, uneven=True, blocks=True)
    h = b.loop("hidden", hidden)
    b.read(w, [v if contracted else None, h])
    b.read(index, [(bag, item) if alike else None])
    b.read(offsets, [bag if alike else None])
    b.read(factors, [(bag, item) if alike else None])
    b.write([bag if alike else None, h])


def _count_by(b: Builder, offsets: Ref, length: int) -> bool:
    value = b.graph.constants.get(offsets.name)
    if value is None or value.is_meta:
        return False
    (size,) = b.tensor(offsets).shape
    return bool(value.expand(size).tolist() == [i * length for i in range(size)])


def _local_embedding(shard: OperatorShard, call: LocalCall) -> LocalCall:
    axes = shard.split(shard.loop_named("vocabulary"))
    if not axes:
        return call
    vocabulary = shard.atoms.graph.tensors[shard.op.inputs()[0]].shape[0]
    steps = shard.steps(vocabulary, axes)
    return LocalCall("kernels.vocabulary_embedding", call.args[:3], {}, call.name, (axes, steps))


def _local_embedding_bag(shard: OperatorShard, call: LocalCall) -> LocalCall:
    axes, bags = shard.split(shard.loop_named("vocabulary")), shard.split(shard.loop_named("bag"))
    if not axes and not bags:
        return call
    vocabulary = shard.atoms.graph.tensors[shard.op.inputs()[0]].shape[0]
    steps = shard.steps(vocabulary, axes)
    return replace(call, function="kernels.embedding_bag", static=(axes, steps, vocabulary))


def _vocabulary_embedding(
    context: ShardContext,
    name: str,
    axes: tuple[int, ...],
    steps: int | tuple[int, ...],
    weight: torch.Tensor,
    index: torch.Tensor,
    padding_idx: int = -1,
    *_: Any,
) -> torch.Tensor:
    """Look up rows in this rank's shard of the vocabulary; rows of other ranks are zeros (a partial sum).

    Args:
        axes: mesh axes that split the vocabulary.
        steps: distance in rows between the starts of shards.
    """
    start = start_of(context, axes, steps)
    # Rows of other ranks are looked up as the nearest of ours, then zeroed, so that no size depends on
    # values.
    local = index - start
    inside = (local >= 0) & (local < weight.shape[0])
    # The padding row gets no gradient on the rank that has it; the others do not know it.
    padding = padding_idx - start if 0 <= padding_idx - start < weight.shape[0] else None
    rows = F.embedding(local.clamp(0, max(weight.shape[0] - 1, 0)), weight, padding_idx=padding)
    return rows * inside.unsqueeze(-1)


def _embedding_bag_kernel(
    context: ShardContext,
    name: str,
    axes: tuple[int, ...],
    steps: int | tuple[int, ...],
    vocabulary: int,
    weight: torch.Tensor,
    index: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    factors: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute ``aten.embedding_bag`` for a shard of the bags, or a partial sum for a shard of the vocabulary.

    Args:
        axes: mesh axes that split the vocabulary; empty if only bags are split.
        steps: distance in rows between the starts of shards of the vocabulary.
        offsets: first item of each bag of the shard, counted in the whole batch.
        factors: weight of each item.
    """
    bag = torch.ops.aten.embedding_bag.padding_idx
    offsets = offsets - offsets[0]  # those of the whole batch, made relative to the first bag of the shard
    if not axes:
        options = (scale_grad_by_freq, mode, sparse, factors, include_last_offset, padding_idx)
        return bag(weight, index, offsets, *options)
    local = index - start_of(context, axes, steps)
    counted = torch.ones_like(index, dtype=weight.dtype)
    if padding_idx is not None:  # counted from the end of the whole vocabulary if negative
        counted = (index != padding_idx % vocabulary).to(weight.dtype)
    inside = counted * ((local >= 0) & (local < weight.shape[0]))
    rows = local.clamp(0, max(weight.shape[0] - 1, 0))
    inside = inside if factors is None else inside * factors
    # A sum whose weights exclude other ranks' rows and padding.
    total, *extras = bag(weight, rows, offsets, False, 0, False, inside, include_last_offset, None)
    if mode == _MEAN_OF_BAG:
        # A mean divides by the number of items in the whole bag: the same sum over a table of ones.
        ones = counted.new_ones(1, 1)
        sizes = bag(
            ones, torch.zeros_like(index), offsets, False, 0, False, counted, include_last_offset, None
        )
        total = total / sizes[0].clamp(min=1)
    return total, *extras


def _rows(args: tuple[Any, ...], shape: Shape) -> Iterator[tuple[str, tuple[int, int]]]:
    yield args[1].name, (0, shape(args[0])[0])


def _rows_of_one_bag(args: tuple[Any, ...], shape: Shape) -> Iterator[tuple[str, tuple[int, int]]]:
    yield from _rows(args, shape)
    yield args[2].name, (0, 1)


SPECS = (
    aten(
        "embedding.default",
        _embedding,
        localiser=_local_embedding,
        kernels={"kernels.vocabulary_embedding": _vocabulary_embedding},
        samples=Samples(limits=_rows),
        cost_class=CostClass.LOOKUP,
        precision=Precision.NARROW,
    ),
    aten(
        "embedding_bag.padding_idx",
        _embedding_bag,
        localiser=_local_embedding_bag,
        kernels={"kernels.embedding_bag": _embedding_bag_kernel},
        samples=Samples(limits=_rows_of_one_bag),
        cost_class=CostClass.LOOKUP,
    ),
)
