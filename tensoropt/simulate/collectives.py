"""What a strategy sends in a step: kind, axes, bytes and how often. Recorded from the effects that are
simulated.

Compared by ``verify`` with what the executor really issues; nothing here asks the executor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from tensoropt.costs.prices import free_prices
from tensoropt.profiling.facts import Facts
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.candidates import StrategyCandidates
from tensoropt.simulate.reductions import reductions_of


class Collective(NamedTuple):
    """A collective, or a message, of one rank, predicted or as it was issued.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ..., or ``send``.
        axes: the mesh's own axes of its group, counted from 0; of a message the sender and the receiver.
        bytes: of the reduced tensor, the gathered output, the scattered input, the exchanged input, or the
            message.
    """

    kind: str
    axes: tuple[int, ...]
    bytes: int


def collectives(batch: Batch, row: int) -> Counter[Collective]:
    """The collectives of one strategy of a batch, with their counts in one step."""
    found: Counter[Collective] = Counter()
    for owner in batch.owners:
        for effect in owner.effects.at(row).effects:
            times = 1 if effect.when.once else batch.mesh[0]
            for send in effect.sends:
                found[Collective(send.kind, send.axes, send.bytes)] += times
    # Buckets belong to no single owner. They are reduced once per step, however many micro-batches there are.
    for send in reductions_of(batch, row):
        found[Collective(send.kind, send.axes, send.bytes)] += 1
    return found


def predicted_collectives(strategy: Strategy, facts: Mapping[str, Facts]) -> Counter[Collective]:
    """The collectives of one training step (or inference call) of a strategy, with their counts.

    Args:
        facts: per group name the facts of its configuration (which gathered parameters backward needs).
    """
    candidates = StrategyCandidates(strategy, facts)
    # Which optimizer runs afterwards does not change what is sent.
    prices = free_prices(strategy.graph, strategy.mesh, "sgd")
    return collectives(Batch(candidates, *candidates.row(), prices), 0)
