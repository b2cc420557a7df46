"""Collectives of several parameters: what is gathered ahead together, and what of gradients is scattered
together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tensoropt.simulate.batch import Batch
from tensoropt.types import Indices


@dataclass(frozen=True)
class Coalesced:
    """One collective per strategy at one moment.

    Attributes:
        at_once: it is waited for at once.
        only: ``first`` or ``last``, the only micro-batch in which it is issued; "" of one that each of them
            issues.
        position: of the moment in the step schedule.
        dtype: of what is sent.
        bytes: (strategies,) of all parameters in it; 0 where a strategy has none.
    """

    position: int
    at_once: bool
    only: str
    kind: str
    axes: tuple[int, ...]
    dtype: str
    bytes: Indices


def coalesced(batch: Batch) -> list[Coalesced]:
    """All of a batch in the order in which they are issued: at one moment first what is waited for at once,
    then gathers before scatters, and what every micro-batch sends before what one of them does."""
    found: dict[tuple[int, bool, str, str, tuple[int, ...], str], Indices] = {}
    for stack in batch.stacks:
        for (place, kind, axes, dtype), cells in stack.kind.tables.beside.items():
            sizes = cells.of(stack.used, stack.kind.tables.count).astype(np.int64)
            if not sizes.any():
                continue
            only = place.when.phase if place.when.once else ""
            for position, of_owner in zip(stack.positions(place).tolist(), sizes[stack.which], strict=True):
                key = position, place.when.at_once, only, kind, axes, dtype
                found[key] = found[key] + of_owner if key in found else of_owner
    return [Coalesced(*key, size) for key, size in sorted(found.items(), key=_issued)]


def _issued(one: tuple[tuple[int, bool, str, str, tuple[int, ...], str], Indices]) -> tuple[object, ...]:
    position, at_once, only, kind, axes, dtype = one[0]
    return position, not at_once, kind, only, axes, dtype
