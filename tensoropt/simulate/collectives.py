"""Collectives of a strategy in a step: kind, axes, bytes and count, derived from the effects simulated.

``verify`` compares them with what the executor really issues; nothing here queries the executor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tensoropt.costs.prices import Send, free_prices
from tensoropt.profiling.facts import Facts
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.candidates import StrategyCandidates
from tensoropt.simulate.coalesced import coalesced
from tensoropt.simulate.reductions import all_reductions
from tensoropt.types import Indices


class Collective(NamedTuple):
    """A collective, or a message, of one rank, either predicted or actually issued.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ..., or ``send``.
        axes: the mesh's own axes of its group, numbered from 0; for a message, the sender and the receiver.
        bytes: those of the reduced tensor, the gathered output, the scattered input, the exchanged input, or
            the message.
    """

    kind: str
    axes: tuple[int, ...]
    bytes: int


def collectives(batch: Batch) -> list[Counter[Collective]]:
    """The collectives of each strategy of a batch, with their counts in one step."""
    times: dict[Collective, Indices] = {}

    def add(send: Send, count: Indices | int) -> None:
        sent = Collective(send.kind, send.axes, send.bytes)
        if sent not in times:
            times[sent] = np.zeros(batch.count, dtype=np.int64)
        times[sent] += count

    for stack in batch.stacks:
        for position, number in enumerate(stack.used.tolist()):
            effects = stack.kind.effects[number].effects
            sending = [(effect.when.once, send) for effect in effects for send in effect.sends]
            if sending:
                owners = (stack.which == position).sum(axis=0)
                for once, send in sending:
                    add(send, owners if once else owners * batch.mesh[0])
    for one in coalesced(batch):
        for size in np.unique(one.bytes[one.bytes > 0]).tolist():
            sent = Collective(one.kind, one.axes, size)
            times.setdefault(sent, np.zeros(batch.count, dtype=np.int64))
            times[sent] += (one.bytes == size) * (1 if one.only else batch.mesh[0])
    # Buckets belong to no single owner. They are reduced once per step, however many micro-batches there are.
    issued = all_reductions(batch)
    for number, send in enumerate(issued.sends):
        add(send, np.bincount(issued.rows[issued.which == number], minlength=batch.count))
    return [
        Counter({sent: int(count[row]) for sent, count in times.items() if count[row]})
        for row in range(batch.count)
    ]


def sent_bytes(issued: Mapping[Collective, int], sizes: Sequence[int]) -> float:
    """The bytes that leave a rank for its collectives, by the algorithms of
    :mod:`tensoropt.costs.communication` where these are rings: all of them for a message and a broadcast; for
    other collectives, those meant for the other ranks of its group, twice for a sum.

    Args:
        sizes: the sizes of the mesh's axes.
    """
    total = 0.0
    for one, times in issued.items():
        whole = one.kind in ("send", "broadcast")
        ranks = 1 if whole else math.prod(sizes[axis] for axis in one.axes)
        share = 1.0 if whole else (2.0 if one.kind == "all_reduce" else 1.0) * (ranks - 1) / ranks
        total += times * one.bytes * share
    return total


def predicted_collectives(strategy: Strategy, facts: Mapping[str, Facts]) -> Counter[Collective]:
    """The collectives of one training step (or inference call) of a strategy, with their counts.

    Args:
        facts: by group name, the facts of its configuration (which gathered parameters backward needs).
    """
    candidates = StrategyCandidates(strategy, facts)
    # The optimizer that runs afterwards does not change what is sent.
    prices = free_prices(strategy.graph, strategy.mesh, "sgd")
    return collectives(Batch(candidates, *candidates.row(), prices))[0]
