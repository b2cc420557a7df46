"""Reductions of gradients: buckets of shares that arrive one after the other in backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tensoropt.costs.effects import GradientShare
from tensoropt.costs.prices import Send
from tensoropt.graph import DTYPE_BYTES
from tensoropt.sharding.buckets import arrival_order, fill_buckets
from tensoropt.simulate.batch import Batch
from tensoropt.types import Indices


@dataclass(frozen=True)
class Reductions:
    """Reductions of gradients issued at one position of the step schedule.

    Attributes:
        position: after which; the one after backward when several micro-batches have to be over.
        rows: the strategies that issue one here.
        sends: the distinct ones.
        which: per row its number in ``sends``.
    """

    position: int
    rows: Indices
    sends: tuple[Send, ...]
    which: Indices


class _Arriving(NamedTuple):
    """Parameters whose gradients are reduced with others in some strategy, as backward completes them.

    Attributes:
        names: the parameters.
        positions: after which backward completes each one's gradient.
        shares: the distinct ones, and None.
        which: (parameters, strategies) which of these each has.
    """

    names: list[str]
    positions: dict[str, int]
    shares: list[GradientShare | None]
    which: Indices


def reductions(batch: Batch) -> list[Reductions]:
    """All reductions of a batch in the order in which they are issued."""
    arriving = _arriving(batch)
    if arriving is None:
        return []
    # Buckets are filled across parameters, so they are worked out per distinct combination of all shares.
    firsts, which = np.unique(arriving.which, axis=1, return_index=True, return_inverse=True)[1:]
    rows: dict[tuple[int, int], dict[int, Send]] = {}
    for number, row in enumerate(firsts):
        places: dict[int, int] = {}
        for position, send in _buckets(batch, arriving, int(row)):
            # Several buckets may be complete at one position; the n-th ones of all strategies are issued
            # together.
            place = places[position] = places.get(position, -1) + 1
            rows.setdefault((position, place), {})[number] = send
    result = []
    for (position, _), sends in sorted(rows.items(), key=lambda item: item[0]):
        table = np.full(len(firsts), -1, dtype=np.int64)
        table[list(sends)] = np.arange(len(sends))
        chosen = table[which.reshape(-1)]
        concerned = np.flatnonzero(chosen >= 0)
        result.append(Reductions(position, concerned, tuple(sends.values()), chosen[concerned]))
    return result


def reductions_of(batch: Batch, row: int) -> list[Send]:
    """The reductions of one strategy, in the order in which they are issued."""
    arriving = _arriving(batch)
    return [] if arriving is None else [send for _, send in _buckets(batch, arriving, row)]


def _arriving(batch: Batch) -> _Arriving | None:
    """The gradients that are reduced with others; None where none is."""
    if not batch.prices.training:
        return None
    numbers: dict[GradientShare | None, int] = {None: 0}
    found: dict[str, Indices] = {}
    for stack in batch.stacks:
        if stack.owners[0].where[0] != "parameter":
            continue
        of_used = [stack.kind.tables.shares[number] for number in stack.used.tolist()]
        if any(share is not None for share in of_used):
            table = np.array([numbers.setdefault(share, len(numbers)) for share in of_used])
            found.update((one.where[1], table[w]) for one, w in zip(stack.owners, stack.which, strict=True))
    if not found:
        return None
    names = [name for name in arrival_order(batch.graph) if name in found]
    # users[name][0] is the first user in forward, and so the last to give its part of the gradient.
    users, position = batch.schedule.users, batch.schedule.position
    positions = {name: position("backward", "parameters", users[name][0]) for name in names}
    return _Arriving(names, positions, list(numbers), np.stack([found[name] for name in names]))


def _buckets(batch: Batch, arriving: _Arriving, row: int) -> list[tuple[int, Send]]:
    """(position, collective) of one strategy's buckets."""
    chosen = [arriving.shares[number] for number in arriving.which[:, row].tolist()]
    given = zip(arriving.names, chosen, strict=True)
    found = []
    for bucket in fill_buckets([(name, *share) for name, share in given if share is not None]):
        size = bucket.elements * DTYPE_BYTES[bucket.dtype]
        send = batch.prices.send("all_reduce", bucket.axes, size)
        if send is None:
            continue
        arrived = max(arriving.positions[name] for name in bucket.parameters)
        # With several micro-batches gradients are complete after the last one's backward.
        found.append((arrived if batch.mesh[0] == 1 else batch.schedule.last, send))
    # The sort is stable: buckets of one position stay in the order in which they are filled.
    return sorted(found, key=lambda item: item[0])
