"""Predict the collectives of a strategy's step; ``verify`` compares them with those of the executor."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from tensoropt.costs.effects import BACK_LEFT, COMPLETE, GradientShare
from tensoropt.costs.prices import Send, free_prices
from tensoropt.graph import DTYPE_BYTES
from tensoropt.ops.calls import RING_SEND
from tensoropt.profiling.facts import Facts
from tensoropt.sharding.buckets import BUCKET_BYTES, arrival_order, bucket_numbers
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.candidates import StrategyCandidates
from tensoropt.types import Indices

_Key = tuple[int, bool, str, str, tuple[int, ...], str]


@dataclass(frozen=True)
class _Coalesced:
    """A collective of several parameters in one call, at one moment, for each strategy.

    Attributes:
        at_once: whether it is waited for as soon as it is issued.
        only: its only micro-batch, ``first`` or ``last``; "" for all.
        bytes: (strategies,) the size in bytes of all its parameters; 0 for none.
        members: (strategies,) the number of its parameters.
        staying: (strategies,) bytes of gradients that stay in place, so that packing copies them.
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
    """Return all coalesced collectives of a batch, in issue order."""
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


@dataclass(frozen=True)
class Reductions:
    """All-reduces of gradient buckets at one position of the step schedule, one per strategy.

    Attributes:
        position: the position after which they are issued, in the last micro-batch.
        rows: (k,) the indices of the strategies that issue an all-reduce at this position.
        which: (k,) the index in ``sends`` of each of these all-reduces.
    """

    position: int
    rows: Indices
    sends: tuple[Send, ...]
    which: Indices


class _Issued(NamedTuple):
    sends: list[Send]
    which: Indices
    rows: Indices
    positions: Indices


def reductions(batch: Batch) -> list[Reductions]:
    issued = _all_reductions(batch)
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


def _all_reductions(batch: Batch) -> _Issued:
    shares, of_parameters = _shares(batch)
    if not of_parameters:
        none = np.zeros(0, dtype=np.int64)
        return _Issued([], none, none, none)
    parameters = [name for name in arrival_order(batch.graph) if name in of_parameters]
    # The first user in forward is the last to give its part of the gradient.
    firsts, position = [batch.schedule.users[name][0] for name in parameters], batch.schedule.position
    # (kinds of COMPLETE, parameters) at which gradients are complete.
    positions = np.array(
        [
            [position("backward", "parameters", first) for first in firsts],
            [batch.schedule.of_group(first)(BACK_LEFT) for first in firsts],
            [position("optimizer", "reduce", first) for first in firsts],
        ]
    )
    keys: dict[tuple[tuple[int, ...], str], int] = {}
    of_share = np.full(len(shares), -1)
    elements, complete = np.zeros((2, len(shares)), dtype=np.int64)
    for number, share in enumerate(shares):
        # A gradient that no rank sends is in no bucket.
        if share is not None and batch.prices.send("all_reduce", share.axes, 0) is not None:
            of_share[number] = keys.setdefault((share.axes, share.dtype), len(keys))
            elements[number], complete[number] = share.elements, COMPLETE.index(share.complete)
    bytes_of = np.array([DTYPE_BYTES[dtype] for _, dtype in keys] + [0])
    which = np.stack([of_parameters[name] for name in parameters], axis=1)
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
    np.maximum.at(arrived, number, positions[complete[which[rows, gradients]], gradients])
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


def _shares(batch: Batch) -> tuple[list[GradientShare | None], dict[str, Indices]]:
    """Return distinct gradients reduced in buckets, and parameter -> (strategies,) its gradient's index."""
    numbers: dict[GradientShare | None, int] = {None: 0}
    shares: dict[str, Indices] = {}
    for stack in batch.stacks:
        if stack.owners[0].where[0] != "parameter" or not batch.prices.training:
            continue
        of_used = [stack.kind.tables.shares[number] for number in stack.used.tolist()]
        if any(share is not None for share in of_used):
            table = np.array([numbers.setdefault(share, len(numbers)) for share in of_used])
            shares.update((o.where[1], table[w]) for o, w in zip(stack.owners, stack.which, strict=True))
    return list(numbers), shares


_bucket_numbers = njit(cache=True, nogil=True)(bucket_numbers)


class Collective(NamedTuple):
    """A collective or message of a rank, predicted or issued.

    Attributes:
        kind: ``all_reduce``, ``all_gather``,..., ``send``, or ``ring_send`` to the next rank.
        axes: the mesh axes of its group, not counting micro-batches; for a message, sender and receiver.
        bytes: the size of the reduced tensor, gathered output, scattered or exchanged input, or message.
    """

    kind: str
    axes: tuple[int, ...]
    bytes: int


def collectives(batch: Batch) -> list[Counter[Collective]]:
    """Return, for each strategy, how often it issues each collective in one step."""
    times: dict[Collective, Indices] = defaultdict(lambda: np.zeros(batch.count, dtype=np.int64))
    for stack in batch.stacks:
        for position, number in enumerate(stack.used.tolist()):
            effects = stack.kind.effects[number].effects
            sending = [(effect.when.once, send) for effect in effects for send in effect.sends]
            if sending:
                owners = (stack.which == position).sum(axis=0)
                for once, send in sending:
                    sent = Collective(send.kind, send.axes, send.bytes)
                    times[sent] += owners if once else owners * batch.mesh[0]
    for shared in coalesced(batch):
        for size in np.unique(shared.bytes[shared.bytes > 0]).tolist():
            count = (shared.bytes == size) * (1 if shared.only else batch.mesh[0])
            times[Collective(shared.kind, shared.axes, size)] += count
    # Buckets belong to no single owner. They are reduced once per step, however many micro-batches there are.
    issued = _all_reductions(batch)
    for number, send in enumerate(issued.sends):
        rows = issued.rows[issued.which == number]
        times[Collective(send.kind, send.axes, send.bytes)] += np.bincount(rows, minlength=batch.count)
    return [
        Counter({sent: int(count[row]) for sent, count in times.items() if count[row]})
        for row in range(batch.count)
    ]


def sent_bytes(issued: Mapping[Collective, int], sizes: Sequence[int]) -> float:
    """Return the bytes that leave a rank, by the ring algorithms of :mod:`tensoropt.costs.communication`.

    Of n bytes on r ranks, messages and broadcasts send n, all-reduces 2 n (r - 1) / r, and others
    n (r - 1) / r. ``sizes``: the sizes of the mesh axes.
    """
    total = 0.0
    for collective, times in issued.items():
        whole = collective.kind in ("send", "broadcast", RING_SEND)
        ranks = 1 if whole else math.prod(sizes[axis] for axis in collective.axes)
        share = 1.0 if whole else (2.0 if collective.kind == "all_reduce" else 1.0) * (ranks - 1) / ranks
        total += times * collective.bytes * share
    return total


def predicted_collectives(strategy: Strategy, facts: Mapping[str, Facts]) -> Counter[Collective]:
    """Return how often each collective occurs in a step or inference call; ``facts``: group -> its facts
    (memory, FLOP)."""
    candidates = StrategyCandidates(strategy, facts)
    # The optimizer that runs afterwards does not change what is sent.
    prices = free_prices(strategy.graph, strategy.mesh, "sgd")
    return collectives(Batch(candidates, *candidates.row(), prices))[0]
