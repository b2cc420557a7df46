"""The memory of a pipeline's ranks: what micro-batches keep, and what actions need.

A rank has the lasting bytes of its stages, what micro-batches keep between their forward and their backward,
what the action needs that runs, and the buffers of messages on their way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from tensoropt.costs.effects import MoveEffects
from tensoropt.evaluation.evaluate import Evaluation
from tensoropt.ops.families.stages import ARRIVE
from tensoropt.pipeline.arrivals import asked_for, taken_back
from tensoropt.pipeline.strategy import Action, PipelinedStrategy, place_actions, schedule_named
from tensoropt.pipeline.timing import arriving_bytes, departing_bytes
from tensoropt.sharding.groups import Group, GroupGraph
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.recording import MEMORY_KINDS, Owned
from tensoropt.simulate.simulator import StepSimulator
from tensoropt.simulate.step import lower


def memory_of_places(
    strategy: PipelinedStrategy, stages: Sequence[Evaluation], actions: Sequence[Sequence[Action]]
) -> np.ndarray:
    """Return the peak on a rank of each place by kind, (places, 5); of several peaks, the first."""
    peaks = []
    for place, own in enumerate(actions):
        curve = np.array([kinds for _, kinds in memory_of_actions(strategy, stages, place, own)])
        peaks.append(curve[curve.sum(axis=1).argmax()])
    return np.array(peaks)


class ActionRecorder(Protocol):
    """A receiver of what a place has alive in its actions, from the first to the last."""

    def keep(self, action: Action, change: float) -> None:
        """Record by how many bytes an action's micro-batch keeps more."""

    def add(self, action: Action, needed: float, on_the_way: float, trailing: float) -> None:
        """Record an action.

        Args:
            needed: the bytes that it needs itself.
            on_the_way: bytes of messages that were sent, or are to come.
            trailing: bytes of gradients of the last backward.
        """

    def finish(self, needed: Mapping[int, float]) -> None:
        """Record the end of the step, where each stage needs so many bytes, all at once."""


def memory_of_actions(
    strategy: PipelinedStrategy,
    stages: Sequence[Evaluation],
    place: int,
    actions: Sequence[Action],
    ledger: ActionRecorder | None = None,
) -> Iterator[tuple[Action | None, np.ndarray]]:
    """Yield the most bytes alive on a rank of a place, by kind (5,), in each of its actions and after the
    last one.

    Args:
        actions: all actions of the place, in order.
        ledger: receives everything that is yielded.
    """
    numbers = strategy.stages_at(place)
    lasting = np.sum([stages[n].metrics.memory[0] for n in numbers], axis=0)
    lasting[3:] = 0.0
    alive = _TransientMemory(strategy, stages, place)
    for action in actions:
        key = action.stage, action.micro_batch
        before = alive.kept.get(key, 0.0)
        needed = alive.begin(action)
        between, messages = alive.kept.get(key, 0.0), alive.sent + alive.asked
        if ledger is not None:
            ledger.keep(action, between - before)
            ledger.add(action, needed, messages, alive.trailing)
        transient = needed + messages + alive.trailing
        yield action, lasting + np.array([0.0, 0.0, 0.0, sum(alive.kept.values()), transient])
        alive.end(action)
        if ledger is not None:
            ledger.keep(action, alive.kept.get(key, 0.0) - between)
    end = {n: float(stages[n].metrics.parts.end_bytes[0]) for n in numbers}
    if ledger is not None:
        ledger.finish(end)
    yield None, lasting + np.array([0.0, 0.0, 0.0, 0.0, sum(end.values())])


@lru_cache(maxsize=256)
def _messages(
    name: str, places: int, per_place: int, micro_batches: int
) -> tuple[list[list[Counter[tuple[bool, int]]]], list[dict[int, tuple[int, ...]]]]:
    """Return (:func:`asked_for`, none where messages are asked for as they are needed; :func:`taken_back` of
    each stage)."""
    actions = place_actions(name, places, per_place, micro_batches)
    early = schedule_named(name).several
    asked = asked_for(actions) if early else [[Counter[tuple[bool, int]]() for _ in own] for own in actions]
    return asked, [taken_back(name, actions, stage) for stage in range(places * per_place)]


class _TransientMemory:
    """The memory of a rank that comes and goes during a step.

    Attributes:
        kept: the bytes that each micro-batch keeps between its actions, by (stage, micro-batch).
        sent: bytes of gradients that were sent back, until the previous stage has surely received them,
            and of what stages without a backward sent on, until where their backward would be.
        asked: bytes of buffers for messages to come.
        trailing: bytes of gradients of the last backward, until the next one is over.
    """

    def __init__(self, strategy: PipelinedStrategy, stages: Sequence[Evaluation], place: int):
        self.kept: dict[tuple[int, int], float] = {}
        self.sent = self.asked = self.trailing = 0.0
        # The first stage with a backward, which returns no gradients.
        self._first, last = strategy.forward_only, len(strategy.stages) - 1
        self._micro_batches, numbers = strategy.micro_batches, strategy.stages_at(place)
        per_place = (last + 1) // strategy.places
        asked, taken = _messages(strategy.schedule, strategy.places, per_place, strategy.micro_batches)
        self._parts = {n: stages[n].metrics.parts for n in numbers}
        self._between = {n: float(self._parts[n].between_bytes[0]) for n in numbers}
        self._sent_on = {n: departing_bytes(strategy, n) for n in numbers if n < self._first}
        self._back = {n: departing_bytes(strategy, n, learning=True) if n < last else 0 for n in numbers}
        # A stage at the same place has what it gave to the next.
        for n in numbers:
            if strategy.shares_arriving(n):
                self._between[n] -= arriving_bytes(strategy, n)
        schedule = schedule_named(strategy.schedule)
        sending = [n for n in numbers if n > self._first and n - 1 not in numbers]
        self._sent_back = {n: float(arriving_bytes(strategy, n, learning=True)) for n in sending}
        self._taken = {n: taken[n] for n in sending}
        arriving = {(False, n): arriving_bytes(strategy, n) for n in numbers}
        arriving |= {(True, n): self._back[n] for n in numbers}
        self._asked = iter([sum(arriving[m] * count for m, count in each.items()) for each in asked[place]])
        self._apart = {n: _taken_apart(stages[n]) for n in numbers if schedule.apart and n > self._first}
        for n, of in self._apart.items():
            if n in self._sent_back:
                self._sent_back[n] -= of.passed_on

    def begin(self, action: Action) -> float:
        """Begin an action, and return the bytes that it needs itself, with what its micro-batch kept."""
        kind, stage, micro_batch = action
        self.asked = next(self._asked)
        if kind == "F":
            if stage in self._taken:
                self.sent -= self._sent_back[stage] * len(self._taken[stage].get(micro_batch, ()))
            return max(float(self._parts[stage].forward_bytes[0]), self._sent_on.get(stage, 0))
        if stage < self._first:
            if kind != "W":
                self.sent -= self._sent_on[stage]
            return 0.0
        if kind == "I" and stage == self._first:
            return self._back[stage]  # no stage waits for its gradients: all is made later
        kept = self.kept.pop((stage, micro_batch))
        if kind == "W" and stage > self._first:
            return kept + self._apart[stage].gradients
        if kind == "I":
            return kept + max(self._apart[stage].needed, self._back[stage])
        return max(float(self._parts[stage].backward_bytes[0]), kept + self._back[stage])

    def end(self, action: Action) -> None:
        kind, stage, micro_batch = action
        if stage < self._first:
            self.sent += self._sent_on[stage] if kind == "F" else 0
            return
        if kind in "FI":
            left = self._between[stage]
            if kind == "I":
                # What a stage at the same place gave is released there, before the second part here.
                left = float(self._parts[stage].between_bytes[0])
                left += self._back[stage] if stage == self._first else self._apart[stage].left
            self.kept[stage, micro_batch] = left
        if kind in "BI":
            self.sent += self._sent_back.get(stage, 0)
        if kind != "F":
            trailing = self._parts[stage].trailing_bytes[0]
            last = micro_batch == self._micro_batches - 1
            self.trailing = 0.0 if kind == "I" else float(trailing[int(last)])


class _TakenApart(NamedTuple):
    """The bytes of a micro-batch whose backward is taken apart.

    Attributes:
        needed: the most alive in the first part, beside what forward kept.
        left: what is alive after it, beside the same.
        gradients: the gradients of one group's parameters, in the second part.
        passed_on: gradients that go back and are among what is left.
    """

    needed: float
    left: float
    gradients: float
    passed_on: float


def _taken_apart(evaluation: Evaluation) -> _TakenApart:
    """Return the memory of a backward that is taken apart.

    PyTorch holds the graph until the first part is over, and gradients from which those of parameters will be
    made. What is behind the last group with a parameter, and what that saved inside, is then released.
    """
    batch = evaluation.batch
    tensors, sizes = batch.graph.atoms.graph.tensors, MoveEffects(batch.prices)
    choices = {name: int(chosen[0]) for name, chosen in evaluation.choices.items()}

    def size(group: Group, names: Iterable[str]) -> float:
        layout = batch.candidates.configurations(group)[choices[group.name]].layout
        return sum(sizes.bytes(name, layout(name)) for name in names if tensors[name].requires_grad)

    def hands_on(reader: Group, name: str) -> bool:
        return reader.short_names[name] in batch.candidates.facts(reader)[choices[reader.name]].hands_on

    waiting, gradients, behind = dict[str, float](), dict[str, float](), set[str]()
    for group in batch.graph.groups:
        behind.add(group.name)
        learning = size(group, (*group.parameters, *group.shared))
        if learning:
            behind = {group.name}
            gradients[group.name], waiting[group.name] = learning, size(group, group.writes)
    schedule, simulator = batch.schedule, StepSimulator(batch)
    transient = np.cumsum(simulator.transient[:, 0])
    end, released, inside = schedule.forward_end, 0.0, Counter[str]()
    for named, first, last, *_ in lower(batch).lifetimes():
        if named.kind == "kept" and first <= end < last:
            released += named.bytes * (named.operator in behind)
            inside[named.operator] += named.bytes * (named.what == "saved inside for backward")
    most = left = 0.0
    for event in range(end, schedule.last):
        moment, work = schedule.moments[event], float(simulator.workspace[event, 0])
        own = moment.group if moment.kind == "compute" and moment.phase == "backward" else ""
        if own in waiting:
            # A whole backward releases what it saved inside as it goes.
            work = max(work - gradients[own], 0.0) + inside[own]
        most = max(most, left + float(transient[event]) + work)
        left += waiting.get(own, 0.0)
    passed_on = 0.0
    for group in batch.graph.groups:
        if group.anchor.target == ARRIVE:
            readers = schedule.readers.get(group.writes[0], ())
            if len(readers) == 1 and readers[0].name not in waiting and hands_on(readers[0], group.writes[0]):
                passed_on += size(group, group.writes)
    return _TakenApart(most, left - released, max(gradients.values(), default=0.0), passed_on)


_NAMED = 8
"""The number of tensors of a stage's micro-batch that are listed by name; the others are one row. An
assumption: a step has many micro-batches, and plans are saved with all rows."""


class _StageTensors:
    """The tensors of one micro-batch that a stage has alive, the largest by name.

    Args:
        stage: the stage.
        evaluation: that of the stage, or of an equal one whose groups and tensors have other names, alone.
        given: whether the tensors that arrive are those of a stage at the same place, which has them anyway.

    Attributes:
        between: (tensor, what, bytes) of those between forward and backward.
        forward, backward: the same when most are alive in forward, and in backward.
    """

    def __init__(self, stage: Strategy, evaluation: Evaluation, *, given: bool):
        schedule, names = evaluation.batch.schedule, dict[str, str]()
        arriving = _arriving_tensors(evaluation.batch.graph) if given else frozenset[str]()
        for simulated, own in zip(evaluation.batch.graph.groups, stage.graph.groups, strict=True):
            named = {short: name for name, short in own.short_names.items()}
            names[simulated.name] = own.name
            names |= {name: named[short] for name, short in simulated.short_names.items()}
        lifetimes = list(lower(evaluation.batch).lifetimes())
        alive = np.zeros(len(schedule.moments) + 1)
        for named_bytes, first, last, *_ in lifetimes:
            alive[first:last] += named_bytes.bytes

        def at(position: int) -> list[tuple[str, str, float]]:
            sizes: dict[tuple[str, str], float] = {}
            for named_bytes, first, last, *_ in lifetimes:
                if first <= position < last and named_bytes.tensor not in arriving:
                    key = names.get(named_bytes.tensor, named_bytes.tensor), named_bytes.what
                    sizes[key] = sizes.get(key, 0.0) + named_bytes.bytes
            largest = sorted(sizes.items(), key=lambda item: -item[1])[:_NAMED]
            return [(*key, size) for key, size in largest]

        end, last = schedule.forward_end, schedule.last
        self.between = at(end)
        self.forward = at(int(alive[:end].argmax())) if end else []
        self.backward = at(end + int(alive[end:last].argmax())) if last > end else []


class PlaceLedger:
    """The owners of everything alive in the actions of a place.

    Attributes:
        entries: for each action, the bytes in addition to the lasting ones, by (stage, its micro-batch or a
            tensor of that, label, kind).
    """

    def __init__(self, strategy: PipelinedStrategy, stages: Sequence[Evaluation], numbers: Sequence[int]):
        self.entries: list[dict[tuple[str, str, str, str], float]] = []
        self._tensors = {
            n: _StageTensors(strategy.stages[n], stages[n], given=strategy.shares_arriving(n))
            for n in numbers
        }
        self._first = strategy.forward_only
        self._kept = dict[tuple[int, int], float]()
        # What a backward leaves that has only made the gradients of inputs has no names.
        self._half_done: set[tuple[int, int]] = set()

    def keep(self, action: Action, change: float) -> None:
        key = action.stage, action.micro_batch
        if action.kind == "I":
            self._half_done.add(key)
        self._kept[key] = self._kept.get(key, 0.0) + change
        if not self._kept[key]:
            # A step may have thousands of micro-batches, but few are in flight.
            del self._kept[key]

    def add(self, action: Action, needed: float, on_the_way: float, trailing: float) -> None:
        """Add the entries of an action: all memory alive in it, except the lasting one."""
        entries: dict[tuple[str, str, str, str], float] = {}
        for (stage, micro_batch), size in self._kept.items():
            tensors = [] if (stage, micro_batch) in self._half_done else self._tensors[stage].between
            entries |= _named(stage, micro_batch, tensors, "kept for backward", "kept", size)
        kind, stage, micro_batch = action
        own = self._tensors[stage]
        # A backward that is taken apart has other tensors alive than a whole one.
        whole = {"F": own.forward, "B": own.backward}.get(
            kind, own.backward if kind == "W" and stage == self._first else []
        )
        label = "needed in forward" if kind == "F" else "needed in backward"
        entries |= _named(stage, micro_batch, whole, label, "transient", needed)
        entries["", "messages", "to come, and sent and not surely come", "transient"] = on_the_way
        entries["", "gradients", "on their way to their shards", "transient"] = trailing
        self.entries.append(entries)

    def finish(self, needed: Mapping[int, float]) -> None:
        label = "reductions and optimizer"
        self.entries.append(
            {(f"stage {n}", f"stage {n}", label, "transient"): size for n, size in needed.items()}
        )


def _named(
    stage: int,
    micro_batch: int,
    tensors: Sequence[tuple[str, str, float]],
    label: str,
    kind: str,
    total: float,
) -> dict[tuple[str, str, str, str], float]:
    whose, place = f"micro-batch {micro_batch}", f"stage {stage}"
    rest = total - sum(size for *_, size in tensors)
    if rest < 0:  # of tensors that a stage at the same place holds, or that a part of backward has released
        return {(place, whose, label, kind): total}
    entries = {(place, f"{tensor}, {whose}", what, kind): size for tensor, what, size in tensors}
    return entries | {(place, whose, label, kind): rest}


def _arriving_tensors(graph: GroupGraph) -> frozenset[str]:
    return frozenset(group.anchor.outputs[0] for group in graph.groups if group.anchor.target == ARRIVE)


_WORDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
_LASTING = ("parameters", "gradients", "optimizer state")


def owned_by_place(
    strategy: PipelinedStrategy,
    stages: Sequence[Evaluation],
    place: int,
    actions: Sequence[Action],
) -> list[Owned]:
    """Return everything alive on a rank of a place, each with the points of its memory curve between which it
    is alive.
    """
    ledger = PlaceLedger(strategy, stages, strategy.stages_at(place))
    points = len(list(memory_of_actions(strategy, stages, place, actions, ledger)))
    words = [f"{_WORDS[kind]} of micro-batch {m}, stage {stage}" for kind, stage, m in actions]
    words.append("the end of the step")
    owned: list[Owned] = []
    for number in strategy.stages_at(place):
        sizes = stages[number].metrics.memory[0].tolist()
        for label, kind, size in zip(_LASTING, MEMORY_KINDS, sizes, strict=False):
            if size:
                owned.append((f"stage {number}", f"stage {number}", label, kind, size, 0, points, "", ""))
    alive: dict[tuple[str, str, str, str], tuple[int, float]] = {}
    for point, sizes_at in enumerate([*ledger.entries, {}]):
        # A change of size starts another row.
        for key, (first, size) in list(alive.items()):
            if sizes_at.get(key, 0.0) != size:
                del alive[key]
                until = words[point] if point < points else "the end of the step"
                owned.append((*key, size, first, point, words[first], until))
        for key, size in sizes_at.items():
            if size and key not in alive:
                alive[key] = point, size
    return owned
