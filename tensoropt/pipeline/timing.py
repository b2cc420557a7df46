"""The timing of a pipeline's step: an action starts when its devices are free and its input has arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from tensoropt.errors import PlanError
from tensoropt.graph import DTYPE_BYTES
from tensoropt.ops.layouts import local_shape
from tensoropt.pipeline.stages import arriving_group, departing_group
from tensoropt.pipeline.strategy import Action, PipelinedStrategy
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.collectives import Collective
from tensoropt.simulate.timeline import by_predecessor, take_place
from tensoropt.types import Itself

_PIPELINE = 0
"""The number of the pipeline's axis in a job's mesh, not counting the micro-batch axis."""


def coordinate(strategy: Strategy, inner: int) -> tuple[int, ...]:
    """Return the mesh coordinates of a stage's rank number ``inner``, with 0 for the micro-batch axis."""
    return (0, *map(int, np.unravel_index(inner, strategy.mesh[1:])))


def crossing_bytes(strategy: Strategy, group: str, name: str, inner: int | None = None) -> int:
    """Return a crossing tensor's bytes per micro-batch on a stage's rank ``inner`` or on the fullest."""
    layout = strategy.configurations[group].layout(name)
    where = None if inner is None else coordinate(strategy, inner)
    shape = local_shape(strategy.atoms(name), layout, strategy.mesh, where)
    return prod(shape) * strategy.tensor(name).element_bytes


def departing_bytes(strategy: PipelinedStrategy, stage: int, *, learning: bool = False) -> int:
    """Return the bytes of activations that a rank sends per micro-batch or, if ``learning``, of the
    gradients that the next stage returns.
    """
    names = strategy.parts[stage].departing
    return message_bytes(strategy.stages[stage], names, departing_group, learning=learning)


def arriving_bytes(strategy: PipelinedStrategy, stage: int, *, learning: bool = False) -> int:
    """Return the bytes of activations that a rank receives per micro-batch or, if ``learning``, of the
    gradients that it returns to the previous stage.
    """
    names = strategy.parts[stage].arriving
    return message_bytes(strategy.stages[stage], names, arriving_group, learning=learning)


def message_bytes(
    own: Strategy, names: Sequence[str], group: Callable[[str], str], *, learning: bool = False
) -> int:
    """Return the bytes per micro-batch, on the fullest rank, of tensors that a stage receives or sends.

    ``own``: the stage's strategy. ``group``: tensor -> the operator group that receives or sends it. With
    ``learning``, only tensors with gradients count.
    """
    crossing = (name for name in names if own.tensor(name).requires_grad or not learning)
    return sum(crossing_bytes(own, group(name), name) for name in crossing)


def stored_bytes(strategy: Strategy, name: str, inner: int | None = None) -> int:
    """Return the bytes of a parameter's gradient on a stage's rank ``inner``, or on the fullest rank."""
    where = None if inner is None else coordinate(strategy, inner)
    shape = local_shape(strategy.atoms(name), strategy.stored[name], strategy.mesh, where)
    return prod(shape) * DTYPE_BYTES[strategy.tensor(name).stored_dtype]


def sent_by_rank(
    strategy: PipelinedStrategy, rank: int, of_stage: Sequence[Mapping[Collective, int]]
) -> Counter[Collective]:
    """Return how often a rank issues each collective in a call, given the collectives within each stage."""
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
    messages, own, part = Counter[Collective](), strategy.stages[stage], strategy.parts[stage]
    tensors, size = strategy.graph.atoms.graph.tensors, strategy.devices_per_place
    place, training = strategy.place_of(stage), strategy.graph.atoms.graph.training
    back = (name for name in part.arriving if training and tensors[name].requires_grad)
    sent = [(name, departing_group(name), stage + 1) for name in part.departing]
    sent += [(name, arriving_group(name), stage - 1) for name in back]
    for name, group, other in sent:
        if (to := strategy.place_of(other)) != place:
            size_bytes = crossing_bytes(own, group, name, inner)
            messages[Collective("send", (rank, to * size + inner), size_bytes)] += strategy.micro_batches
    return messages


_ROUNDING = 1e-9
"""The share of a duration below which a difference counts as rounding; an assumption."""

_PhaseSeconds = tuple[float, float, float]
"""Durations in seconds in the first micro-batch, in each middle one, and in the last."""


@dataclass(frozen=True)
class StageSeconds:
    """The durations in seconds of everything that a stage does in a step.

    Attributes:
        forward, backward: a micro-batch's computation, and collectives that it waits for.
        weights: the share of a split backward spent on the gradients of parameters.
        begin_s: gathering parameters from the step's beginning on, before the first forward.
        reduce_s: reducing gradients after the last backward, while other stages compute.
        scatter_s: reducing gradients after each earlier backward.
        send_s, send_back_s: a message to the next stage, and to the previous one; 0 on the same devices.
        sync_s: from the last backward to the end of the step: the remaining reduction, the optimizer.
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
        """Return the durations if parameters are gathered as the step begins, not in the first forward."""
        first, forward, _ = self.forward
        return replace(
            self,
            forward=(min(first, forward), forward, forward),
            # Where nothing is gathered, rounding remains.
            begin_s=first - forward if first - forward > _ROUNDING * first else 0.0,
        )

    def reducing_behind(self, scattering: _PhaseSeconds, buckets_s: float, slower: float) -> StageSeconds:
        """Return the durations if gradients are reduced while the devices go on computing.

        Args:
            scattering: seconds that the first, a middle and the last backward wait for reduce-scatters.
            buckets_s: seconds that the end of the step waits for the reduction of gradient buckets.
            slower: the share by which communication slows down computation.
        """
        # During s seconds of scattering, s / (1 + slower) seconds of computing are done: for the same stage's
        # next micro-batch, which the last one lacks.
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
        """Return the durations if all communication is outside of forward and backward.

        As in Megatron-LM's distributed optimizer, parameters are gathered from the step's beginning on, and
        gradients are reduced as soon as they are complete. ``scattering``: seconds that the first, a middle
        and the last backward wait for reduce-scatters. ``slower``: the share by which these slow computation.
        """
        _, between, behind_last = scattering
        # During s seconds of scattering, s / (1 + slower) seconds of computing are done.
        beside_s = between * slower / (1.0 + slower)
        _, backward, last = self.backward
        backward, last = backward - between + beside_s, last - behind_last
        return replace(
            self.gathering_early(),
            backward=(backward, backward, min(last, backward)),
            reduce_s=max(last - backward, 0.0) + behind_last,
            scatter_s=between,
        )

    @property
    def parts(self) -> frozenset[str]:
        """The names of the parts of a step, besides forward and backward, that take time."""
        return frozenset(part for part in _PARTS if getattr(self, f"{part}_s"))

    @property
    def durations(self) -> tuple[float, ...]:
        """All durations in seconds, in the order of :data:`DURATIONS`."""
        backward = (self.share(kind) * seconds for kind in "BIW" for seconds in self.backward)
        return *self.forward, *backward, *(getattr(self, f"{part}_s") for part in _PARTS), 0.0

    def share(self, kind: str) -> float:
        """Return the share of a whole forward or backward that an action of this kind takes."""
        return {"W": self.weights, "I": 1.0 - self.weights}.get(kind, 1.0)


_PARTS = "begin", "scatter", "reduce", "send", "send_back", "sync"
"""Names of the parts of a stage's step besides forward and backward, as in :class:`StageSeconds`."""
DURATIONS = (*(f"{kind}{phase}" for kind in "FBIW" for phase in range(3)), *_PARTS, "nothing")
"""Names of a stage's durations: actions of the first, a middle and the last micro-batch, then the rest."""


def _phase_of(micro_batch: int, micro_batches: int) -> int:
    return 2 if micro_batch == micro_batches - 1 else min(micro_batch, 1)


class ScheduledEvent(NamedTuple):
    """An action or another event of a pipeline's step, with its start and end.

    The ``kind`` of other events is ``P`` for gathers as the step begins, ``S`` for messages of activations,
    ``R`` for messages of gradients, ``G`` for reductions after an action, and ``O`` for a stage's optimizer.
    """

    kind: str
    place: int
    stage: int
    micro_batch: int
    start_s: float
    end_s: float


NO_MICRO_BATCH = -1
WORKING = "FBIWO"
"""The kinds of events that occupy devices; other kinds occupy links."""


class ScheduleTimes:
    """The times of all actions and messages in a pipeline's step.

    Args:
        actions: the actions of each device group, in order.
        blocking_sends: whether a message blocks both device groups, as on CPU ranks, whose cores copy it.
        one_behind: whether the end of a backward waits until the previous backward's gradients are reduced.
        forward_only: the number of stages, from the first one on, without backward.

    Attributes:
        total_s: seconds until the last stage is done.
        working_s, sending_s: by device group, seconds of computation and its collectives, and of messages.
        waiting_s: by device group, seconds of waiting for gathers and reductions.

    Raises:
        PlanError: a duration is negative or not finite, or actions deadlock.
    """

    def __init__(
        self,
        actions: Sequence[Sequence[Action]],
        stages: Sequence[StageSeconds],
        *,
        blocking_sends: bool = False,
        one_behind: bool = False,
        forward_only: int = 0,
    ):
        self.stages = stages
        parts = tuple(seconds.parts for seconds in stages)
        self._tasks = _step_tasks(Itself(actions), parts, blocking_sends, one_behind, forward_only)
        # Times of tasks are not kept: a step has up to 100,000 tasks, and a search has many steps in memory.
        durations, starts, ends, _ = self._tasks.times(stages)
        self.total_s = float(ends.max())
        self.working_s, self.sending_s, self.waiting_s = self._tasks.seconds(durations, starts, ends)

    @cached_property
    def happenings(self) -> tuple[ScheduledEvent, ...]:
        """All events, ordered by start."""
        return self._tasks.happenings(self.stages)

    def idle_s(self, place: int) -> float:
        busy_s = self.working_s[place] + self.sending_s[place] + self.waiting_s[place]
        return self.total_s - busy_s

    @property
    def bubble(self) -> float:
        """The share of the step in which devices are idle, on average over the device groups."""
        whole = self.total_s * len(self.working_s)
        return sum(map(self.idle_s, range(len(self.working_s)))) / whole if whole else 0.0


class _StepTasks:
    """A step's tasks and their dependencies, shared by pipelines that differ only in durations."""

    def __init__(
        self,
        shared: Itself[Sequence[Sequence[Action]]],
        parts: tuple[frozenset[str], ...],
        blocking_sends: bool,
        one_behind: bool,
        forward_only: int,
    ):
        actions = shared.content
        self._actions, self._parts = actions, parts
        self._blocking, self._one_behind, self._forward_only = blocking_sends, one_behind, forward_only
        self._place_of = {action.stage: place for place, own in enumerate(actions) for action in own}
        self._micro_batches = 1 + max(action.micro_batch for own in actions for action in own)
        # Of each task: its stage, its name in DURATIONS, its channel, its predecessors.
        self._stages, self._whats, self._channels = list[int](), list[str](), list[int]()
        self._after: list[list[int]] = []
        # The kind, device group, stage and micro-batch of the tasks that reports show.
        self._labels: dict[int, tuple[str, int, int, int]] = {}
        # The task that brings the input of a forward or a backward, by (kind, stage, micro-batch); the
        # predecessors of a task that has such an input, and the input.
        self._brings: dict[tuple[str, int, int], int] = {}
        self._needs: list[tuple[list[int], tuple[str, int, int]]] = []
        # (device group, task, those of its predecessors for which the devices stand still).
        self._waits: list[tuple[int, int, list[int]]] = []
        # The task with which an action is over, if it is another one than the action's own.
        self._over: dict[int, int] = {}
        gathers = self._gather()
        # For each device group, the task with which its last action is over, and its last reduction.
        self._last = [self._act(place, gathers) for place in range(len(actions))]
        for after, key in self._needs:
            after.append(self._brings[key])
        ends = [[action, *reduction] for action, reduction in self._last]
        for stage, own in enumerate(parts):
            place = self._place_of[stage]
            step = self._add("sync", stage, ends[place])
            if "sync" in own:
                self._labels[step] = "O", place, stage, NO_MICRO_BATCH
            ends[place] = [step]
        self._finish()

    def _finish(self) -> None:
        count = len(self._after)
        self._where = np.array(self._stages), np.array([DURATIONS.index(what) for what in self._whats])
        before = np.array([i for after in self._after for i in after], dtype=np.int64)
        behind = np.repeat(np.arange(count), [len(after) for after in self._after])
        # A channel is occupied by one message at a time, and none slows down work.
        channels, none = np.arange(2 * len(self._parts) + 1), np.zeros(0, dtype=np.int64)
        self._columns = (
            *by_predecessor(before, behind, count),
            np.array(self._channels),
            channels,
            channels[:-1],
            np.zeros_like(channels),
            none,
            np.full(count, -1),
            0.0,
        )
        seen = np.array(list(self._labels), dtype=np.int64)
        places = np.array([place for _, place, _, _ in self._labels.values()], dtype=np.int64)
        kinds = np.array([kind for kind, *_ in self._labels.values()])
        self._working = seen[np.isin(kinds, list(WORKING))], places[np.isin(kinds, list(WORKING))]
        self._sending = seen[np.isin(kinds, ["S", "R"])], places[np.isin(kinds, ["S", "R"])]
        # For each wait: its device group, its task, and the task's other predecessors, or the step's
        # beginning.
        others = [
            [count, *(i for i in self._after[task] if i not in awaited)] for _, task, awaited in self._waits
        ]
        self._stands = (
            np.array([place for place, _, _ in self._waits], dtype=np.int64),
            np.array([task for _, task, _ in self._waits], dtype=np.int64),
            np.array([i for of_wait in others for i in of_wait], dtype=np.int64),
            np.cumsum([0, *map(len, others[:-1])]) if others else np.zeros(0, dtype=np.int64),
        )
        del self._stages, self._whats, self._channels, self._after, self._needs, self._brings, self._waits

    def times(self, stages: Sequence[StageSeconds]) -> tuple[np.ndarray, ...]:
        """Return the durations, starts and ends of all tasks in seconds, and the order of their starts."""
        durations = np.array([seconds.durations for seconds in stages])[self._where]
        if not (np.isfinite(durations) & (durations >= 0)).all():
            number = int(np.argmin(np.isfinite(durations) & (durations >= 0)))
            what, stage = DURATIONS[self._where[1][number]], int(self._where[0][number])
            raise PlanError(
                f"{what} of stage {stage} takes {durations[number]} s; durations are finite and at least 0"
            )
        starts, ends, order = take_place(durations, *self._columns)
        if len(order) < len(durations):
            raise PlanError(
                f"{len(durations) - len(order)} actions and messages of a pipeline wait for each other in "
                "a cycle; give an order without a cycle"
            )
        return durations, starts, ends, order

    def seconds(
        self, durations: np.ndarray, starts: np.ndarray, ends: np.ndarray
    ) -> tuple[tuple[float, ...], ...]:
        count = len(self._actions)

        def of_places(tasks: tuple[np.ndarray, np.ndarray], seconds: np.ndarray) -> np.ndarray:
            return np.bincount(tasks[1], weights=seconds[tasks[0]], minlength=count)

        working = of_places(self._working, durations)
        sending = of_places(self._sending, ends - starts) if self._blocking else np.zeros(count)
        waiting = np.zeros(count)
        place_of, tasks, others, first = self._stands
        if len(tasks):
            free = np.maximum.reduceat(np.append(ends, 0.0)[others], first)
            waiting += np.bincount(place_of, weights=starts[tasks] - free, minlength=count)
        for place, (action, reduction) in enumerate(self._last):
            waiting[place] += max(ends[i] for i in (action, *reduction)) - ends[action]
        return tuple(tuple(map(float, of_kind)) for of_kind in (working, sending, waiting))

    def happenings(self, stages: Sequence[StageSeconds]) -> tuple[ScheduledEvent, ...]:
        _, starts, ends, order = self.times(stages)
        return tuple(
            ScheduledEvent(*self._labels[task], float(starts[task]), float(ends[self._over.get(task, task)]))
            for task in order.tolist()
            if task in self._labels
        )

    def _add(self, what: str, stage: int, after: list[int], channel: int = -1) -> int:
        self._stages.append(stage)
        self._whats.append(what)
        self._channels.append(channel)
        self._after.append(after)
        return len(self._after) - 1

    def _gather(self) -> list[list[int]]:
        """Add the tasks that gather the stages' parameters, one after another on each device group.

        Return, for each stage, its task or, if it gathers nothing, the previous one on its device group.
        """
        of_places, of_stages = [list[int]() for _ in self._actions], []
        for stage, own in enumerate(self._parts):
            place = self._place_of[stage]
            if "begin" in own:
                gather = self._add("begin", stage, of_places[place])
                self._labels[gather] = "P", place, stage, NO_MICRO_BATCH
                of_places[place] = [gather]
            of_stages.append(of_places[place])
        return of_stages

    def _act(self, place: int, gathers: Sequence[list[int]]) -> tuple[int, list[int]]:
        before, reduced, begun = list[int](), list[int](), set[int]()
        for action in self._actions[place]:
            kind, stage, micro_batch = action
            parts, empty = self._parts[stage], kind != "F" and stage < self._forward_only
            what = "nothing" if empty else f"{kind}{_phase_of(micro_batch, self._micro_batches)}"
            work = self._add(what, stage, before)
            self._labels[work] = kind, place, stage, micro_batch
            if empty:
                before = [work]
                continue
            if kind != "W" and (kind != "F" or stage):
                self._needs.append((before, ("F" if kind == "F" else "B", stage, micro_batch)))
            if kind == "F" and stage not in begun and gathers[stage]:
                before.extend(gathers[stage])
                self._waits.append((place, work, gathers[stage]))
                begun.add(stage)
            end = work
            if kind != "F" and self._one_behind and reduced:
                end = self._over[work] = self._add("nothing", stage, [work, *reduced])
                self._waits.append((place, end, reduced))
            # The gradients are reduce-scattered once the previous ones have arrived.
            is_last = micro_batch == self._micro_batches - 1
            what = "reduce" if is_last else "scatter"
            if kind in "BW" and what in parts:
                reduced = [self._add(what, stage, [end, *reduced])]
                self._labels[reduced[0]] = "G", place, stage, micro_batch
            goes_on = end
            if kind == "F" and stage == len(self._parts) - 1:
                self._brings["B", stage, micro_batch] = end
            elif kind == "F":
                goes_on = self._send("S", action, stage + 1, end)
            elif kind != "W" and stage > self._forward_only:
                goes_on = self._send("R", action, stage - 1, end)
            before = [goes_on]
        return before[0], reduced

    def _send(self, kind: str, action: Action, to: int, end: int) -> int:
        stage, place = action.stage, self._place_of[action.stage]
        arrives = "F" if kind == "S" else "B", to, action.micro_batch
        what, channel = ("send", 2 * stage) if kind == "S" else ("send_back", 2 * stage + 1)
        if self._place_of[to] == place or what not in self._parts[stage]:
            self._brings[arrives] = end
            return end
        message = self._brings[arrives] = self._add(what, stage, [end], channel)
        self._labels[message] = kind, place, stage, action.micro_batch
        return message if self._blocking else end


_step_tasks = lru_cache(maxsize=16)(_StepTasks)
