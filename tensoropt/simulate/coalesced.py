"""Collectives of several parameters: parameters gathered ahead together, and gradients scattered together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tensoropt.simulate.batch import Batch
from tensoropt.types import Indices

_Key = tuple[int, bool, str, str, tuple[int, ...], str]


@dataclass(frozen=True)
class _Coalesced:
    """One collective per strategy at one moment.

    Attributes:
        at_once: whether it is waited for at once.
        only: ``first`` or ``last``, the only micro-batch in which it is issued; "" if every micro-batch
            issues it.
        position: the position of the moment in the step schedule.
        dtype: the dtype of what is sent.
        bytes: (strategies,) the bytes of all parameters in it; 0 if a strategy has none.
        members: (strategies,) the number of these parameters.
        staying: (strategies,) the bytes of those whose gradients stay where they are.
    """

    position: int
    at_once: bool
    only: str
    kind: str
    axes: tuple[int, ...]
    dtype: str
    bytes: Indices
    members: Indices
    staying: Indices


def coalesced(batch: Batch) -> list[_Coalesced]:
    """Return all coalesced collectives of a batch in issue order: at one moment, first those that are waited
    for at once, then gathers before scatters, and those of every micro-batch before those of a single one."""
    totals: dict[_Key, tuple[Indices, ...]] = {}
    for stack in batch.stacks:
        for (place, kind, axes, dtype), cells in stack.kind.tables.beside.items():
            figures = [of.of(stack.used, stack.kind.tables.count).astype(np.int64) for of in cells]
            if not figures[0].any():
                continue
            only = place.when.phase if place.when.once else ""
            of_owners = [figure[stack.which] for figure in figures]
            for position, *of_owner in zip(stack.positions(place).tolist(), *of_owners, strict=True):
                key = position, place.when.at_once, only, kind, axes, dtype
                before = totals.get(key, (0,) * len(of_owner))
                totals[key] = tuple(a + b for a, b in zip(before, of_owner, strict=True))
    return [_Coalesced(*key, *of_all) for key, of_all in sorted(totals.items(), key=_issued)]


def _issued(item: tuple[_Key, object]) -> tuple[object, ...]:
    position, at_once, only, kind, axes, dtype = item[0]
    return position, not at_once, kind, only, axes, dtype
