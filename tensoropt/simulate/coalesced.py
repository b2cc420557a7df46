"""Collectives of several parameters: what is gathered ahead together, and what of gradients is scattered
together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tensoropt.simulate.batch import Batch
from tensoropt.types import Indices


@dataclass(frozen=True)
class Coalesced:
    """One collective per strategy at one moment, in every micro-batch.

    Attributes:
        position: of the moment in the step schedule.
        dtype: of what is sent.
        bytes: (strategies,) of all parameters in it; 0 where a strategy has none.
    """

    position: int
    kind: str
    axes: tuple[int, ...]
    dtype: str
    bytes: Indices


def coalesced(batch: Batch) -> list[Coalesced]:
    """All of a batch in the order in which they are issued: at one moment gathers before scatters."""
    found: dict[tuple[int, str, tuple[int, ...], str], Indices] = {}
    for stack in batch.stacks:
        for (place, kind, axes, dtype), cells in stack.kind.tables.beside.items():
            sizes = cells.of(stack.used, stack.kind.tables.count).astype(np.int64)
            if not sizes.any():
                continue
            for position, of_owner in zip(stack.positions(place).tolist(), sizes[stack.which], strict=True):
                key = position, kind, axes, dtype
                found[key] = found[key] + of_owner if key in found else of_owner
    return [Coalesced(*key, size) for key, size in sorted(found.items(), key=lambda one: one[0])]
