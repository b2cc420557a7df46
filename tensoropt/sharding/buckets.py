"""Gradient buckets: which gradients are reduced together, once per step.

Cost tables and executor both take the buckets from here, so that what is predicted is what is issued.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tensoropt.sharding.placement import PARTIAL_GRAD
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


def reduction_axes(strategy: Strategy, parameter: str) -> tuple[int, ...]:
    """Real axes over which a stored parameter's gradient is a partial sum."""
    layout = strategy.stored[parameter]
    return tuple(a for a, c in enumerate(layout) if a > 0 and c == PARTIAL_GRAD and strategy.mesh[a] > 1)


def gradient_buckets(strategy: Strategy, limit_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Buckets in the order in which backward completes them: last used parameter first."""
    order = [n for g in strategy.graph.groups for n in (*g.parameters, *g.shared)]
    open_buckets: dict[tuple[tuple[int, ...], str], list[tuple[str, int]]] = {}
    done: list[Bucket] = []

    def close(key: tuple[tuple[int, ...], str]) -> None:
        items = open_buckets.pop(key)
        done.append(Bucket(*key, tuple(n for n, _ in items), sum(count for _, count in items)))

    for name in dict.fromkeys(reversed(order)):
        tensor = strategy.tensor(name)
        if not tensor.requires_grad:
            continue
        key = (reduction_axes(strategy, name), tensor.dtype)
        elements = prod(strategy.local_shape(name, strategy.stored[name]))
        items = open_buckets.setdefault(key, [])
        items.append((name, elements))
        if sum(count for _, count in items) * tensor.element_bytes >= limit_bytes:
            close(key)
    for key in list(open_buckets):
        close(key)
    return tuple(done)
