"""The memory that each action of a pipeline schedule allocates and frees on a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tensoropt.evaluation.evaluate import Evaluation
from tensoropt.pipeline.receipts import messages_of
from tensoropt.pipeline.strategy import Action, PipelinedStrategy, schedule_named
from tensoropt.pipeline.timing import arriving_bytes, departing_bytes
from tensoropt.profiling.cuda_kernels import Capability
from tensoropt.profiling.fact_finding import find_split_facts
from tensoropt.profiling.facts import SplitFacts
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.recording import MEMORY_KINDS, Owned
from tensoropt.simulate.simulator import StepColumns
from tensoropt.simulate.step import lifetimes

KEPT, _NEEDED, _MESSAGE, _TRAILING = "kept", "needed", "message", "trailing"
"""Kinds of memory: saved for backward, needed in one action, messages, gradients in reduce-scatters."""


class _Alive(NamedTuple):
    """Memory in use on a rank from its action number ``first`` until before action number ``end``.

    Attributes:
        action: the action that allocates it; None for memory that the end of a stage's step needs.
        what: the kind of memory: :data:`KEPT`, :data:`_NEEDED`, :data:`_MESSAGE` or :data:`_TRAILING`.
        halfway: whether only the second part of a split backward needs it.
    """

    stage: int
    action: Action | None
    what: str
    bytes: float
    first: int
    end: int
    halfway: bool = False


def alive_at(
    strategy: PipelinedStrategy,
    stages: Sequence[Evaluation],
    place: int,
    capability: Capability | None = None,
) -> list[_Alive]:
    """Return a rank's memory in use during a step, except parameters, gradients and optimizer state.

    During an action, the peak of its stage is in use. Between actions, the memory in use consists of tensors
    saved for backward, buffers of posted receives, gradients being reduce-scattered, and sent tensors until
    they are surely received (:mod:`tensoropt.pipeline.receipts`). The end of the step counts as one more
    action.
    """
    actions = strategy.actions[place]
    numbers, parts = strategy.stages_at(place), [stage.metrics.parts for stage in stages]
    schedule, learning_from, count = schedule_named(strategy.schedule), strategy.forward_only, len(actions)
    at = {action: number for number, action in enumerate(actions)}
    # A stage on the same devices as the previous one uses the arriving tensors where they are.
    shared = {n: arriving_bytes(strategy, n) if strategy.shares_arriving(n) else 0 for n in numbers}
    returned = {n: departing_bytes(strategy, n, learning=True) for n in numbers}
    apart = [n for n in numbers if schedule.apart and n > learning_from]
    split = {n: _split_backward(stages[n], capability) for n in apart}
    at_end = ((n, float(parts[n].end_bytes[0])) for n in numbers)
    found = [_Alive(n, None, _NEEDED, size, count, count + 1) for n, size in at_end if size]

    def first_of(kinds: str, stage: int, micro_batch: int) -> int:
        return min(at.get(Action(kind, stage, micro_batch), count) for kind in kinds)

    def add(
        action: Action, what: str, size: float, first: int, end: int | None = None, *, halfway: bool = False
    ) -> None:
        end = first + 1 if end is None else end
        if size > 0 and first < end:
            found.append(_Alive(action.stage, action, what, float(size), first, end, halfway))

    def send(action: Action, size: float, to: int) -> None:
        known = messages.came[action.stage].get(("F" if action.kind == "F" else "B", action.micro_batch))
        until = count if known is None else first_of(*known) + (action.kind == known[0])
        if strategy.place_of(to) == place:  # the next stage uses the tensor where it is
            until = first_of("F" if action.kind == "F" else "BI", to, action.micro_batch)
        elif schedule.waits:
            until = min(until, at[action] + 2)
        add(action, _MESSAGE, size, at[action] + 1, until)

    shape = strategy.places, len(stages) // strategy.places, strategy.micro_batches
    messages, next_backward = messages_of(strategy.schedule, *shape), count
    for number, action in reversed(list(enumerate(actions))):
        kind, stage, micro_batch = action
        if kind != "F" and stage < learning_from:
            continue
        own = parts[stage]
        coming = arriving_bytes(strategy, stage) if kind == "F" else returned[stage]
        add(action, _MESSAGE, coming, messages.asked.get(action, number), number)
        backward = first_of("BI", stage, micro_batch)
        weights = first_of("W", stage, micro_batch) if schedule.apart else backward
        between = float(own.between_bytes[0]) - shared[stage]
        if kind == "F":
            sent_on = departing_bytes(strategy, stage) if stage < learning_from else 0
            add(action, _NEEDED, max(float(own.forward_bytes[0]) - shared[stage], sent_on), number)
            add(action, KEPT, between, number + 1, weights if stage == learning_from else backward)
            if sent_on:
                send(action, sent_on, stage + 1)
            continue
        own_split, left = split.get(stage), 0.0
        if kind == "I":
            # The first stage returns nothing, so all of its backward comes with the parameters' gradients.
            needed = left = float(returned[stage])
            if own_split:
                needed = max(own_split.inputs_bytes - shared[stage], between + needed)
                left = own_split.left_bytes
        elif kind == "W" and own_split:
            needed = own_split.left_bytes + own_split.weights_bytes
        else:
            needed = max(float(own.backward_bytes[0]) - shared[stage], between + returned[stage])
        add(action, _NEEDED, needed, number)
        add(action, KEPT, left, number + 1, weights, halfway=True)
        if kind != "W" and stage > learning_from:
            send(action, arriving_bytes(strategy, stage, learning=True), stage - 1)
        if kind != "I":
            trailing = own.trailing_bytes[0, int(micro_batch == strategy.micro_batches - 1)]
            add(action, _TRAILING, trailing, number + 1, min(next_backward + 1, count))
        next_backward = number
    return found


def memory_of_actions(
    strategy: PipelinedStrategy,
    stages: Sequence[Evaluation],
    place: int,
    capability: Capability | None = None,
) -> np.ndarray:
    """Return a rank's peak memory (actions + 1, 5) in bytes by kind, for each action and the step's end."""
    changes = np.zeros((len(strategy.actions[place]) + 2, len(MEMORY_KINDS)))
    for alive in alive_at(strategy, stages, place, capability):
        column = MEMORY_KINDS.index("kept" if alive.what == KEPT else "transient")
        changes[alive.first, column] += alive.bytes
        changes[alive.end, column] -= alive.bytes
    changes[0, :3] = np.sum([stages[n].metrics.memory[0, :3] for n in strategy.stages_at(place)], axis=0)
    return np.cumsum(changes[:-1], axis=0)


def memory_of_places(
    strategy: PipelinedStrategy,
    stages: Sequence[Evaluation],
    capability: Capability | None = None,
) -> np.ndarray:
    """Return the peak memory (device groups, 5) in bytes by kind, of a rank of each device group."""
    curves = (memory_of_actions(strategy, stages, place, capability) for place in range(strategy.places))
    return np.array([curve[curve.sum(axis=1).argmax()] for curve in curves])


class _SplitBackward(NamedTuple):
    """The memory in bytes of a rank in the split backward of one micro-batch.

    Attributes:
        inputs_bytes: the peak while the gradients of arriving tensors are computed.
        left_bytes: the memory in use between the two parts of the backward.
        weights_bytes: the peak above ``left_bytes`` while the gradients of parameters are computed.
    """

    inputs_bytes: float
    left_bytes: float
    weights_bytes: float


def _split_backward(evaluation: Evaluation, capability: Capability | None) -> _SplitBackward:
    """Return the memory of a stage's split backward.

    The first part frees nothing before its end. Until the second part, the gradients of the outputs of
    operators with parameters stay. Activations needed only by operators after the last parameter are freed.
    """
    batch, columns = evaluation.batch, StepColumns(evaluation.batch)
    schedule, transient = batch.schedule, np.cumsum(columns.transient[:, 0])
    most, waiting, apart = 0.0, 0.0, dict[str, SplitFacts]()
    for event in range(schedule.forward_end, schedule.last):
        moment, work = schedule.moments[event], float(columns.workspace[event, 0])
        facts = SplitFacts()
        if moment.kind == "compute" and moment.phase == "backward":
            group, number = batch.graph.group_of[moment.group], int(evaluation.choices[moment.group][0])
            facts = find_split_facts(batch.candidates.works(group)[number], capability)
            # Parameters that are cast again take memory in a whole and in a split backward.
            whole = batch.candidates.facts(group)[number].backward_peak_bytes
            work = facts.inputs_bytes + max(work - whole, 0.0)
        most = max(most, float(transient[event]) + work + waiting)
        if facts.waiting_bytes:
            apart[moment.group] = facts
            waiting += facts.waiting_bytes
    left = waiting + sum(_needed_apart(evaluation, apart))
    weights = max((facts.weights_bytes for facts in apart.values()), default=0)
    return _SplitBackward(float(evaluation.metrics.parts.between_bytes[0]) + most, left, weights)


def _needed_apart(evaluation: Evaluation, apart: Mapping[str, SplitFacts]) -> Iterator[float]:
    """Yield terms in bytes, whose sum is the size of activations needed by a split backward's second part."""
    graph, schedule = evaluation.batch.graph, evaluation.batch.schedule
    makers = {name: group.name for group in graph.groups for name in group.writes}
    # Autograd's nodes keep the nodes of all operators before them alive.
    staying, before = set(apart), set[str]()
    for group in reversed(graph.groups):
        if group.name in staying:
            learning = (n for n in group.reads if graph.atoms.graph.tensors[n].requires_grad)
            before.update(makers[n] for n in learning if n in makers)
            staying |= before
    # Of the last groups with parameters, only the operators up to the last parameter stay.
    yield from (-facts.released_bytes for name, facts in apart.items() if name not in before)
    end = schedule.forward_end
    for named, first, last, *_ in lifetimes(evaluation.batch):
        if named.kind == "kept" and first <= end < last:
            users = [group.name for group in schedule.readers.get(named.tensor, ())]
            if not staying.isdisjoint(users if named.what == "activation" else [named.operator]):
                yield named.bytes


_NAMED = 8
"""The most tensors of a micro-batch that a plan file lists by name; an assumption."""


def _largest_tensors(stage: Strategy, evaluation: Evaluation) -> dict[str, list[tuple[str, str, float]]]:
    """Return the largest tensors in memory, as (tensor, use, bytes), at three moments of a micro-batch.

    The moments are the end of forward (:data:`KEPT`), and the peaks of forward (``F``) and of backward
    (``B``). The use is a text such as ``activation``. ``evaluation`` may be that of a stage isomorphic to
    ``stage``.
    """
    schedule, names = evaluation.batch.schedule, dict[str, str]()
    for simulated, own in zip(evaluation.batch.graph.groups, stage.graph.groups, strict=True):
        named = {short: name for name, short in own.short_names.items()}
        names |= {name: named[short] for name, short in simulated.short_names.items()}
    found = list(lifetimes(evaluation.batch))
    alive = np.zeros(len(schedule.moments) + 1)
    for named_bytes, first, last, *_ in found:
        alive[first:last] += named_bytes.bytes

    def at(position: int) -> list[tuple[str, str, float]]:
        sizes: dict[tuple[str, str], float] = {}
        for named_bytes, first, last, *_ in found:
            if first <= position < last:
                key = names.get(named_bytes.tensor, named_bytes.tensor), named_bytes.what
                sizes[key] = sizes.get(key, 0.0) + named_bytes.bytes
        return [(*key, size) for key, size in sorted(sizes.items(), key=lambda item: -item[1])[:_NAMED]]

    end, last = schedule.forward_end, schedule.last
    return {
        KEPT: at(end),
        "F": at(int(alive[:end].argmax())) if end else [],
        "B": at(end + int(alive[end:last].argmax())) if last > end else [],
    }


_WORDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
_LABELS = {
    KEPT: "kept for backward",
    _MESSAGE: "sent, not yet known to be received",
    _TRAILING: "gradients on their way to their shards",
}
_LASTING = ("parameters", "gradients", "optimizer state")


def owned_by_place(
    strategy: PipelinedStrategy,
    stages: Sequence[Evaluation],
    place: int,
    capability: Capability | None = None,
) -> list[Owned]:
    """Return the contents of a rank's memory, each with the actions between which it is in memory."""
    words = [
        f"{_WORDS[kind]} of micro-batch {m}, stage {stage}" for kind, stage, m in strategy.actions[place]
    ]
    words += ["the end of the step"] * 2
    owned: list[Owned] = []
    tensors_of = {}
    for n in strategy.stages_at(place):
        tensors_of[n] = _largest_tensors(strategy.stages[n], stages[n])
        for label, kind, size in zip(_LASTING, MEMORY_KINDS, stages[n].metrics.memory[0], strict=False):
            if size:
                row = f"stage {n}", f"stage {n}", label, kind, float(size), 0, len(words) - 1, "", ""
                owned.append(row)
    for stage, action, what, size, first, end, halfway in alive_at(strategy, stages, place, capability):
        since, kind = (first, end, words[first], words[end]), "kept" if what == KEPT else "transient"
        if action is None:
            label = "reductions and optimizer"
            owned.append((f"stage {stage}", f"stage {stage}", label, kind, size, *since))
            continue
        whose = f"micro-batch {action.micro_batch}"
        label = _LABELS.get(what, f"needed in {'forward' if action.kind == 'F' else 'backward'}")
        # A split backward has other tensors in memory than a whole one.
        of_action = KEPT if what == KEPT else action.kind if what == _NEEDED else ""
        tensors = [] if halfway else tensors_of[stage].get(of_action, [])
        rest = size - sum(bytes_ for *_, bytes_ in tensors)
        if rest < 0:  # another stage on the same devices holds some of the tensors
            tensors, rest = [], size
        rows = [(f"{tensor}, {whose}", of_tensor, bytes_) for tensor, of_tensor, bytes_ in tensors]
        for tensor, of_tensor, bytes_ in [*rows, (whose, label, rest)]:
            if bytes_:
                owned.append((f"stage {stage}", tensor, of_tensor, kind, bytes_, *since))
    return owned
