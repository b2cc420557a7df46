"""A pipeline's step over time: the actions of all places, each as soon as its place is free and its input has
arrived.

The module also lists the messages between the ranks of different stages, in addition to the collectives
within a stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from tensoropt.graph import DTYPE_BYTES
from tensoropt.ops.layouts import local_shape
from tensoropt.pipeline.stages import arriving_group, departing_group
from tensoropt.pipeline.strategy import Action, PipelinedStrategy
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.collectives import Collective

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
            self, forward=(min(first, forward), forward, forward), begin_s=max(first - forward, 0.0)
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
        share = {"B": 1.0, "I": 1.0 - self.weights, "W": self.weights}[action.kind]
        return self.backward[phase] * share


class _ScheduledEvent(NamedTuple):
    """An action, or a message (``S`` for an activation, ``R`` for a gradient), with its start and end.

    After a place's last action come the reduction of its gradients (``G``) and each stage's optimizer
    (``O``), which belong to no micro-batch.
    """

    kind: str
    place: int
    stage: int
    micro_batch: int
    start_s: float
    end_s: float


NO_MICRO_BATCH = -1


@dataclass(frozen=True)
class ScheduleTimes:
    """The times of all actions and messages in a pipeline's step.

    Attributes:
        total_s: seconds until the last stage is done.
        working_s, sending_s: for each place, the seconds of computation with its collectives, and those of
            messages for which it stands still.
        waiting_s: for each place, the seconds that it waits for parameters to be gathered and gradients to be
            reduced.
        happenings: all actions and messages, place by place in order.
        closing: reductions and optimizer steps between a place's last action and the end of its stages.
    """

    total_s: float
    working_s: tuple[float, ...]
    sending_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    happenings: tuple[_ScheduledEvent, ...]
    closing: tuple[_ScheduledEvent, ...]

    def idle_s(self, place: int) -> float:
        """Return the seconds in which a place waits for others."""
        busy_s = self.working_s[place] + self.sending_s[place] + self.waiting_s[place]
        return self.total_s - busy_s

    @property
    def bubble(self) -> float:
        """The share of all places' seconds that they spend waiting."""
        whole = self.total_s * len(self.working_s)
        return sum(map(self.idle_s, range(len(self.working_s)))) / whole if whole else 0.0


def simulate_schedule(
    actions: Sequence[Sequence[Action]],
    stages: Sequence[StageSeconds],
    *,
    blocking_sends: bool = False,
    one_behind: bool = False,
) -> ScheduleTimes:
    """Run the actions of all places, and return the time of each.

    A message is sent as soon as its content exists; messages from one stage in one direction follow one
    another.

    Args:
        actions: the actions of each place, in order.
        stages: the seconds of each stage.
        blocking_sends: whether neither the sending nor the receiving place computes meanwhile, as on CPU
            ranks, whose cores copy messages.
        one_behind: whether a place, as a backward ends, waits for the gradients of its previous backward, so
            that those of no more than one backward are under way.
    """
    return _Run(actions, stages, blocking_sends, one_behind).times()


class _Run:
    def __init__(
        self,
        actions: Sequence[Sequence[Action]],
        stages: Sequence[StageSeconds],
        blocking: bool,
        one_behind: bool,
    ):
        self.actions, self.stages = actions, stages
        self.blocking, self.one_behind = blocking, one_behind
        self.place_of = {action.stage: place for place, own in enumerate(actions) for action in own}
        self.micro_batches = 1 + max(action.micro_batch for own in actions for action in own)
        # When the input of a forward or a backward is there, by (kind, stage, micro-batch).
        self.there: dict[tuple[str, int, int], float] = {}
        self.gathered = self._gathered()
        self.link_free: dict[tuple[str, int], float] = {}
        self.now = [0.0] * len(actions)
        self.working, self.sending, self.waiting = ([0.0] * len(actions) for _ in range(3))
        # When the gradients of each place's earlier backwards are reduced.
        self.reduced = [0.0] * len(actions)
        self.happenings: list[_ScheduledEvent] = []

    def times(self) -> ScheduleTimes:
        done = [0] * len(self.actions)
        left = sum(map(len, self.actions))
        while left:
            before = left
            for place, own in enumerate(self.actions):
                while done[place] < len(own) and self._ready(own[done[place]]):
                    self._do(place, own[done[place]])
                    done[place] += 1
                    left -= 1
            assert left < before, "a schedule waits for itself"
        ends = [max(times) for times in zip(self.now, self.reduced, strict=True)]
        closing = []
        for place, (end, place_done) in enumerate(zip(ends, self.now, strict=True)):
            self.waiting[place] += end - place_done
            if end > place_done:
                closing.append(
                    _ScheduledEvent(
                        "G", place, self.actions[place][-1].stage, NO_MICRO_BATCH, place_done, end
                    )
                )
        for stage, seconds in enumerate(self.stages):
            place = self.place_of[stage]
            start = ends[place]
            ends[place] += seconds.sync_s
            self.working[place] += seconds.sync_s
            if seconds.sync_s:
                closing.append(_ScheduledEvent("O", place, stage, NO_MICRO_BATCH, start, ends[place]))
        of_places = (tuple(self.working), tuple(self.sending), tuple(self.waiting))
        return ScheduleTimes(max(ends), *of_places, tuple(self.happenings), tuple(closing))

    def _gathered(self) -> list[float]:
        """Return the time when each stage's parameters are gathered: a place gathers those of its stages in
        order.
        """
        gathered_s, busy = [], [0.0] * len(self.actions)
        for stage, seconds in enumerate(self.stages):
            place = self.place_of[stage]
            busy[place] += seconds.begin_s
            gathered_s.append(busy[place])
        return gathered_s

    def _needs(self, action: Action) -> tuple[str, int, int] | None:
        kind, stage, micro_batch = action
        if kind == "F":
            return ("F", stage, micro_batch) if stage else None
        if kind == "W":
            return None
        return ("B", stage, micro_batch)

    def _ready(self, action: Action) -> bool:
        needs = self._needs(action)
        return needs is None or needs in self.there

    def _do(self, place: int, action: Action) -> None:
        kind, stage, micro_batch = action
        needs, start = self._needs(action), self.now[place]
        if needs is not None:
            start = max(start, self.there.pop(needs))
        if kind == "F" and self.gathered[stage] > start:
            self.waiting[place] += self.gathered[stage] - start
            start = self.gathered[stage]
        seconds = self.stages[stage].of(action, self.micro_batches)
        end = start + seconds
        if kind != "F" and self.one_behind and self.reduced[place] > end:
            self.waiting[place] += self.reduced[place] - end
            end = self.reduced[place]
        self.happenings.append(_ScheduledEvent(kind, place, stage, micro_batch, start, end))
        self.now[place] = end
        self.working[place] += seconds
        last = len(self.stages) - 1
        if kind in "BW":
            self._reduce(place, self.stages[stage], micro_batch, end)
        if kind == "F":
            if stage == last:
                self.there["B", stage, micro_batch] = end
            else:
                self._send("S", place, stage, stage + 1, micro_batch, self.stages[stage].send_s)
        elif kind in "BI" and stage:
            self._send("R", place, stage, stage - 1, micro_batch, self.stages[stage].send_back_s)

    def _reduce(self, place: int, stage: StageSeconds, micro_batch: int, begin_s: float) -> None:
        """Send a backward's gradients to their shards once the previous ones have arrived."""
        seconds = stage.reduce_s if micro_batch == self.micro_batches - 1 else stage.scatter_s
        if seconds:
            self.reduced[place] = max(self.reduced[place], begin_s) + seconds

    def _send(self, kind: str, place: int, stage: int, to: int, micro_batch: int, seconds: float) -> None:
        arrives = "F" if kind == "S" else "B", to, micro_batch
        if self.place_of[to] == place or not seconds:
            self.there[arrives] = self.now[place]
            return
        start = max(self.now[place], self.link_free.get((kind, stage), 0.0))
        end = start + seconds
        self.link_free[kind, stage] = end
        self.there[arrives] = end
        self.happenings.append(_ScheduledEvent(kind, place, stage, micro_batch, start, end))
        if self.blocking:
            self.now[place] = end
            self.sending[place] += end - start
