"""A pipeline's step over time: the actions of all places, each as soon as its place is free and its input has
arrived.

The module also lists the messages between the ranks of different stages, in addition to the collectives
within a stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from tensoropt.graph import DTYPE_BYTES
from tensoropt.ops.layouts import local_shape
from tensoropt.pipeline.stages import arriving_group, departing_group
from tensoropt.pipeline.strategy import Action, PipelinedStrategy
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.collectives import Collective
from tensoropt.simulate.timeline import Task, schedule

_PIPELINE = 0
"""The axis of a job's mesh along which its stages lie, numbered as in messages to people, without the
micro-batch axis.
"""


def coordinate(strategy: Strategy, inner: int) -> tuple[int, ...]:
    """Return the coordinates of a stage's rank on the stage's mesh, micro-batches included."""
    place: list[int] = []
    for size in reversed(strategy.mesh[1:]):
        place.insert(0, inner % size)
        inner //= size
    return (0, *place)


def crossing_bytes(strategy: Strategy, group: str, name: str, inner: int | None = None) -> int:
    """Return the bytes of one micro-batch of the tensor that arrives or departs through a group, on one rank
    of the stage; without ``inner`` on the fullest rank.
    """
    layout = strategy.configurations[group].layout(name)
    where = None if inner is None else coordinate(strategy, inner)
    shape = local_shape(strategy.atoms(name), layout, strategy.mesh, where)
    return prod(shape) * strategy.tensor(name).element_bytes


def departing_bytes(strategy: PipelinedStrategy, stage: int, *, learning: bool = False) -> int:
    """Return the bytes that a rank of a stage sends to the next stage for each micro-batch; with ``learning``
    those that come back.
    """
    tensors, own = strategy.graph.atoms.graph.tensors, strategy.stages[stage]
    return sum(
        crossing_bytes(own, departing_group(name), name)
        for name in strategy.parts[stage].departing
        if tensors[name].requires_grad or not learning
    )


def arriving_bytes(strategy: PipelinedStrategy, stage: int, *, learning: bool = False) -> int:
    """Return the bytes that a rank of a stage receives for each micro-batch; with ``learning`` those that it
    sends back.
    """
    tensors, own = strategy.graph.atoms.graph.tensors, strategy.stages[stage]
    return sum(
        crossing_bytes(own, arriving_group(name), name)
        for name in strategy.parts[stage].arriving
        if tensors[name].requires_grad or not learning
    )


def new_buffer_bytes(strategy: Strategy) -> int:
    """Return the bytes of the new values that a stage gives to buffers; every rank of the stage has them
    whole."""
    graph = strategy.graph.atoms.graph
    return sum(graph.tensors[name].bytes for name in graph.mutations) if graph.training else 0


def stored_bytes(strategy: Strategy, name: str, inner: int | None = None) -> int:
    """Return the bytes of a parameter's gradient on one rank of the stage; without ``inner`` on the fullest
    rank."""
    where = None if inner is None else coordinate(strategy, inner)
    shape = local_shape(strategy.atoms(name), strategy.stored[name], strategy.mesh, where)
    return prod(shape) * DTYPE_BYTES[strategy.tensor(name).stored_dtype]


def sent_by_rank(
    strategy: PipelinedStrategy, rank: int, of_stage: Sequence[Mapping[Collective, int]]
) -> Counter[Collective]:
    """Return the collectives that one rank issues in a training step, or in a call for inference.

    Args:
        of_stage: for each stage, the collectives among its ranks; axes are those of its own mesh, from 0.
    """
    inner, sent = rank % strategy.devices_per_place, Counter[Collective]()
    place, source = rank // strategy.devices_per_place, strategy.graph.atoms.graph
    for stage in strategy.stages_at(place):
        for collective, count in of_stage[stage].items():
            sent[collective._replace(axes=tuple(axis + 1 for axis in collective.axes))] += count
        sent += _messages(strategy, stage, rank, inner)
    for name in strategy.tied:
        if source.tensors[name].requires_grad and source.training:
            for stage in strategy.holders(name):
                if strategy.place_of(stage) == place:
                    size = stored_bytes(strategy.stages[stage], name, inner)
                    sent[Collective("all_reduce", (_PIPELINE,), size)] += 1
    for name in (*strategy.sent_buffers, *source.outputs):
        sent[Collective("broadcast", (_PIPELINE,), source.tensors[name].bytes)] += 1
    return sent


def _messages(strategy: PipelinedStrategy, stage: int, rank: int, inner: int) -> Counter[Collective]:
    """Return the messages from one stage to its neighbours; none between stages on the same rank."""
    messages, own, part = Counter[Collective](), strategy.stages[stage], strategy.parts[stage]
    tensors, size = strategy.graph.atoms.graph.tensors, strategy.devices_per_place
    place, training = strategy.place_of(stage), strategy.graph.atoms.graph.training
    for name in part.departing:
        to = strategy.place_of(stage + 1)
        if to != place:
            size_bytes = crossing_bytes(own, departing_group(name), name, inner)
            messages[Collective("send", (rank, to * size + inner), size_bytes)] += strategy.micro_batches
    for name in part.arriving:
        to = strategy.place_of(stage - 1)
        if to != place and training and tensors[name].requires_grad:
            size_bytes = crossing_bytes(own, arriving_group(name), name, inner)
            messages[Collective("send", (rank, to * size + inner), size_bytes)] += strategy.micro_batches
    return messages


_ROUNDING = 1e-9
"""The share of an action below which seconds are rounding; an assumption."""

_PhaseSeconds = tuple[float, float, float]
"""The seconds of the first micro-batch, of each one between, and of the last one."""


@dataclass(frozen=True)
class StageSeconds:
    """The seconds that a stage takes.

    Attributes:
        forward, backward: seconds of the stage's own work and collectives for a micro-batch.
        weights: the share of a backward spent on the gradients of parameters, if a schedule makes them apart.
        begin_s: seconds of gathering parameters from the beginning of the step on, before any input arrives;
            the first forward waits for it.
        reduce_s: seconds of reducing gradients after the stage's last backward, while its place computes
        something else; the step's end waits for it. scatter_s: the same after every backward but the last:
        the reductions of a place run one after another. send_s, send_back_s: seconds of a micro-batch's
        message to the next stage, and of its gradient to the previous one; 0 if both are at one place.
        sync_s: seconds from the end of the stage's last backward to the end of its step: the rest of the
        gradient reduction, and the optimizer.
    """

    forward: _PhaseSeconds
    backward: _PhaseSeconds
    send_s: float = 0.0
    send_back_s: float = 0.0
    sync_s: float = 0.0
    weights: float = 0.5
    begin_s: float = 0.0
    reduce_s: float = 0.0
    scatter_s: float = 0.0

    def gathering_early(self) -> StageSeconds:
        """Return the same seconds with parameters gathered from the step's beginning on, instead of in the
        first forward.
        """
        first, forward, _ = self.forward
        return replace(
            self,
            forward=(min(first, forward), forward, forward),
            # Where nothing is gathered, rounding remains.
            begin_s=first - forward if first - forward > _ROUNDING * first else 0.0,
        )

    def reducing_behind(self, scattering: _PhaseSeconds, buckets_s: float, slower: float) -> StageSeconds:
        """Return the same seconds with gradients under way while the place computes what comes next.

        Args:
            scattering: seconds that each backward waits at its end for gradients on their way to their
            shards. buckets_s: seconds that the end of the step waits for buckets of gradients. slower: the
            share by which communication slows down computation.
        """
        # During s seconds of it, s / (1 + slower) seconds of computing are done: for the same stage's next
        # micro-batch, which the last one lacks.
        first, between, last = self.backward
        return replace(
            self,
            backward=(
                first - scattering[0] / (1.0 + slower),
                between - scattering[1] / (1.0 + slower),
                last - scattering[2],
            ),
            scatter_s=scattering[1],
            reduce_s=scattering[2] + buckets_s,
            sync_s=self.sync_s - buckets_s,
        )

    def communicating_apart(self, scattering: _PhaseSeconds, slower: float) -> StageSeconds:
        """Return the same seconds with all communication that no micro-batch needs moved out of its forward
        and backward.

        As in Megatron-LM's distributed optimizer, parameters are gathered from the beginning of the step on,
        and all gradients are reduced as soon as they are complete, while other micro-batches and earlier
        stages compute.

        Args:
            scattering: seconds that each backward waits at its end for gradients on their way to their
            shards. slower: the share by which communication slows down computation.
        """
        _, between, behind_last = scattering
        # During s seconds of it, s / (1 + slower) seconds of computing are done.
        beside_s = between * slower / (1.0 + slower)
        _, backward, last = self.backward
        backward, last = backward - between + beside_s, last - behind_last
        return replace(
            self.gathering_early(),
            backward=(backward, backward, min(last, backward)),
            reduce_s=max(last - backward, 0.0) + behind_last,
            scatter_s=between,
        )

    def of(self, action: Action, micro_batches: int) -> float:
        """Return the seconds of an action."""
        phase = 2 if action.micro_batch == micro_batches - 1 else min(action.micro_batch, 1)
        if action.kind == "F":
            return self.forward[phase]
        return self.backward[phase] * self.share(action.kind)

    def share(self, kind: str) -> float:
        """Return the share of a forward or a backward that an action of this kind is."""
        return {"W": self.weights, "I": 1.0 - self.weights}.get(kind, 1.0)


class ScheduledEvent(NamedTuple):
    """An action, or something else that takes time, with its start and end.

    The others are gathering parameters from the step's beginning on (``P``), a message (``S`` for an
    activation, ``R`` for a gradient), the reduction of gradients after an action (``G``), and a stage's
    optimizer (``O``). Gathers and the optimizer belong to no micro-batch.
    """

    kind: str
    place: int
    stage: int
    micro_batch: int
    start_s: float
    end_s: float


NO_MICRO_BATCH = -1
WORKING = "FBIWO"
"""The kinds of events in which a place works; in the others its links do."""


class ScheduleTimes:
    """The times of all actions and messages in a pipeline's step, as tasks of the scheduler.

    The tasks themselves are not kept: a step of many micro-batches has 100,000 of them, and a search has many
    steps in memory.

    Args:
        actions: the actions of each place, in order.
        stages: the seconds of each stage.
        blocking_sends: whether neither the sending nor the receiving place computes meanwhile, as on CPU
            ranks, whose cores copy messages.
        one_behind: whether a place, as a backward ends, waits for the gradients of its previous backward, so
            that those of no more than one backward are under way.

    Attributes:
        stages: the seconds of each stage.
        total_s: seconds until the last stage is done.
        working_s, sending_s: for each place, the seconds of computation with its collectives, and those of
            messages for which it stands still.
        waiting_s: for each place, the seconds that it waits for parameters to be gathered and gradients to be
            reduced.
    """

    def __init__(
        self,
        actions: Sequence[Sequence[Action]],
        stages: Sequence[StageSeconds],
        *,
        blocking_sends: bool = False,
        one_behind: bool = False,
    ):
        self.stages = stages
        self._made_of = actions, stages, blocking_sends, one_behind
        tasks = _StepTasks(*self._made_of)
        self.total_s = tasks.timeline.total_s
        self.working_s, self.sending_s, self.waiting_s = tasks.seconds()

    @cached_property
    def happenings(self) -> tuple[ScheduledEvent, ...]:
        """All actions and everything else that takes time, in the order in which they start."""
        return _StepTasks(*self._made_of).happenings()

    def idle_s(self, place: int) -> float:
        """Return the seconds in which a place waits for others."""
        busy_s = self.working_s[place] + self.sending_s[place] + self.waiting_s[place]
        return self.total_s - busy_s

    @property
    def bubble(self) -> float:
        """The share of all places' seconds that they spend waiting."""
        whole = self.total_s * len(self.working_s)
        return sum(map(self.idle_s, range(len(self.working_s)))) / whole if whole else 0.0


class _StepTasks:
    """A pipeline's step as tasks, and when they take place.

    A message is sent as soon as its content exists; messages from one stage in one direction follow one
    another.
    """

    def __init__(
        self,
        actions: Sequence[Sequence[Action]],
        stages: Sequence[StageSeconds],
        blocking_sends: bool,
        one_behind: bool,
    ):
        self._actions, self.stages = actions, stages
        self._blocking, self._one_behind = blocking_sends, one_behind
        self._place_of = {action.stage: place for place, own in enumerate(actions) for action in own}
        self._micro_batches = 1 + max(action.micro_batch for own in actions for action in own)
        self._tasks: list[Task] = []
        # The kind, place, stage and micro-batch of the tasks that people see.
        self._labels: dict[int, tuple[str, int, int, int]] = {}
        # The task that brings the input of a forward or a backward, by (kind, stage, micro-batch); the
        # predecessors of a task that has such an input, and the input.
        self._brings: dict[tuple[str, int, int], int] = {}
        self._needs: list[tuple[list[int], tuple[str, int, int]]] = []
        # (place, task, those of its predecessors for which the place stands still).
        self._waits: list[tuple[int, int, list[int]]] = []
        # The task with which an action is over, if that is not itself.
        self._over: dict[int, int] = {}
        gathers = self._gather()
        # For each place, the task with which its last action is over, and its last reduction.
        self._last = [self._act(place, gathers) for place in range(len(actions))]
        for after, key in self._needs:
            after.append(self._brings[key])
        ends = [[action, *reduction] for action, reduction in self._last]
        for stage, seconds in enumerate(stages):
            place = self._place_of[stage]
            step = self._add("optimizer", seconds.sync_s, ends[place])
            if seconds.sync_s:
                self._labels[step] = "O", place, stage, NO_MICRO_BATCH
            ends[place] = [step]
        self.timeline = schedule(self._tasks)

    def seconds(self) -> Iterator[tuple[float, ...]]:
        """Return the seconds of each place: working, sending and waiting."""
        starts, ends = self.timeline.starts, self.timeline.ends
        working, sending, waiting = ([0.0] * len(self._actions) for _ in range(3))
        for task, (kind, place, _, _) in self._labels.items():
            if kind in WORKING:
                working[place] += self._tasks[task].duration_s
            elif kind in "SR" and self._blocking:
                sending[place] += ends[task] - starts[task]
        for place, task, awaited in self._waits:
            others = (ends[i] for i in self._tasks[task].after if i not in awaited)
            waiting[place] += starts[task] - max(others, default=0.0)
        for place, (action, reduction) in enumerate(self._last):
            waiting[place] += max(ends[i] for i in (action, *reduction)) - ends[action]
        return map(tuple, (working, sending, waiting))

    def happenings(self) -> tuple[ScheduledEvent, ...]:
        """Return all that takes time, in the order in which it starts."""
        return tuple(self._event(task) for task in self.timeline.order if task in self._labels)

    def _event(self, task: int) -> ScheduledEvent:
        start, end = self.timeline.starts[task], self.timeline.ends[self._over.get(task, task)]
        return ScheduledEvent(*self._labels[task], start, end)

    def _add(self, name: str, seconds: float, after: list[int], *resources: str) -> int:
        self._tasks.append(Task(name, seconds, resources, after))
        return len(self._tasks) - 1

    def _gather(self) -> list[list[int]]:
        """Return the last gather that each stage waits for: a place gathers for its stages in order."""
        of_places, of_stages = [list[int]() for _ in self._actions], []
        for stage, seconds in enumerate(self.stages):
            place = self._place_of[stage]
            if seconds.begin_s:
                gather = self._add("gather", seconds.begin_s, of_places[place])
                self._labels[gather] = "P", place, stage, NO_MICRO_BATCH
                of_places[place] = [gather]
            of_stages.append(of_places[place])
        return of_stages

    def _act(self, place: int, gathers: Sequence[list[int]]) -> tuple[int, list[int]]:
        """State the actions of a place, and what follows from each."""
        before, reduced, begun = list[int](), list[int](), set[int]()
        for action in self._actions[place]:
            kind, stage, micro_batch = action
            seconds = self.stages[stage]
            work = self._add(kind, seconds.of(action, self._micro_batches), before)
            self._labels[work] = kind, place, stage, micro_batch
            if kind != "W" and (kind != "F" or stage):
                self._needs.append((before, ("F" if kind == "F" else "B", stage, micro_batch)))
            if kind == "F" and stage not in begun and gathers[stage]:
                before.extend(gathers[stage])
                self._waits.append((place, work, gathers[stage]))
                begun.add(stage)
            end = work
            if kind != "F" and self._one_behind and reduced:
                end = self._over[work] = self._add("wait", 0.0, [work, *reduced])
                self._waits.append((place, end, reduced))
            # Its gradients go to their shards once the previous ones have arrived.
            is_last = micro_batch == self._micro_batches - 1
            if kind in "BW" and (reduce_s := seconds.reduce_s if is_last else seconds.scatter_s):
                reduced = [self._add("reduce", reduce_s, [end, *reduced])]
                self._labels[reduced[0]] = "G", place, stage, micro_batch
            goes_on = end
            if kind == "F" and stage == len(self.stages) - 1:
                self._brings["B", stage, micro_batch] = end
            elif kind == "F":
                goes_on = self._send("S", action, stage + 1, seconds.send_s, end)
            elif kind != "W" and stage:
                goes_on = self._send("R", action, stage - 1, seconds.send_back_s, end)
            before = [goes_on]
        return before[0], reduced

    def _send(self, kind: str, action: Action, to: int, seconds: float, end: int) -> int:
        """State the message after an action, and return the task after which its place goes on."""
        stage, place = action.stage, self._place_of[action.stage]
        arrives = "F" if kind == "S" else "B", to, action.micro_batch
        if self._place_of[to] == place or not seconds:
            self._brings[arrives] = end
            return end
        message = self._brings[arrives] = self._add(kind, seconds, [end], f"{kind} of stage {stage}")
        self._labels[message] = kind, place, stage, action.micro_batch
        return message if self._blocking else end
