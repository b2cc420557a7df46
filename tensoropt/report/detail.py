"""The reasons for a point's costs: operators, reshardings, the timeline and the memory curve of its step.

This works on an exploration loaded from disk: everything is rebuilt from the operator graph and the costs
that were saved with it, and simulated anew.

The detail of a placed or pipelined point, which has no indices, comes from its record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tensoropt.costs.effects import READ, READ_BACK, MoveEffects
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.evaluate import Evaluation
from tensoropt.exploration.exploration import Exploration
from tensoropt.ops.layouts import layout_names
from tensoropt.pipeline.evaluate import stage_works
from tensoropt.plan.kinds import SHARDED, STAGE_AXIS
from tensoropt.plan.point_records import StagesRecord
from tensoropt.plan.recorded import Recorded
from tensoropt.plan.spent import (
    COPIES,
    NOTHING,
    OPTIMIZER_TITLE,
    RECOMPUTATION,
    Spent,
    beside_groups,
    spent_by_group,
)
from tensoropt.report.rebuilt import rebuilt
from tensoropt.report.step_parts import Computed, Detail, Share, kind_of, step_parts
from tensoropt.sharding.groups import Group
from tensoropt.sharding.storage import stored_words
from tensoropt.sharding.strategy import Edge, Strategy
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.clock import TimedStep
from tensoropt.simulate.owners import StepOwners
from tensoropt.simulate.recording import (
    COMPUTE,
    MEMORY_KINDS,
    EdgeRow,
    MemoryAt,
    OperatorRow,
    OwnerRow,
    TimelineEvent,
)

Owners = tuple[Sequence[MemoryAt], Callable[[int], Sequence[OwnerRow]]]
"""The memory curve, and the owners of the bytes at a point of it, by its number."""


@dataclass(frozen=True)
class _RecordedStep:
    """The step of a placed or pipelined point, from its record."""

    exploration: Exploration
    index: int

    @property
    def record(self) -> StagesRecord:
        return self.exploration.all_points[self.index].record

    def detail(self) -> Detail:
        record, point = self.record, self.exploration.all_points[self.index]
        if record.loads is None or record.computed is None:
            raise self._older(f"what its {record.kind.place}s compute")
        rows, timeline = record.recording.operator_rows(), record.recording.timeline()
        computed = _computed(self.exploration, record.computed)
        others = {RECOMPUTATION: record.again_s, OPTIMIZER_TITLE: record.optimizer_s}
        known_s = sum(others.values()) + sum(group.seconds for group in computed)
        # This includes the slow-down of computation during communication.
        others[COPIES] = max(point.compute_s - known_s, 0.0)
        return Detail(
            point=self.index,
            operators=tuple(rows),
            edges=(),
            timeline=timeline,
            memory_curve=record.recording.memory_curve(),
            step=point,
            overlap=record.kind.overlap,
            sources=point.sources,
            parts=step_parts(self.exploration, self.index, computed, others, timeline),
            places=tuple(_places(record, record.loads, rows, point.memory_bytes)),
        )

    def owners(self) -> Owners:
        owned = self.record.recording.owners
        if owned is None:
            raise self._older("the owners of its memory")
        curve = self.record.recording.memory_curve()
        times = [*(at.time_s for at in curve), curve[-1].time_s]

        def rows_at(number: int) -> list[OwnerRow]:
            rows = []
            for operator, tensor, what, kind, size, first, end, since, until in owned:
                if first <= number < end:
                    alive = times[first], times[end] if until else None
                    rows.append(OwnerRow(operator, tensor, what, kind, size, *alive, since, until))
            return rows

        return curve, rows_at

    def _older(self, what: str) -> TensorOptError:
        return TensorOptError(
            f"point {self.index + 1} was saved without {what} (by an older version); explore again"
        )


def _computed(exploration: Exploration, groups: Sequence[tuple[str, str, str, float]]) -> list[Computed]:
    """Return what groups of operators compute, each named after its anchor if the graph was saved."""
    of = exploration.recorded.grouped.group_of if exploration.recorded is not None else {}
    return [
        Computed(module, kind_of(of[name].anchor.target if name in of else name), seconds)
        for _, module, name, seconds in groups
    ]


def _places(
    record: StagesRecord,
    loads: Sequence[tuple[float, float]],
    rows: Sequence[OperatorRow],
    memory_bytes: float,
) -> Iterator[Share]:
    """Yield the peak and the seconds of a rank of each place.

    Args:
        memory_bytes: what the fullest place needs, with what a process takes beside its tensors.
    """
    stages: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        for place in (row.configuration[axis] for axis in row.configuration if axis == STAGE_AXIS):
            stages[place].append(row.group.removeprefix("stage "))
    beside_bytes = memory_bytes - max(record.info.peak_bytes, default=0.0)
    for number, (peak, seconds) in enumerate(zip(record.info.peak_bytes, loads, strict=True)):
        own = stages[str(number)]
        words = f", stage{'s' if len(own) > 1 else ''} {', '.join(own)}" if own else ""
        yield Share(f"{record.kind.place} {number}{words}", peak + beside_bytes, *seconds)


_COPYING = ("read", "gather", "hub", "output", "parameters", "reduce", "unshard")
"""The moments of a step whose work moves something to where it is used."""


def step_of(exploration: Exploration, index: int) -> _RecordedStep | _SimulatedStep:
    """Return the step of point ``index`` of ``exploration.all_points``, also for one loaded from disk: as it
    was recorded when it was found, or simulated again.

    Raises:
        TensorOptError: there is no such point, or the exploration was saved without its costs.
    """
    points = exploration.all_points
    if not 0 <= index < len(points):
        raise TensorOptError(f"there is no point {index + 1}; there are points 1 to {len(points)}")
    if points[index].kind is SHARDED:
        return _SimulatedStep(exploration, index, recorded_of(exploration))
    return _RecordedStep(exploration, index)


def detail(exploration: Exploration, index: int) -> Detail:
    """Return everything about point ``index`` of ``exploration.all_points``, also for one loaded from disk.

    Raises:
        TensorOptError: there is no such point, or the exploration was saved without what this needs.
    """
    return step_of(exploration, index).detail()


def recorded_of(exploration: Exploration) -> Recorded:
    """Return the graph and the costs of an exploration.

    Raises:
        TensorOptError: the exploration was saved without them.
    """
    if exploration.recorded is None:
        raise TensorOptError(
            "this exploration was saved without its operator graph and costs (by an older version, or for an "
            "operator that no file can hold); explore again to see why its points cost what they cost"
        )
    return exploration.recorded


class _SimulatedStep:
    """The step of a sharded point, simulated again from its rebuilt strategy at its prices."""

    def __init__(self, exploration: Exploration, index: int, recorded: Recorded):
        self.exploration, self.index = exploration, index
        point = exploration.all_points[index]
        self.point, self.space = point, exploration.spaces[point.space]
        self.rebuilt = rebuilt(exploration, index, recorded)
        self.plan, self.costs = self.rebuilt.plan, self.rebuilt.costs()
        self.strategy: Strategy = self.plan.strategy
        (self.works,) = stage_works(self.strategy)
        self.prices, self.overlap = self.plan.prices(self.costs), self.plan.overlap(self.costs)

    def _step(self) -> tuple[Evaluation, TimedStep, tuple[MemoryAt, ...]]:
        """Return the step, timed, and its memory curve."""
        evaluated = self.plan.evaluated(self.costs)
        timed = evaluated.timed()
        lasting = dict(zip(MEMORY_KINDS, map(float, evaluated.metrics.memory[0, :3]), strict=False))
        curve = tuple(MemoryAt(time_s, **kinds) for time_s, kinds in timed.memory_at(lasting))
        return evaluated, timed, curve

    def owners(self) -> Owners:
        evaluated, timed, curve = self._step()
        return curve, StepOwners(evaluated.batch, timed).at

    def detail(self) -> Detail:
        evaluated, timed, curve = self._step()
        names = self.space.mesh.names
        groups = self.strategy.graph.group_of
        events = tuple(
            TimelineEvent(
                event.name,
                COMPUTE if event.axes is None else "link " + "+".join(names[i] for i in event.axes),
                event.start_s,
                event.duration_s,
                event.phase,
                event.group,
                copies=event.axes is None and event.kind in _COPYING,
            )
            for event in timed.events
        )
        spent = spent_by_group(events, groups)
        anchors = {name: groups[name].anchor for name in spent}
        computed = [
            Computed(anchors[name].module, kind_of(anchors[name].target), took.forward_s + took.backward_s)
            for name, took in spent.items()
        ]
        return Detail(
            point=self.index,
            operators=self._operators(spent, evaluated.batch),
            edges=tuple(row for edge in self.strategy.edges() if (row := self._edge(edge))),
            timeline=events,
            parts=step_parts(self.exploration, self.index, computed, beside_groups(events, spent), events),
            memory_curve=curve,
            step=self.point,
            overlap=self.overlap.words,
            sources=dict(self.point.sources),
        )

    def _operators(self, spent: Mapping[str, Spent], batch: Batch) -> tuple[OperatorRow, ...]:
        counted: set[str] = set()
        rows = []
        for group in self.strategy.graph.groups:
            own = [n for n in (*group.parameters, *group.shared) if n not in counted]
            counted.update(own)
            rows.append(self._operator(group, spent.get(group.name, NOTHING), own, batch))
        return tuple(rows)

    def _operator(self, group: Group, spent: Spent, own: Sequence[str], batch: Batch) -> OperatorRow:
        """Return one row, with the parameters ``own``: a tied parameter counts with the first group that uses
        it."""
        facts = self.costs.facts.of(self.works[group.name])
        owners = [batch.owner("group", group.name), *(batch.owner("parameter", n) for n in own)]
        effects = [owner.effects.at(0) for owner in owners]
        labels = [str(s.label) for s in self.strategy.configurations[group.name].strategies[1:]]
        stored = (f"{n}: {', '.join(stored_words(layout_names(self.strategy.stored[n])))}" for n in own)
        learning = self.strategy.graph.atoms.graph.training
        recomputed = self.strategy.forwards(group.name) > 1
        return OperatorRow(
            group=group.name,
            members=tuple(op.name for op in group.operators),
            module=group.anchor.module,
            configuration=dict(zip(self.space.mesh.names, labels, strict=True)),
            options=tuple(stored) if labels else (),
            parameters_bytes=sum(effect.parameters for effect in effects),
            gradients_bytes=sum(effect.gradients for effect in effects),
            state_bytes=sum(effect.optimizer for effect in effects),
            kept_bytes=facts.kept_bytes if learning and not recomputed else 0,
            transient_bytes=max(facts.forward_peak_bytes, facts.backward_peak_bytes),
            forward_s=spent.forward_s,
            backward_s=spent.backward_s,
            copies_s=spent.copies_s,
            communication_s=spent.communication_s,
            source=self.prices.compute.source_of(self.works[group.name]),
            recomputed=recomputed,
        )

    def _edge(self, edge: Edge) -> EdgeRow | None:
        """Return a resharding with its effects summed."""
        effects = MoveEffects(self.prices)
        forward, backward = self.strategy.steps(edge)
        if not forward and not backward:
            return None
        ways = [effects.stepped(READ, edge.tensor, forward)] * self.strategy.forwards_of(edge)
        ways.append(effects.stepped(READ_BACK, edge.tensor, backward))
        times = self.strategy.times(edge)
        maker = self.strategy.graph.atoms.graph.producer.get(edge.tensor)
        words = [
            f"{way.when.phase} {s.kind} over {'+'.join(self.space.mesh.names[a] for a in s.axes)}"
            for way in dict.fromkeys(ways)
            for s in way.sends
        ]
        return EdgeRow(
            tensor=edge.tensor,
            kind=edge.kind,
            producer=self.strategy.graph.group_of[maker.name].name if maker else "",
            consumer=edge.reader,
            source=layout_names(edge.source)[1:],
            target=layout_names(edge.target)[1:],
            collectives=tuple(words),
            bytes=sum(s.bytes for way in ways for s in way.sends) * times,
            seconds=sum(self.prices.amid_work(way.local_s, way.sends) for way in ways) * times,
        )
