"""Gradient buckets, each all-reduced once per step; the cost model and the executor use the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tensoropt.graph import DTYPE_BYTES
from tensoropt.ops.layouts import PARTIAL_GRAD, Layout
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.strategy import Strategy
from tensoropt.types import Indices

BUCKET_BYTES = 25 * 2**20
"""The size in bytes at which a bucket is closed, as in PyTorch's DDP."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients are all-reduced over the mesh axes ``axes`` as one flat buffer.

    ``elements`` is the length of the buffer on the rank with the largest shards.
    """

    axes: tuple[int, ...]
    dtype: str
    parameters: tuple[str, ...]
    elements: int


def reduction_axes(stored: Layout, mesh: Sequence[int]) -> tuple[int, ...]:
    """Return the mesh axes, micro-batches excluded, along which a parameter's gradient is a partial sum."""
    # Axis 0 is the micro-batch axis: contributions along it are accumulated in place, one after another, and
    # never sent.
    return tuple(a for a, c in enumerate(stored) if a > 0 and c == PARTIAL_GRAD and mesh[a] > 1)


def arrival_order(graph: GroupGraph) -> tuple[str, ...]:
    """Return the trained parameters in the order in which backward completes their gradients."""
    order = dict.fromkeys(name for name, group in graph.uses if graph.learns(name, group.name))
    tensors = graph.atoms.graph.tensors
    # Those that get their gradient only from other stages of a pipeline come last, when the step is over.
    idle = dict.fromkeys(n for n, _ in graph.uses if tensors[n].requires_grad and n not in order)
    return (*reversed(order), *idle)


def gradient_buckets(strategy: Strategy, limit_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Return a strategy's gradient buckets in the order in which backward completes them."""
    names = arrival_order(strategy.graph)
    elements = [prod(strategy.local_shape(name, strategy.stored[name])) for name in names]
    # One all-reduce has one group and one type, so there is one open bucket for each pair of these.
    pairs = [
        (reduction_axes(strategy.stored[name], strategy.mesh), strategy.tensor(name).stored_dtype)
        for name in names
    ]
    kinds = list(dict.fromkeys(pairs))
    keys = np.array([[kinds.index(pair) for pair in pairs]])
    sizes = np.array([[n * DTYPE_BYTES[dtype] for n, (_, dtype) in zip(elements, pairs, strict=True)]])
    members: dict[int, list[int]] = {}
    for gradient, number in enumerate(bucket_numbers(keys, sizes, limit_bytes)[0].tolist()):
        members.setdefault(number, []).append(gradient)
    return tuple(
        Bucket(*pairs[of[0]], tuple(names[i] for i in of), sum(elements[i] for i in of))
        for _, of in sorted(members.items())
    )


def bucket_numbers(keys: Indices, sizes: Indices, limit_bytes: int) -> Indices:
    """Return the bucket number of each gradient in each strategy, shape (strategies, gradients).

    Buckets are numbered as they reach ``limit_bytes``; those that never do come last, in the order of their
    first gradients. All ranks get equal numbers, as they must issue the same all-reduces. The code has only
    loops over numbers, so that numba can compile it.

    Args:
        keys: (strategies, gradients) numbers from 0, equal for gradients that may share a bucket; -1 if there
            is no gradient, which gets the bucket number -1.
        sizes: (strategies, gradients) sizes of the gradients in bytes.
    """
    count = keys.shape[1]
    numbers = np.full(keys.shape, -1, np.int64)
    order = np.empty(count, np.int64)
    is_open = np.empty(max(keys.max() + 1, 0) if keys.size else 0, np.int64)
    filled = np.empty(len(is_open), np.int64)
    for n in range(keys.shape[0]):
        is_open[:] = -1
        order[:] = -1
        opened = closed = 0
        for i in range(count):
            key = keys[n, i]
            if key < 0:
                continue
            if is_open[key] < 0:
                is_open[key], filled[key] = opened, 0
                opened += 1
            numbers[n, i] = is_open[key]
            filled[key] += sizes[n, i]
            if filled[key] >= limit_bytes:
                order[is_open[key]] = closed
                closed += 1
                is_open[key] = -1
        for bucket in range(opened):
            if order[bucket] < 0:
                order[bucket] = closed
                closed += 1
        for i in range(count):
            if numbers[n, i] >= 0:
                numbers[n, i] = order[numbers[n, i]]
    return numbers
