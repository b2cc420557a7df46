"""The memory of a pipeline's ranks: tensors of micro-batches, message buffers, and the needs of actions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from tensoropt.costs.effects import MoveEffects
from tensoropt.costs.tables import leaves_model
from tensoropt.evaluation.evaluate import Evaluation
from tensoropt.ops.families.stages import ARRIVE, DEPART
from tensoropt.pipeline.stages import departing_group
from tensoropt.pipeline.strategy import Action, PipelinedStrategy, place_actions, schedule_named, stage_place
from tensoropt.pipeline.timing import arriving_bytes, crossing_bytes, departing_bytes, new_buffer_bytes
from tensoropt.profiling.cuda_kernels import Capability
from tensoropt.profiling.fact_finding import find_split_facts
from tensoropt.profiling.facts import Facts, SplitFacts
from tensoropt.sharding.groups import Group, GroupGraph
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.recording import MEMORY_KINDS, Owned
from tensoropt.simulate.simulator import StepSimulator
from tensoropt.simulate.step import PACKED, lower


class Receipt(NamedTuple):
    """A message that a stage waits for. ``back``: whether it is a gradient from the next stage."""

    back: bool
    stage: int
    micro_batch: int


@lru_cache(maxsize=256)
def _receipts(
    name: str, places: int, per_place: int, micro_batches: int
) -> tuple[tuple[tuple[Receipt, ...], ...], ...]:
    """Return, for each place and action, the receives posted after the previous action."""
    actions = place_actions(name, places, per_place, micro_batches)
    if not schedule_named(name).several:
        return tuple(tuple(_needed(name, places, per_place, action) for action in own) for own in actions)
    return _early(name, places, per_place, actions)


def _needed(name: str, places: int, per_place: int, action: Action) -> tuple[Receipt, ...]:
    kind, stage, micro_batch = action
    sender = stage - 1 if kind == "F" else stage + 1
    if kind == "W" or not 0 <= sender < places * per_place:
        return ()
    own, other_place = (stage_place(name, places, number) for number in (stage, sender))
    return () if own == other_place else (Receipt(kind != "F", stage, micro_batch),)


def _early(
    name: str, places: int, per_place: int, actions: Sequence[Sequence[Action]]
) -> tuple[tuple[tuple[Receipt, ...], ...], ...]:
    # Imported only here, as importing PyTorch's distributed part takes a while.
    from torch.distributed.pipelining.schedules import (
        _Action,
        _add_reduce_grad,
        _add_send_recv,
        _add_unshard_reshard,
        _ComputationType,
    )

    kinds = {
        "F": _ComputationType.FORWARD,
        "B": _ComputationType.FULL_BACKWARD,
        "I": _ComputationType.BACKWARD_INPUT,
        "W": _ComputationType.BACKWARD_WEIGHT,
    }
    words = {kind: letter for letter, kind in kinds.items()}
    consumers = {}
    micro_batches = 1 + max(action.micro_batch for own in actions for action in own)
    for place, own in enumerate(actions):
        theirs = [_Action(action.stage, kinds[action.kind], action.micro_batch) for action in own]
        consumers[place] = _add_reduce_grad(_add_unshard_reshard([*theirs]), micro_batches)  # type: ignore[arg-type]
    lowered = _add_send_recv(
        consumers,  # type: ignore[arg-type]
        stage_to_rank=lambda stage: stage_place(name, places, stage),
        num_stages=places * per_place,
    )
    early = []
    for place in range(places):
        rows: list[tuple[Receipt, ...]] = []
        requested: list[Receipt] = []
        for operation in lowered[place]:
            if operation.computation_type in (_ComputationType.RECV_F, _ComputationType.RECV_B):
                assert operation.microbatch_index is not None
                back = operation.computation_type == _ComputationType.RECV_B
                requested.append(Receipt(back, operation.stage_index, operation.microbatch_index))
            elif operation.computation_type in words:
                rows.append(tuple(requested))
                requested = []
        early.append(tuple(rows))
    return tuple(early)


def taken_back(name: str, actions: Sequence[Sequence[Action]], stage: int) -> dict[int, tuple[int, ...]]:
    """Return the micro-batches whose gradients the previous stage has received when a forward's input
    arrives.

    A message sent after a backward proves that its sender had received that backward's input; schedules that
    wait for their own messages have waited for all of them.
    """
    if not stage:
        return {}
    # The stage whose messages prove it: the sender of the gradient, or its receiver.
    witness = stage if schedule_named(name).waits else stage - 1
    own = next(actions_at for actions_at in actions if any(action.stage == witness for action in actions_at))
    reached, received, reported = {}, list[int](), 0
    for action in own:
        if action.stage == witness and action.kind in "BI":
            received.append(action.micro_batch)
        elif action.stage == witness and action.kind == "F":
            reached[action.micro_batch] = tuple(received[reported:])
            reported = len(received)
    return reached


def taken_on(
    name: str, actions: Sequence[Sequence[Action]], stage: int
) -> dict[tuple[str, int], tuple[int, ...]]:
    """Return the micro-batches known to be received by the next stage, for a stage without backward.

    Keys: ``("F", m)`` when tensors of m are sent, ``("B", m)`` where its backward would be. No gradient
    proves receipt: schedules with one stage per place wait for their sends before the first backward; with
    several, the forward of a later stage at the place proves it.
    """
    schedule, found = schedule_named(name), dict[tuple[str, int], tuple[int, ...]]()
    if stage == max(action.stage for actions_at in actions for action in actions_at):
        return found
    own = next(actions_at for actions_at in actions if any(action.stage == stage for action in actions_at))
    proven = any(action.stage > stage for action in own)
    sent: list[int] = []
    for kind, of_stage, micro_batch in own:
        if of_stage != stage or kind == "W":
            continue
        if schedule.several:
            found["F" if kind == "F" else "B", micro_batch] = (micro_batch,) * (proven and kind != "F")
            continue
        taken = sent if kind != "F" or schedule.waits else []
        found["F" if kind == "F" else "B", micro_batch] = tuple(taken)
        taken.clear()
        if kind == "F":
            sent.append(micro_batch)
    return found


@dataclass(frozen=True)
class _SplitBackward:
    """Bytes of one micro-batch on one rank during a split backward.

    Attributes:
        inputs_bytes: the peak while gradients of arriving tensors are made.
        between_bytes: kept until the gradients of parameters are made, without ``sent_bytes``.
        weights_bytes: the peak while these are made, without the same.
        sent_bytes: gradients sent back and needed until then.
    """

    inputs_bytes: float
    between_bytes: float
    weights_bytes: float
    sent_bytes: float


class _Storage(NamedTuple):
    """The storage of a gradient.

    Attributes:
        tensor: the first tensor whose gradient it holds; "" inside a group.
        reader: the group that made it, if several are summed; or that uses it.
    """

    tensor: str
    reader: str = ""


class _Apart:
    """The first part of a stage's split backward, and what it leaves for the second.

    Nothing is resharded inside such a stage, so a gradient stays in its storage until it is summed.

    Args:
        evaluation: the stage's own.
        given: whether the previous stage is at the same place and holds the arriving tensors.

    Attributes:
        arriving: the arriving tensors, in order.
        inputs_bytes: the peak of the first part.
        apart: the groups with gradients of parameters.
        waiting: group -> storages of its waiting gradients.
        sent: the storages of gradients sent back.
        needed_bytes: activations that the second part needs.
        readers: activation -> its bytes and the groups that need it.
    """

    def __init__(self, evaluation: Evaluation, capability: Capability | None, *, given: bool):
        self.batch, self.candidates = evaluation.batch, evaluation.batch.candidates
        self.graph, self.choices, self.capability = self.batch.graph, evaluation.choices, capability
        self.between_bytes = float(evaluation.metrics.parts.between_bytes[0])
        self.groups = {group.name: group for group in self.graph.groups}
        self.sizes = MoveEffects(self.batch.prices)
        self.lifetimes = tuple(lower(self.batch).lifetimes())
        self.given = given
        self.arriving = tuple(g.writes[0] for g in self.graph.groups if g.anchor.target == ARRIVE)
        self.sent = {self.storage(name) for name in self.arriving}
        self.inputs_bytes, self.apart, self.waiting = self._first_part()
        self.needed_bytes, self.readers = self._needed(self.apart)

    def split(self) -> _SplitBackward:
        elsewhere = self.arriving if self.given else ()
        return _SplitBackward(
            self.inputs_bytes,
            self._left(elsewhere),
            self._weights_bytes(elsewhere),
            _total(self.waiting) - _total(self.waiting, self.sent),
        )

    def _first_part(self) -> tuple[float, dict[str, SplitFacts], dict[str, dict[_Storage, float]]]:
        """Return (peak bytes; groups with gradients of parameters, in backward order; their waiting
        storages).

        No activation is freed before the end; the incoming gradients of parameters' operators stay.
        """
        schedule, simulator = self.batch.schedule, StepSimulator(self.batch)
        transient = np.cumsum(simulator.transient[:, 0])
        of_parameters, lifetimes = self._of_parameters_alone(), self._gradients()
        most = self.between_bytes
        apart: dict[str, SplitFacts] = {}
        waiting: dict[str, dict[_Storage, float]] = {}
        for event in range(schedule.forward_end, schedule.last):
            moment = schedule.moments[event]
            if moment.group in of_parameters:
                continue  # it has no part in the gradients of what arrived
            work, facts = float(simulator.workspace[event, 0]), SplitFacts()
            counted = [(storage, size) for storage, size, first, end in lifetimes if first <= event < end]
            if moment.kind == "compute" and moment.phase == "backward":
                facts, work, incoming = self._group(self.groups[moment.group], work)
                counted += incoming
            more = _total(waiting, [storage for storage, _ in counted])
            most = max(most, self.between_bytes + float(transient[event]) + work + more)
            if facts.waiting_bytes:
                apart[moment.group] = facts
                waiting[moment.group] = self._waiting(self.groups[moment.group], facts)
        return most, apart, waiting

    def _left(self, elsewhere: Collection[str]) -> float:
        """Return the bytes that the first part leaves, without sent gradients or tensors ``elsewhere``."""
        given = sum(size for name, (size, _) in self.readers.items() if name in elsewhere)
        return self.needed_bytes - given + _total(self.waiting, self.sent)

    def _waiting(self, group: Group, facts: SplitFacts) -> dict[_Storage, float]:
        storages, inside = dict[_Storage, float](), float(facts.waiting_bytes)
        for name in group.writes:
            if group.short_names[name] in facts.waiting_results:
                storage = self.storage(name)
                own = storage.tensor if storage.tensor in self.graph.atoms.graph.producer else name
                storages[storage] = max(self._bytes(name), self._bytes(own))
                inside -= self._bytes(name)
        return storages | ({_Storage("", group.name): inside} if inside > 0 else {})

    def _bytes(self, name: str) -> int:
        maker = self.graph.group_of[self.graph.atoms.graph.producer[name].name]
        return self.sizes.bytes(name, self.candidates.configurations(maker)[self._number(maker)].layout(name))

    def storage(self, name: str) -> _Storage:
        readers = self._readers(name)
        if len(readers) != 1 or leaves_model(self.graph, name):
            return _Storage(name)
        return self._given_by(readers[0], name)

    def _given_by(self, reader: Group, name: str) -> _Storage:
        """Return the storage of a reader's gradient; a sum passes its own on."""
        names = {short: name for name, short in reader.short_names.items()}
        of = names.get(self._facts(reader).hands_on.get(reader.short_names[name], ""), name)
        if of in reader.writes:
            return self.storage(of)
        return _Storage(of, reader.name if len(self._readers(of)) > 1 else "")

    def _readers(self, name: str) -> Sequence[Group]:
        return self.batch.schedule.readers.get(name, ())

    def _gradients(self) -> list[tuple[_Storage, int, int, int]]:
        gradients = []
        for named, first, end, *_ in self.lifetimes:
            if named.what == "gradient":
                what, _, number = named.key.partition(" ")
                storage = self.storage(named.tensor)
                if what in ("of", "shared"):
                    storage = self._given_by(self._readers(named.tensor)[int(number)], named.tensor)
                gradients.append((storage, named.bytes, first, end))
        return gradients

    def _needed(self, apart: Mapping[str, SplitFacts]) -> tuple[float, dict[str, tuple[int, set[str]]]]:
        """Return (bytes of activations that the second part needs; tensor -> its bytes and groups)."""
        graph = self.graph.atoms.graph
        makers = {name: group.name for group in self.graph.groups for name in group.writes}
        staying, behind = set(apart), set[str]()
        for group in reversed(self.graph.groups):
            if group.name in staying:
                before = {makers[n] for n in group.reads if graph.tensors[n].requires_grad and n in makers}
                staying |= before
                behind |= before
        # Of a group behind which no other one has parameters, only the part up to its own stays.
        needed = -sum(facts.released_bytes for name, facts in apart.items() if name not in behind)
        readers: dict[str, tuple[int, set[str]]] = {}
        end = self.batch.schedule.forward_end
        for named, first, last, *_ in self.lifetimes:
            if named.kind != "kept" or not first <= end < last:
                continue
            if named.what != "activation":
                needed += named.bytes * (named.operator in staying)
            elif keepers := self._keepers(named.tensor) & staying:
                needed += named.bytes
                size, _ = readers.get(named.tensor, (0, keepers))
                readers[named.tensor] = size + named.bytes, keepers
        return needed, readers

    def _keepers(self, name: str) -> set[str]:
        keepers = set()
        for group in self.graph.groups:
            facts, short = self._facts(group), group.short_names.get(name)
            if name in group.reads and short in facts.reads_kept:
                keepers.add(group.name)
            views = {view for view, of in facts.lies_in.items() if of == short}
            for view in group.writes if views else ():
                if group.short_names[view] in views:
                    keepers |= self._keepers(view)
        return keepers

    def _weights_bytes(self, elsewhere: Collection[str]) -> float:
        """Return the peak while parameters' gradients are made, without sent gradients or ``elsewhere``."""
        order = {parameter.name: n for n, parameter in enumerate(self.graph.atoms.graph.parameters)}

        def first(name: str) -> int:
            group = self.groups[name]
            return min(order[parameter] for parameter in (*group.parameters, *group.shared))

        rest, used = dict(self.waiting), set[str]()
        most = alive = self._left(elsewhere)
        for name in sorted(self.apart, key=first):
            facts, group = self.apart[name], self.groups[name]
            most = max(most, alive + facts.weights_bytes)
            before = _total(rest, self.sent)
            del rest[name]
            used.add(name)
            alive -= before - _total(rest, self.sent) + facts.used_bytes
            for read in group.reads:
                if group.short_names[read] in facts.reads_used and read in self.readers.keys() - set(
                    elsewhere
                ):
                    size, keepers = self.readers[read]
                    alive -= 0 if keepers - used else size
        return most

    def _facts(self, group: Group) -> Facts:
        return self.candidates.facts(group)[self._number(group)]

    def _group(self, group: Group, work: float) -> tuple[SplitFacts, float, list[tuple[_Storage, int]]]:
        """Return (facts of a group's split backward; its bytes in the first part; its incoming storages).

        Args:
            work: its bytes in a whole backward.
        """
        whole = self._facts(group)
        split = find_split_facts(self.candidates.works(group)[self._number(group)], self.capability)
        handed = bool(self.batch.outlasting(group)[0])
        most = whole.handed_peak_bytes if handed else whole.backward_peak_bytes
        # Parameters that are cast once more are alive in either backward.
        needed = (split.own_inputs_bytes if handed else split.inputs_bytes) + max(work - most, 0.0)
        incoming = [] if handed else [(self.storage(name), self._bytes(name)) for name in group.writes]
        return split, needed, incoming

    def _number(self, group: Group) -> int:
        return int(self.choices[group.name][0])

    def _of_parameters_alone(self) -> frozenset[str]:
        graph = self.graph.atoms.graph
        fixed = {tensor.name for tensor in graph.tensors.values() if tensor.kind in ("buffer", "constant")}
        learning = {tensor.name for tensor in graph.parameters if tensor.requires_grad}
        for op in graph.operators:
            if learning.intersection(op.inputs()) and learning.union(fixed).issuperset(op.inputs()):
                learning.update(op.outputs)
        return frozenset(g.name for g in self.graph.groups if g.writes and learning.issuperset(g.writes))


def _total(waiting: Mapping[str, Mapping[_Storage, float]], without: Collection[_Storage] = ()) -> float:
    storages = {name: size for of_group in waiting.values() for name, size in of_group.items()}
    return sum(size for name, size in storages.items() if name not in without)


def memory_of_places(
    strategy: PipelinedStrategy,
    stages: Sequence[Evaluation],
    actions: Sequence[Sequence[Action]],
    capability: Capability | None = None,
) -> np.ndarray:
    """Return (places, 5) peak bytes by kind; of equal peaks, the first."""
    peaks = []
    for place, own in enumerate(actions):
        curve = np.array([kinds for _, kinds in memory_of_actions(strategy, stages, place, own, capability)])
        peaks.append(curve[curve.sum(axis=1).argmax()])
    return np.array(peaks)


class _ActionRecorder(Protocol):
    """Records what a place has alive in its actions, in order."""

    def keep(self, action: Action, change: float) -> None:
        """Record the bytes by which an action changes what its micro-batch keeps."""

    def add(self, action: Action, needed: float, on_the_way: float, trailing: float) -> None:
        """Record an action.

        Args:
            needed: its own bytes.
            on_the_way, trailing: see :class:`_TransientMemory`.
        """

    def finish(self, needed: Mapping[int, float]) -> None:
        """Record the end of the step, with the bytes of all stages at once."""


def memory_of_actions(
    strategy: PipelinedStrategy,
    stages: Sequence[Evaluation],
    place: int,
    actions: Sequence[Action],
    capability: Capability | None = None,
    ledger: _ActionRecorder | None = None,
) -> Iterator[tuple[Action | None, np.ndarray]]:
    """Yield the peak (5,) by kind on a rank of a place, for each action and after the last.

    Parameters, gradients and optimizer state are permanent; to them come the tensors that micro-batches keep
    between forward and backward, an action's own, and buffers of messages not known to be complete.

    Args:
        actions: all actions of the place, in order.
        ledger: records the owners of these bytes.
    """
    numbers = strategy.stages_at(place)
    lasting = np.sum([stages[n].metrics.memory[0] for n in numbers], axis=0)
    lasting[3:] = 0.0
    alive = _TransientMemory(strategy, stages, place, capability)
    for number, action in enumerate(actions):
        before = alive.kept
        needed = alive.begin(number, action)
        if ledger is not None:
            ledger.keep(action, alive.kept - before)
            ledger.add(action, needed, alive.on_the_way, alive.trailing)
        transient = needed + alive.on_the_way + alive.trailing
        yield action, lasting + np.array([0.0, 0.0, 0.0, alive.kept, transient])
        before = alive.kept
        alive.end(action)
        if ledger is not None:
            ledger.keep(action, alive.kept - before)
    end = {n: float(stages[n].metrics.parts.end_bytes[0]) for n in numbers}
    if ledger is not None:
        ledger.finish(end)
    yield None, lasting + np.array([0.0, 0.0, 0.0, 0.0, sum(end.values())])


_NAMED = 8
"""The tensors of a stage's micro-batch listed by name, to bound plan files; an assumption."""


class _StageTensors:
    """The tensors of one micro-batch that a stage has alive, the largest by name.

    Args:
        evaluation: the stage's own, or that of an equal stage with other names.
        given: whether the previous stage is at the same place and holds the arriving tensors.

    Attributes:
        between: (tensor, label, bytes) between forward and backward.
        forward, backward: the same at the peaks of forward and backward.
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
    """The owners of a place's memory: per action, bytes by (stage, micro-batch or tensor, label, kind)."""

    def __init__(self, strategy: PipelinedStrategy, stages: Sequence[Evaluation], numbers: Sequence[int]):
        self.entries: list[dict[tuple[str, str, str, str], float]] = []
        self._tensors = {
            n: _StageTensors(strategy.stages[n], stages[n], given=strategy.shares_arriving(n))
            for n in numbers
        }
        self._first = strategy.forward_only
        self._kept: dict[tuple[int, int], float] = {}
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


class _TransientMemory:
    """The transient memory of a rank during a step.

    Attributes:
        kept: bytes that micro-batches keep between their actions.
        on_the_way: bytes of message buffers and of new values of buffers.
        trailing: bytes of the last backward's gradients, until the next one ends.
    """

    def __init__(
        self,
        strategy: PipelinedStrategy,
        stages: Sequence[Evaluation],
        place: int,
        capability: Capability | None,
    ):
        self.schedule, self.last = schedule_named(strategy.schedule), len(strategy.stages) - 1
        # The first stage with a backward, which returns no gradients.
        self.first = strategy.forward_only
        self.at_place = frozenset(strategy.stages_at(place))
        self.kept = self.on_the_way = self.trailing = 0.0
        self._micro_batches = strategy.micro_batches
        self._buffers = {n: new_buffer_bytes(strategy.stages[n]) for n in self.at_place}
        # The last bytes that a schedule that waits has sent.
        self._sent = 0.0
        # The micro-batches of stages whose gradients of parameters are still to be made: the bytes that only
        # these need of gradients that have gone back.
        self._half_done: dict[tuple[int, int], float] = {}
        shape = strategy.places, len(stages) // strategy.places, strategy.micro_batches
        self._expected = _receipts(strategy.schedule, *shape)[place]
        self._taken, self._taken_on = _taken(strategy.schedule, *shape)
        self._arriving = {n: arriving_bytes(strategy, n) for n in self.at_place}
        self._back = {n: _back_bytes(strategy, n, stages[n]) for n in self.at_place}
        # A stage at this place passes them on as they are.
        self._coming_back = {
            n: self._back.get(n + 1, departing_bytes(strategy, n, learning=True)) for n in self.at_place
        }
        # What a stage at this place has made, which holds it until its own backward.
        shares = strategy.shares_arriving
        self._given = {n: self._arriving[n] if shares(n) else 0 for n in self.at_place}
        self._given_between = {n: _kept_given(stages[n]) if shares(n) else 0 for n in self.at_place}
        # What a stage without a backward holds until it has come, and one with a backward until that.
        self._sent_on = {n: departing_bytes(strategy, n) for n in self.at_place if n < self.first}
        self._sent_with = {
            n: _sent_bytes(strategy, n, stages[n], given=shares(n)) if n >= self.first else 0
            for n in self.at_place
        }
        self._parts = {n: stages[n].metrics.parts for n in self.at_place}
        apart = [n for n in self.at_place if n > self.first and self.schedule.apart]
        self._split = {n: _Apart(stages[n], capability, given=shares(n)).split() for n in apart}

    def begin(self, number: int, action: Action) -> float:
        """Begin the ``number``-th action and return its own bytes, taking over memory counted elsewhere."""
        kind, stage, micro_batch = action
        self.on_the_way += sum(map(self._room, self._expected[number]))
        if kind != "F" and stage < self.first:
            if kind in "BI":
                self._release_sent("B", stage, micro_batch)
            return 0.0
        parts, shared = self._parts[stage], self._given_between[stage]
        between = float(parts.between_bytes[0]) + self._sent_with[stage] - shared
        if kind == "F":
            if stage and (stage - 1 not in self.at_place or stage <= self.first):
                self.on_the_way -= self._arriving[stage]
            self._release_arrived(stage, micro_batch)
            # At its end all that is sent is alive, of which the simulator knows only what backward keeps.
            return max(float(parts.forward_bytes[0]) - self._given[stage], self._sent_on.get(stage, 0))
        if kind in "BI" and stage < self.last:
            # Received by message, or taken from the next stage at this place.
            self.on_the_way -= self._coming_back[stage]
        if kind == "B" or stage == self.first:
            if kind == "I":
                self.kept -= self._sent_with[stage]
                return self._coming_back[stage]
            if kind == "W":
                between += self._coming_back[stage] - self._sent_with[stage]
            self.kept -= between
            return self._with_gradients(stage, float(parts.backward_bytes[0])) - shared
        split = self._split[stage]
        if kind == "I":
            self.kept -= between
            return self._with_gradients(stage, split.inputs_bytes) - shared
        self.kept -= split.between_bytes
        return split.weights_bytes

    def end(self, action: Action) -> None:
        kind, stage, micro_batch = action
        if kind != "F" and stage < self.first:
            return
        if kind == "F":
            self.kept += float(self._parts[stage].between_bytes[0]) + self._sent_with[stage]
            self.kept -= self._given_between[stage]
            if stage < self.first:
                self.on_the_way += self._sent_on[stage]
                self._release_sent("F", stage, micro_batch)
            if micro_batch == self._micro_batches - 1:
                self.on_the_way += self._buffers[stage]
        elif kind == "I":
            # No stage waits for a gradient of the first one with a backward: all of that comes later.
            whole = stage == self.first
            self.kept += self._coming_back[stage] if whole else self._split[stage].between_bytes
        if kind == "I" and stage > self.first:
            self._half_done[stage, micro_batch] = 0.0
        if kind == "W":
            self.on_the_way -= self._half_done.pop((stage, micro_batch), 0.0)
        if kind in "BI" and stage > self.first:
            back = self._back[stage]
            self.on_the_way += back - self._sent
            if self.schedule.waits:
                self._sent = back
        if kind != "F":
            trailing = self._parts[stage].trailing_bytes[0]
            self.trailing = (
                0.0 if kind == "I" else float(trailing[int(micro_batch == self._micro_batches - 1)])
            )

    def _room(self, receipt: Receipt) -> float:
        return self._coming_back[receipt.stage] if receipt.back else self._arriving[receipt.stage]

    def _with_gradients(self, stage: int, needed: float) -> float:
        kept = float(self._parts[stage].between_bytes[0]) + self._sent_with[stage]
        return max(needed, kept + self._coming_back[stage])

    def _release_sent(self, kind: str, stage: int, micro_batch: int) -> None:
        if stage + 1 not in self.at_place:
            self.on_the_way -= self._sent_on[stage] * len(self._taken_on[stage].get((kind, micro_batch), ()))

    def _release_arrived(self, stage: int, micro_batch: int) -> None:
        if self.schedule.waits:
            self.on_the_way -= self._sent
            self._sent = 0.0
        elif stage and stage - 1 not in self.at_place:
            taken = self._taken[stage].get(micro_batch, ())
            self.on_the_way -= sum(self._back[stage] - self._still_needed(stage, m) for m in taken)

    def _still_needed(self, stage: int, micro_batch: int) -> float:
        if (stage, micro_batch) not in self._half_done:
            return 0.0
        self._half_done[stage, micro_batch] = self._split[stage].sent_bytes
        return self._split[stage].sent_bytes


def _arriving_tensors(graph: GroupGraph) -> frozenset[str]:
    return frozenset(group.anchor.outputs[0] for group in graph.groups if group.anchor.target == ARRIVE)


_Found = TypeVar("_Found")


def _once_each(of_stage: Callable[[Evaluation], _Found]) -> Callable[[Evaluation], _Found]:
    known: WeakKeyDictionary[Evaluation, _Found] = WeakKeyDictionary()

    @wraps(of_stage)
    def of(evaluation: Evaluation) -> _Found:
        if evaluation not in known:
            known[evaluation] = of_stage(evaluation)
        return known[evaluation]

    return of


@_once_each
def _kept_given(evaluation: Evaluation) -> int:
    batch = evaluation.batch
    arriving = _arriving_tensors(batch.graph)
    end = batch.schedule.forward_end
    return sum(
        named.bytes
        for named, first, last, *_ in lower(batch).lifetimes()
        if named.tensor in arriving and first <= end < last
    )


def _back_bytes(strategy: PipelinedStrategy, number: int, stage: Evaluation) -> int:
    sent_bytes, tensors = arriving_bytes(strategy, number, learning=True), strategy.graph.atoms.graph.tensors
    learning = [name for name in strategy.parts[number].arriving if tensors[name].requires_grad]
    # Of several, some may share a storage, which is then sent several times.
    return sent_bytes if len(learning) <= 1 else min(sent_bytes, _given_back(stage))


@_once_each
def _given_back(evaluation: Evaluation) -> int:
    batch = evaluation.batch
    position = batch.schedule.position
    groups = [group.name for group in batch.graph.groups if group.anchor.target == ARRIVE]
    all_made = min((position("backward", "compute", name) for name in groups), default=-1)
    # Gradients of parameters may be on their way to their shards then.
    others = {PACKED}.union(tensor.name for tensor in batch.graph.atoms.graph.parameters)
    return sum(
        named.bytes
        for named, first, last, *_ in lower(batch).lifetimes()
        if named.kind != "kept" and first <= all_made < last and named.tensor not in others
    )


def _sent_bytes(strategy: PipelinedStrategy, number: int, stage: Evaluation, *, given: bool) -> int:
    """Return the bytes per micro-batch of tensors without gradient that a stage sends and keeps only until
    its backward.

    Args:
        given: whether the previous stage is at the same place and holds the arriving tensors.
    """
    tensors, graph = strategy.graph.atoms.graph.tensors, stage.batch.graph
    departing = strategy.parts[number].departing
    if all(tensors[name].requires_grad for name in departing):
        return 0
    elsewhere = _kept_tensors(stage) | (_arriving_tensors(graph) if given else frozenset())
    simulated = (group.reads[0] for group in graph.groups if group.anchor.target == DEPART)
    return sum(
        crossing_bytes(strategy.stages[number], departing_group(name), name)
        for name, there in zip(departing, simulated, strict=True)
        if not tensors[name].requires_grad and there not in elsewhere
    )


@_once_each
def _kept_tensors(evaluation: Evaluation) -> frozenset[str]:
    batch = evaluation.batch
    end = batch.schedule.forward_end
    lifetimes = lower(batch).lifetimes()
    return frozenset(named.tensor for named, first, last, *_ in lifetimes if first <= end < last)


_Arrivals = dict[tuple[str, int], tuple[int, ...]]


@lru_cache(maxsize=256)
def _taken(
    name: str, places: int, per_place: int, micro_batches: int
) -> tuple[tuple[dict[int, tuple[int, ...]], ...], tuple[_Arrivals, ...]]:
    actions, stages = place_actions(name, places, per_place, micro_batches), range(places * per_place)
    return (
        tuple(taken_back(name, actions, stage) for stage in stages),
        tuple(taken_on(name, actions, stage) for stage in stages),
    )


_WORDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
_LASTING = ("parameters", "gradients", "optimizer state")


def owned_by_place(
    strategy: PipelinedStrategy,
    stages: Sequence[Evaluation],
    place: int,
    actions: Sequence[Action],
    capability: Capability | None = None,
) -> list[Owned]:
    """Return everything alive on a rank of a place, by the points of its memory curve."""
    ledger = PlaceLedger(strategy, stages, strategy.stages_at(place))
    points = len(list(memory_of_actions(strategy, stages, place, actions, capability, ledger)))
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
