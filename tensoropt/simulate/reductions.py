"""Reductions of gradients: buckets of shares that arrive one after another in backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from tensoropt.costs.effects import BACK_LEFT, COMPLETE, GradientShare
from tensoropt.costs.prices import Send
from tensoropt.graph import DTYPE_BYTES
from tensoropt.sharding.buckets import BUCKET_BYTES, arrival_order, bucket_numbers
from tensoropt.simulate.batch import Batch
from tensoropt.types import Indices


@dataclass(frozen=True)
class Reductions:
    """Reductions of gradients that are issued at one position of the step schedule.

    Attributes:
        position: the position after which they are issued; with several micro-batches, in the last one.
        rows: the strategies that issue one here.
        sends: the distinct reductions.
        which: for each row, the index of its reduction in ``sends``.
    """

    position: int
    rows: Indices
    sends: tuple[Send, ...]
    which: Indices


class _Arriving(NamedTuple):
    """Parameters whose gradients are reduced with others in some strategy, in the order in which backward
    completes them.

    Attributes:
        positions: (kinds of ``COMPLETE``, parameters) after which each one's gradient is complete.
        shares: the distinct shares, and None.
        which: (parameters, strategies) the index of each one's share.
    """

    positions: Indices
    shares: list[GradientShare | None]
    which: Indices


class _Issued(NamedTuple):
    """All reductions of a batch; for each strategy, in the order in which they are issued.

    Attributes:
        sends: the distinct reductions.
        which: (k,) the index of each reduction in ``sends``.
        rows: (k,) the strategy of each, ascending.
        positions: (k,) the position after which each is issued.
    """

    sends: list[Send]
    which: Indices
    rows: Indices
    positions: Indices


def reductions(batch: Batch) -> list[Reductions]:
    """Return all reductions of a batch in the order in which they are issued."""
    issued = all_reductions(batch)
    count = len(issued.rows)
    if not count:
        return []
    # Several buckets may be complete at one position; the n-th buckets of all strategies are issued together.
    begins = np.ones(count, dtype=bool)
    begins[1:] = (np.diff(issued.rows) > 0) | (np.diff(issued.positions) > 0)
    place = np.arange(count) - np.maximum.accumulate(np.where(begins, np.arange(count), 0))
    order = np.lexsort((issued.rows, place, issued.positions))
    position, place = issued.positions[order], place[order]
    starts = np.flatnonzero((np.diff(position) > 0) | (np.diff(place) > 0)) + 1
    result = []
    for part in np.split(order, starts):
        distinct, which = np.unique(issued.which[part], return_inverse=True)
        sends = tuple(issued.sends[number] for number in distinct.tolist())
        result.append(Reductions(int(issued.positions[part[0]]), issued.rows[part], sends, which))
    return result


def reductions_of(batch: Batch, row: int) -> list[Send]:
    """Return the reductions of one strategy, in the order in which they are issued."""
    issued = all_reductions(batch.part(slice(row, row + 1)))
    return [issued.sends[number] for number in issued.which.tolist()]


def all_reductions(batch: Batch) -> _Issued:
    """Return the reductions of every strategy of a batch."""
    arriving = _arriving(batch)
    if arriving is None:
        none = np.zeros(0, dtype=np.int64)
        return _Issued([], none, none, none)
    keys: dict[tuple[tuple[int, ...], str], int] = {}
    of_share = np.full(len(arriving.shares), -1)
    elements, complete = np.zeros((2, len(arriving.shares)), dtype=np.int64)
    for number, share in enumerate(arriving.shares):
        # What no rank sends is in no bucket.
        if share is not None and batch.prices.send("all_reduce", share.axes, 0) is not None:
            of_share[number] = keys.setdefault((share.axes, share.dtype), len(keys))
            elements[number], complete[number] = share.elements, COMPLETE.index(share.complete)
    bytes_of = np.array([DTYPE_BYTES[dtype] for _, dtype in keys] + [0])
    which = np.ascontiguousarray(arriving.which.T)
    assert arriving.positions.shape == (len(COMPLETE), which.shape[1]), "a moment of each kind per parameter"
    of_gradient, of_elements = of_share[which], elements[which]
    buckets = _bucket_numbers(of_gradient, of_elements * bytes_of[of_gradient], BUCKET_BYTES)
    # Buckets of all strategies are numbered consecutively: the shares in a bucket are added up under its
    # number.
    counts = buckets.max(axis=1, initial=-1) + 1
    begins = np.cumsum(counts) - counts
    rows, gradients = np.nonzero(buckets >= 0)
    number, total = begins[rows] + buckets[rows, gradients], int(counts.sum())
    sizes, arrived, key_of = np.zeros((3, total), dtype=np.int64)
    np.add.at(sizes, number, of_elements[rows, gradients])
    np.maximum.at(arrived, number, arriving.positions[complete[which[rows, gradients]], gradients])
    key_of[number] = of_gradient[rows, gradients]
    row_of = np.repeat(np.arange(len(counts)), counts)
    # The sort is stable: buckets at one position stay in the order in which they are filled.
    order = np.lexsort((arrived, row_of))
    distinct, sent = np.unique(np.stack([key_of, sizes])[:, order], axis=1, return_inverse=True)
    names, sends = list(keys), []
    for key, size in distinct.T.tolist():
        axes, dtype = names[key]
        send = batch.prices.send("all_reduce", axes, size * DTYPE_BYTES[dtype])
        assert send is not None, "what no rank sends is in no bucket"
        sends.append(send)
    return _Issued(sends, sent.reshape(-1), row_of[order], arrived[order])


def _arriving(batch: Batch) -> _Arriving | None:
    """Return the gradients that are reduced with others; None if there are none."""
    if not batch.prices.training:
        return None
    numbers: dict[GradientShare | None, int] = {None: 0}
    shares: dict[str, Indices] = {}
    for stack in batch.stacks:
        if stack.owners[0].where[0] != "parameter":
            continue
        of_used = [stack.kind.tables.shares[number] for number in stack.used.tolist()]
        if any(share is not None for share in of_used):
            table = np.array([numbers.setdefault(share, len(numbers)) for share in of_used])
            shares.update((o.where[1], table[w]) for o, w in zip(stack.owners, stack.which, strict=True))
    if not shares:
        return None
    names = [name for name in arrival_order(batch.graph) if name in shares]
    # users[name][0] is the first user in forward, and therefore the last to give its part of the gradient.
    users, position = batch.schedule.users, batch.schedule.position
    firsts = [users[name][0] for name in names]
    left = (batch.schedule.of_group(first)(BACK_LEFT) for first in firsts)
    positions = np.array(
        [
            [position("backward", "parameters", first) for first in firsts],
            list(left),
            [position("optimizer", "reduce", first) for first in firsts],
        ]
    )
    return _Arriving(positions, list(numbers), np.stack([shares[name] for name in names]))


_bucket_numbers = njit(cache=True, nogil=True)(bucket_numbers)
