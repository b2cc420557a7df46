"""Gradient buckets: which gradients are reduced together, once per step.

Cost tables and executor both take the buckets from here, so that what is predicted is what is issued.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from tensoropt.graph import DTYPE_BYTES
from tensoropt.ops.layouts import PARTIAL_GRAD, Layout
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.storage import Storage
from tensoropt.sharding.strategy import Strategy

BUCKET_BYTES = 25 * 2**20
"""Size at which a bucket is closed, as in PyTorch's DDP."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients lie in one flat buffer and are all-reduced over the same axes.

    ``axes`` is empty for gradients that need no reduction. ``elements`` is for one rank's largest shard.
    """

    axes: tuple[int, ...]
    dtype: str
    parameters: tuple[str, ...]
    elements: int


def reduction_axes(stored: Layout, mesh: Sequence[int]) -> tuple[int, ...]:
    """Real axes over which the gradient of a parameter stored so is a partial sum."""
    # Axis 0 is the micro-batches: what they contribute is added up in place, one after the other, and never
    # sent.
    return tuple(a for a, c in enumerate(stored) if a > 0 and c == PARTIAL_GRAD and mesh[a] > 1)


def copies_gradient(stored: Layout, mesh: Sequence[int]) -> bool:
    """Whether the gradient of a parameter stored so is copied to where it waits for the optimizer.

    To a bucket that is reduced, or from beside an unsharded copy; any other stays where autograd made it.
    """
    return Storage.of(stored).reduced_last or bool(reduction_axes(stored, mesh))


def arrival_order(graph: GroupGraph) -> tuple[str, ...]:
    """Trained parameters in the order in which backward completes their gradients.

    One with several users (a tied embedding) is complete after the first user's backward, which comes last.
    """
    order = dict.fromkeys(n for g in graph.groups for n in (*g.parameters, *g.shared))
    tensors = graph.atoms.graph.tensors
    return tuple(n for n in reversed(order) if tensors[n].requires_grad)


def gradient_buckets(strategy: Strategy, limit_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Buckets in the order in which backward completes them."""
    gradients = []
    for name in arrival_order(strategy.graph):
        stored = strategy.stored[name]
        elements = prod(strategy.local_shape(name, stored))
        axes = reduction_axes(stored, strategy.mesh)
        gradients.append((name, axes, strategy.tensor(name).stored_dtype, elements))
    return fill_buckets(gradients, limit_bytes)


def fill_buckets(
    gradients: Iterable[tuple[str, tuple[int, ...], str, int]], limit_bytes: int = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Buckets of gradients given in the order in which they arrive, as (parameter, axes, dtype, elements)."""
    # One all-reduce has one group and one type, so there is one open bucket for each pair of them.
    open_buckets: dict[tuple[tuple[int, ...], str], list[str]] = {}
    counts: dict[tuple[tuple[int, ...], str], int] = {}
    done: list[Bucket] = []

    def close(key: tuple[tuple[int, ...], str]) -> None:
        done.append(Bucket(*key, tuple(open_buckets.pop(key)), counts.pop(key)))

    for name, axes, dtype, elements in gradients:
        key = axes, dtype
        open_buckets.setdefault(key, []).append(name)
        counts[key] = counts.get(key, 0) + elements
        if counts[key] * DTYPE_BYTES[dtype] >= limit_bytes:
            close(key)
    # In the order in which they were opened. All ranks compute the same list, as they have to issue the same
    # collectives in the same order.
    for key in list(open_buckets):
        close(key)
    return tuple(done)
