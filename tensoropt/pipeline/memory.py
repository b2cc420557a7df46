"""The memory of a pipeline's ranks: what micro-batches keep, what messages hold, what actions need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from tensoropt.pipeline.messages import arriving_bytes, departing_bytes, new_buffer_bytes
from tensoropt.pipeline.receipts import Receipt, receipts, taken_back
from tensoropt.pipeline.schedules import Action, place_actions, schedule_named
from tensoropt.pipeline.split_backward import SplitBackward, split_backward
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.plan.evaluate import Evaluation

MemoryLedger = list[dict[tuple[str, str, str, str], float]]
"""For each action, the bytes beside what lasts, by (stage, its micro-batch, what, kind)."""


def memory_of_places(
    strategy: PipelinedStrategy, stages: Sequence[Evaluation], actions: Sequence[Sequence[Action]]
) -> np.ndarray:
    """Return (places, 5) the peak on a rank of each place by kind; the first of several peaks."""
    found = []
    for place, own in enumerate(actions):
        curve = np.array([kinds for _, kinds in memory_of_actions(strategy, stages, place, own)])
        found.append(curve[curve.sum(axis=1).argmax()])
    return np.array(found)


def memory_of_actions(
    strategy: PipelinedStrategy,
    stages: Sequence[Evaluation],
    place: int,
    actions: Sequence[Action],
    ledger: MemoryLedger | None = None,
) -> Iterator[tuple[Action | None, np.ndarray]]:
    """Yield (5,) the most bytes alive on a rank of a place, by kind, in each of its actions and after the
    last one.

    The parameters, gradients and optimizer state of its stages last; what micro-batches keep between their
    forward and their backward comes and goes; an action needs memory of its own, beside the buffers for what
    is to be received and for what was sent and may not have arrived yet.

    Args:
        actions: all actions of the place, in order.
        ledger: receives an entry for everything that is yielded.
    """
    numbers = strategy.stages_at(place)
    lasting = np.sum([stages[n].metrics.memory[0] for n in numbers], axis=0)
    lasting[3:] = 0.0
    alive = _Alive(strategy, stages, place)
    kept: dict[tuple[int, int], float] = {}
    for number, action in enumerate(actions):
        before = alive.kept
        needed = alive.begin(number, action)
        if ledger is not None:
            of = action.stage, action.micro_batch
            kept[of] = kept.get(of, 0.0) + alive.kept - before
            ledger.append(_entries(kept, action, needed, alive))
        transient = needed + alive.on_the_way + alive.trailing
        yield action, lasting + np.array([0.0, 0.0, 0.0, alive.kept, transient])
        before = alive.kept
        alive.end(action)
        if ledger is not None:
            kept[of] += alive.kept - before
            if not kept[of]:
                # A step may have thousands of micro-batches, but few are in flight.
                del kept[of]
    end = sum(float(stages[n].metrics.parts.end_bytes[0]) for n in numbers)
    if ledger is not None:
        parts = {n: float(stages[n].metrics.parts.end_bytes[0]) for n in numbers}
        what = "reductions and optimizer"
        ledger.append({(f"stage {n}", f"stage {n}", what, "transient"): size for n, size in parts.items()})
    yield None, lasting + np.array([0.0, 0.0, 0.0, 0.0, end])


def _entries(
    kept: dict[tuple[int, int], float], action: Action, needed: float, alive: _Alive
) -> dict[tuple[str, str, str, str], float]:
    """Return what is alive in an action beside what lasts."""
    found = {
        (f"stage {stage}", f"micro-batch {micro_batch}", "kept for backward", "kept"): size
        for (stage, micro_batch), size in kept.items()
    }
    of = f"stage {action.stage}", f"micro-batch {action.micro_batch}"
    what = "needed in forward" if action.kind == "F" else "needed in backward"
    found[*of, what, "transient"] = needed
    found["", "messages", "to come, and sent and not surely come", "transient"] = alive.on_the_way
    found["", "gradients", "on their way to their shards", "transient"] = alive.trailing
    return found


class _Alive:
    """The memory of a rank that comes and goes during a step.

    Attributes:
        kept: bytes that micro-batches keep between their actions.
        on_the_way: bytes of buffers for what is to be received, of what was sent, and of the new values of
            buffers, which replace the old ones when the step is over.
        trailing: bytes of gradients of the last backward, until the next one is over.
    """

    def __init__(self, strategy: PipelinedStrategy, stages: Sequence[Evaluation], place: int):
        self.schedule, self.last = schedule_named(strategy.schedule), len(strategy.stages) - 1
        self.at_place = frozenset(strategy.stages_at(place))
        self.kept = self.on_the_way = self.trailing = 0.0
        self._micro_batches = strategy.micro_batches
        self._buffers = {n: new_buffer_bytes(strategy.stages[n]) for n in self.at_place}
        # The last bytes that a schedule that waits has sent.
        self._sent = 0.0
        shape = strategy.places, len(stages) // strategy.places, strategy.micro_batches
        self._asked = receipts(strategy.schedule, *shape)[place]
        self._taken = _taken(strategy.schedule, *shape)
        self._arriving = {n: arriving_bytes(strategy, n) for n in self.at_place}
        # Some gradients of what arrived may share a storage, which is then sent several times.
        self._back = {
            n: min(
                arriving_bytes(strategy, n, learning=True),
                float(stages[n].metrics.parts.given_back_bytes[0]),
            )
            for n in self.at_place
        }
        self._coming_back = {n: departing_bytes(strategy, n, learning=True) for n in self.at_place}
        self._parts = {n: stages[n].metrics.parts for n in self.at_place}
        self._split: dict[int, SplitBackward] = {}
        if self.schedule.apart:
            self._split = {n: split_backward(strategy.stages[n], stages[n]) for n in self.at_place if n}

    def begin(self, number: int, action: Action) -> float:
        """Begin an action, the ``number``-th of its place, and return the bytes that it needs itself; what it
        takes over is not counted elsewhere any more."""
        kind, stage, micro_batch = action
        self.on_the_way += sum(map(self._room, self._asked[number]))
        parts, shared = self._parts[stage], self._shared(stage)
        between = float(parts.between_bytes[0]) - shared
        if kind == "F":
            if stage and stage - 1 not in self.at_place:
                self.on_the_way -= self._arriving[stage]
            self._let_go(stage, micro_batch)
            return float(parts.forward_bytes[0]) - shared
        if kind in "BI" and stage < self.last:
            # Received by message, or taken from the next stage at this place.
            self.on_the_way -= self._coming_back[stage]
        if kind == "B" or stage == 0:
            if kind == "I":
                return self._coming_back[stage]
            self.kept -= between + (self._coming_back[stage] if kind == "W" else 0.0)
            return self._with_gradients(stage, float(parts.backward_bytes[0])) - shared
        split = self._split[stage]
        if kind == "I":
            self.kept -= between
            return self._with_gradients(stage, split.inputs_bytes) - shared
        self.kept -= split.between_bytes
        return split.weights_bytes

    def end(self, action: Action) -> None:
        """End an action."""
        kind, stage, micro_batch = action
        if kind == "F":
            self.kept += float(self._parts[stage].between_bytes[0]) - self._shared(stage)
            if micro_batch == self._micro_batches - 1:
                self.on_the_way += self._buffers[stage]
        elif kind == "I":
            # Nobody waits for a gradient of the first stage: all of its backward comes later.
            self.kept += self._split[stage].between_bytes if stage else self._coming_back[stage]
        if kind in "BI" and stage:
            back = self._back[stage]
            self.on_the_way += back - self._sent
            if self.schedule.waits:
                self._sent = back
        if kind != "F":
            of = self._parts[stage].trailing_bytes[0]
            self.trailing = 0.0 if kind == "I" else float(of[int(micro_batch == self._micro_batches - 1)])

    def _room(self, receipt: Receipt) -> float:
        return self._coming_back[receipt.stage] if receipt.back else self._arriving[receipt.stage]

    def _with_gradients(self, stage: int, needed: float) -> float:
        """Return the bytes of a backward, which begins with all gradients that come back beside all that was
        kept."""
        return max(needed, float(self._parts[stage].between_bytes[0]) + self._coming_back[stage])

    def _shared(self, stage: int) -> float:
        """Return the bytes of a stage's input that come from a stage at the same place, which holds it just
        as long."""
        return self._arriving[stage] if stage - 1 in self.at_place else 0.0

    def _let_go(self, stage: int, micro_batch: int) -> None:
        """Release what was sent and has arrived by now."""
        if self.schedule.waits:
            self.on_the_way -= self._sent
            self._sent = 0.0
        elif stage and stage - 1 not in self.at_place:
            self.on_the_way -= self._back[stage] * len(self._taken[stage].get(micro_batch, ()))


@lru_cache(maxsize=256)
def _taken(
    name: str, places: int, per_place: int, micro_batches: int
) -> tuple[dict[int, tuple[int, ...]], ...]:
    """Return what :func:`taken_back` finds for each stage."""
    actions = place_actions(name, places, per_place, micro_batches)
    return tuple(taken_back(name, actions, stage) for stage in range(places * per_place))
