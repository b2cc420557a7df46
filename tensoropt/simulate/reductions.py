"""Reductions of gradients: buckets of shares that arrive one after the other in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tensoropt.costs.effects import GradientShare
from tensoropt.costs.prices import Send
from tensoropt.graph import DTYPE_BYTES
from tensoropt.sharding.buckets import arrival_order, fill_buckets
from tensoropt.simulate.batch import Batch, Owner
from tensoropt.simulate.readings import distinct
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
    """A parameter whose gradient arrives; ``owner`` has the effect that shares in a bucket."""

    name: str
    owner: Owner


def reductions(batch: Batch) -> list[Reductions]:
    """All reductions of a batch in the order in which they are issued."""
    arriving = _arriving(batch)
    if not arriving:
        return []
    # Buckets are filled across parameters, so they are worked out per distinct combination of all stored
    # layouts.
    firsts, which = distinct([one.owner.effects.which for one in arriving])
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
        chosen = table[which]
        concerned = np.flatnonzero(chosen >= 0)
        result.append(Reductions(position, concerned, tuple(sends.values()), chosen[concerned]))
    return result


def reductions_of(batch: Batch, row: int) -> list[Send]:
    """The reductions of one strategy, in the order in which they are issued."""
    return [send for _, send in _buckets(batch, _arriving(batch), row)]


def _arriving(batch: Batch) -> list[_Arriving]:
    """Trained parameters, in the order in which backward completes their gradients."""
    if not batch.prices.training:
        return []
    owners = {owner.name: owner for owner in batch.owners if owner.kind == "parameter"}
    return [_Arriving(name, owners[name]) for name in arrival_order(batch.graph) if name in owners]


def _buckets(batch: Batch, arriving: Sequence[_Arriving], row: int) -> list[tuple[int, Send]]:
    """(position, collective) of one strategy's buckets."""
    gradients = []
    for name, owner in arriving:
        share = _share(owner, row)
        if share is not None:
            gradients.append((name, *share))
    found = []
    for bucket in fill_buckets(gradients):
        size = bucket.elements * DTYPE_BYTES[bucket.dtype]
        send = batch.prices.send("all_reduce", bucket.axes, size)
        if send is None:
            continue
        users = (batch.schedule.users[name][0] for name in bucket.parameters)
        # users[name][0] is the first user in forward, and so the last to give its part of the gradient.
        arrived = max(batch.schedule.position("backward", "parameters", user) for user in users)
        # With several micro-batches gradients are complete after the last one's backward.
        found.append((arrived if batch.mesh[0] == 1 else batch.schedule.last, send))
    # The sort is stable: buckets of one position stay in the order in which they are filled.
    return sorted(found, key=lambda item: item[0])


def _share(owner: Owner, row: int) -> GradientShare | None:
    shares = (effect.share for effect in owner.effects.at(row).effects)
    return next((share for share in shares if share is not None), None)
