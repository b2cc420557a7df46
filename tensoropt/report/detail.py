"""The simulated step of a point in detail: operators, timeline and memory curve, which explain its costs.

They are computed from the operator graph and the costs that were saved with the exploration, for all kinds of
plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.pipeline.evaluate import PipelineEvaluation
from tensoropt.pipeline.stages import crossing_words, is_crossing
from tensoropt.pipeline.timeline import TimedStage
from tensoropt.pipeline.timing import NO_MICRO_BATCH, WORKING
from tensoropt.placement.points import events_of, exposed_on, fullest, operator_rows, owned_on
from tensoropt.placement.simulate import SimulatedPlacement, device_name
from tensoropt.plan.kinds import PIPELINED, PLACED, SHARDED, STAGE_AXIS, devices_words, numbered
from tensoropt.plan.recorded import Recorded
from tensoropt.plan.spent import COPIES, NOTHING, Spent, beside_groups, spent_by_group
from tensoropt.report.rebuilt import rebuilt
from tensoropt.report.stage_rows import StageRows
from tensoropt.report.step_parts import Computed, Detail, Share, step_parts
from tensoropt.simulate import recording
from tensoropt.simulate.owners import StepOwners

_Owners = tuple[Sequence[recording.MemoryAt], Callable[[int], Sequence[recording.OwnerRow]]]
"""The memory curve, and a function that returns the owners of the memory at a point of it, by number."""


def detail(exploration: Exploration, index: int) -> Detail:
    """Return the simulated step of point ``index`` of ``exploration.all_points`` with all its parts.

    Raises:
        TensorOptError: there is no such point, or the exploration was saved without its costs.
    """
    return step_of(exploration, index).detail()


def step_of(exploration: Exploration, index: int) -> _SimulatedStep:
    """Return the step of point ``index`` of ``exploration.all_points``, simulated again.

    Raises:
        TensorOptError: there is no such point, or the exploration was saved without its costs.
    """
    points = exploration.all_points
    if not 0 <= index < len(points):
        raise TensorOptError(f"there is no point {index + 1}; there are points 1 to {len(points)}")
    return _STEPS[points[index].kind.name](exploration, index)


def recorded_of(exploration: Exploration) -> Recorded:
    """Return the saved operator graph and costs of an exploration.

    Raises:
        TensorOptError: the exploration was saved without them.
    """
    if exploration.recorded is None:
        raise TensorOptError(
            "this exploration was saved without its operator graph and costs (by an older version, or for an "
            "operator that no file can hold); explore again to see the reasons for its points' costs"
        )
    return exploration.recorded


class _SimulatedStep:
    """The step of a sharded plan, simulated again at saved costs; subclasses are for other kinds of plans."""

    evaluated: Any

    def __init__(self, exploration: Exploration, index: int):
        self.exploration, self.index = exploration, index
        self.point = exploration.all_points[index]
        mesh = exploration.spaces[self.point.space].mesh
        self.axes, self._devices = mesh.names, math.prod(mesh.shape)
        again = rebuilt(exploration, index, recorded_of(exploration))
        self.costs, self.strategy = again.costs(), again.plan.strategy
        self.evaluated = again.plan.evaluated(self.costs)

    def detail(self) -> Detail:
        computed, beside = self.computed()
        return Detail(
            index=self.index,
            operators=self.operators(),
            timeline=self.timeline,
            memory_curve=self.memory_curve(),
            step=self.point,
            overlap=self.point.kind.overlap or self.evaluated.batch.overlap.words,
            sources=dict(self.point.sources),
            parts=step_parts(self.exploration, self.index, computed, beside, self.waited()),
            places=self.places(),
        )

    @cached_property
    def _timed(self) -> Any:
        return self.evaluated.timed()

    @cached_property
    def _rows(self) -> tuple[StageRows, ...]:
        names = {name: name for name in self.strategy.graph.group_of}
        return (StageRows(self.strategy, self.evaluated, self._timed.events, self.axes, {}, names),)

    @property
    def _busiest(self) -> Sequence[StageRows]:
        return self._rows

    def operators(self) -> tuple[recording.OperatorRow, ...]:
        # Groups that only represent a received or sent tensor are left out if they take no time.
        return tuple(
            row
            for stage in self._rows
            for group, row in zip(stage.strategy.graph.groups, stage.operators(), strict=True)
            if not is_crossing(group) or row.compute_s or row.copies_s or row.communication_s
        )

    @cached_property
    def timeline(self) -> tuple[recording.TimelineEvent, ...]:
        return self._rows[0].timeline

    def waited(self) -> Sequence[recording.TimelineEvent]:
        return self.timeline

    def computed(self) -> tuple[list[Computed], dict[str, float]]:
        beside: dict[str, float] = {}
        for rows in self._busiest:
            beside = {title: seconds + beside.get(title, 0.0) for title, seconds in rows.beside().items()}
        return [computed for rows in self._busiest for computed in rows.computed()], beside

    def places(self) -> tuple[Share, ...]:
        return ()

    def memory_curve(self) -> tuple[recording.MemoryAt, ...]:
        sizes = self.evaluated.metrics.memory[0, :3].tolist()
        lasting = dict(zip(recording.MEMORY_KINDS, sizes, strict=False))
        return tuple(recording.MemoryAt(time_s, **kinds) for time_s, kinds in self._timed.memory_at(lasting))

    def owners(self) -> _Owners:
        return self.memory_curve(), StepOwners(self.evaluated.batch, self._timed).at

    def _place(self, number: int, words: str, *seconds: float) -> Share:
        """Return the share of device or pipeline rank ``number``: its memory peak, with ``seconds`` in the
        order of the fields of :class:`Share`. ``words`` follow the device numbers in its title."""
        peaks = self.point.stages.peak_bytes
        beside_bytes = self.point.memory_bytes - max(peaks)
        title = devices_words(number, len(peaks), self._devices) + words
        return Share(title, peaks[number] + beside_bytes, *seconds)


def _owners(curve: Sequence[recording.MemoryAt], owned: Sequence[recording.Owned]) -> _Owners:
    times = [*(at.time_s for at in curve), curve[-1].time_s]

    def rows_at(number: int) -> list[recording.OwnerRow]:
        rows = []
        for operator, tensor, what, kind, size, first, end, since, until in owned:
            if first <= number < end:
                alive = times[first], times[end] if until else None
                rows.append(recording.OwnerRow(operator, tensor, what, kind, size, *alive, since, until))
        return rows

    return curve, rows_at


_PHASES = {
    "F": "forward",
    **dict.fromkeys("BIW", "backward"),
    "S": "send forward",
    "R": "send backward",
    "P": "gathered parameters",
    "G": "gradients",
    "O": "optimizer",
}


_STORED = "PG"
"""The kinds of events on a separate lane of a pipeline rank's links: parameters gathered from their shards,
and gradients reduced to them."""


class _PipelinedStep(_SimulatedStep):
    evaluated: PipelineEvaluation

    @cached_property
    def _timed(self) -> tuple[TimedStage, ...]:
        return tuple(map(TimedStage, self.evaluated.stages))

    @cached_property
    def _rows(self) -> tuple[StageRows, ...]:
        rows, taken = [], set[str]()
        for number, (strategy, timed) in enumerate(zip(self.strategy.stages, self._timed, strict=True)):
            own, stage = strategy.graph.group_of, {STAGE_AXIS: str(number)}
            names = {name: f"{name} in stage {number}" if name in taken else name for name in own}
            crossing = [group for group in strategy.graph.groups if is_crossing(group)]
            names |= {group.name: f"{crossing_words(group)} stage {number}" for group in crossing}
            taken.update(own)
            events = tuple(timed.whole())
            rows.append(StageRows(strategy, timed.evaluation, events, self.axes[1:], stage, names))
        return tuple(rows)

    @cached_property
    def timeline(self) -> tuple[recording.TimelineEvent, ...]:
        return tuple(self._timeline())

    def _timeline(self) -> Iterator[recording.TimelineEvent]:
        times, parts, devices = self.evaluated.times, len(self.evaluated.loads), self._devices
        for event in times.happenings:
            if event.kind in "BIW" and event.stage < self.strategy.forward_only:
                continue
            phase, stage, place = _PHASES[event.kind], f"stage {event.stage}", event.place
            number = "" if event.micro_batch == NO_MICRO_BATCH else f"micro-batch {event.micro_batch}, "
            link = f"link {numbered(place, parts, devices)}"
            lane = stage if event.kind in WORKING else link
            lane += f" {phase}" if event.kind in _STORED else ""
            lasts_s = event.end_s - event.start_s
            yield recording.TimelineEvent(
                f"{phase} of {number}{stage}", lane, event.start_s, lasts_s, phase, stage
            )
            if event.kind in WORKING:
                rows, share = self._rows[event.stage], times.stages[event.stage].share(event.kind)
                for each in self._timed[event.stage].within(event, share):
                    yield rows.shown(each, devices_words(place, parts, devices), link)
        after_s = self.evaluated.time_s - times.total_s
        if after_s > 0:
            name, lane = "results to all ranks, gradients of tied parameters", f"link {self.axes[0]}"
            yield recording.TimelineEvent(name, lane, times.total_s, after_s, "communication", "")

    def waited(self) -> Sequence[recording.TimelineEvent]:
        place, along = self.evaluated.busiest_place, f"link {self.axes[0]}"
        where = place, len(self.evaluated.loads), self._devices
        lanes, own = {devices_words(*where): recording.COMPUTE, along: along}, f"link {numbered(*where)}"
        lanes |= {e.lane: e.lane.replace(own, "link") for e in self.timeline if e.lane.startswith(f"{own} ")}
        lanes |= {f"{own} {_PHASES[kind]}": "link " + "+".join(self.axes[1:]) for kind in _STORED}
        if self.evaluated.times.sending_s[place]:  # the place waits for its own messages
            lanes[own] = along
        return [replace(e, lane=lanes[e.lane]) for e in self.timeline if e.lane in lanes]

    @property
    def _busiest(self) -> list[StageRows]:
        place = self.evaluated.busiest_place
        return [rows for number, rows in enumerate(self._rows) if self.strategy.place_of(number) == place]

    def computed(self) -> tuple[list[Computed], dict[str, float]]:
        computed, beside = super().computed()
        # Computation is slower while another stage's gradients go to their shards.
        known_s = sum(beside.values()) + sum(group.seconds for group in computed)
        return computed, {**beside, COPIES: beside[COPIES] + self.point.compute_s - known_s}

    def places(self) -> tuple[Share, ...]:
        return tuple(
            self._place(
                place,
                self._stages_at(place),
                load.compute_s,
                load.communication_s,
                max(self.point.time_s - load.compute_s - load.exposed_s, 0.0),
            )
            for place, load in enumerate(self.evaluated.loads)
        )

    def _stages_at(self, place: int) -> str:
        own = list(map(str, self.strategy.stages_at(place)))
        return f", stage{'s' if len(own) > 1 else ''} {', '.join(own)}"

    def memory_curve(self) -> tuple[recording.MemoryAt, ...]:
        curve = self.evaluated.memory_curve()
        return tuple(recording.MemoryAt(start_s, *kinds.tolist()) for start_s, kinds in curve)

    def owners(self) -> _Owners:
        return _owners(self.memory_curve(), self.evaluated.owners())


class _PlacedStep(_SimulatedStep):
    evaluated: SimulatedPlacement

    @cached_property
    def timeline(self) -> tuple[recording.TimelineEvent, ...]:
        return tuple(events_of(self.evaluated))

    @cached_property
    def _loads(self) -> list[tuple[float, float]]:
        step = self.evaluated
        return [(busy, step.communication_s(device)) for device, busy in enumerate(step.busy_s)]

    @cached_property
    def _spent(self) -> dict[str, Spent]:
        operators = [op.name for op in self.strategy.placed_graph.operators]
        spent = spent_by_group(self.timeline, set(operators))
        return {name: spent.get(name, NOTHING) for name in operators}

    def operators(self) -> tuple[recording.OperatorRow, ...]:
        computes = [self.costs.compute_on(kind) for kind in self.costs.cluster.devices]
        return operator_rows(self.strategy.placed_graph, self.evaluated, self._spent, computes)

    def computed(self) -> tuple[list[Computed], dict[str, float]]:
        busiest = max(range(self.strategy.devices), key=lambda device: self._loads[device][0])
        own = [event for event in self.timeline if event.lane == device_name(busiest)]
        groups = {op.name: op.group for op in self.strategy.placed_graph.operators if op.group is not None}
        # Operators that cut, join or hand out tensors copy beside the groups.
        spent = spent_by_group(own, groups)
        computed = [Computed.of(groups[name], took, name) for name, took in spent.items()]
        return computed, beside_groups(own, spent)

    def places(self) -> tuple[Share, ...]:
        return tuple(
            self._place(
                device,
                "",
                *seconds,
                max(self.point.time_s - seconds[0] - exposed_on(self.evaluated, device), 0.0),
            )
            for device, seconds in enumerate(self._loads)
        )

    def memory_curve(self) -> tuple[recording.MemoryAt, ...]:
        curve = self.evaluated.memory(fullest(self.evaluated))
        return tuple(recording.MemoryAt(time_s, *sizes) for time_s, sizes in curve)

    def owners(self) -> _Owners:
        return _owners(self.memory_curve(), owned_on(self.evaluated, fullest(self.evaluated)))


_STEPS: Mapping[str, type[_SimulatedStep]] = {
    SHARDED.name: _SimulatedStep,
    PIPELINED.name: _PipelinedStep,
    PLACED.name: _PlacedStep,
}
