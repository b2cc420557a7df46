"""Collectives of several parameters: what is gathered ahead together, and what of gradients is scattered
together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tensoropt.simulate.batch import Batch
from tensoropt.types import Indices

_Key = tuple[int, bool, str, str, tuple[int, ...], str]


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
        members: (strategies,) how many parameters these are.
        staying: (strategies,) bytes of those whose gradients stay where they are.
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


def coalesced(batch: Batch) -> list[Coalesced]:
    """All of a batch in the order in which they are issued: at one moment first what is waited for at once,
    then gathers before scatters, and what every micro-batch sends before what one of them does."""
    found: dict[_Key, tuple[Indices, ...]] = {}
    for stack in batch.stacks:
        for (place, kind, axes, dtype), cells in stack.kind.tables.beside.items():
            figures = [of.of(stack.used, stack.kind.tables.count).astype(np.int64) for of in cells]
            if not figures[0].any():
                continue
            only = place.when.phase if place.when.once else ""
            of_owners = [figure[stack.which] for figure in figures]
            for position, *of_owner in zip(stack.positions(place).tolist(), *of_owners, strict=True):
                key = position, place.when.at_once, only, kind, axes, dtype
                before = found.get(key, (0,) * len(of_owner))
                found[key] = tuple(a + b for a, b in zip(before, of_owner, strict=True))
    return [Coalesced(*key, *of_all) for key, of_all in sorted(found.items(), key=_issued)]


def _issued(one: tuple[_Key, object]) -> tuple[object, ...]:
    position, at_once, only, kind, axes, dtype = one[0]
    return position, not at_once, kind, only, axes, dtype
