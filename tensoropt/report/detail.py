"""The reasons for a point's costs: operators, reshardings, the timeline and the memory curve of its step.

This works on an exploration loaded from disk: everything is rebuilt from the operator graph and the costs
that were saved with it, and simulated anew.

The detail of a placed or pipelined point, which has no indices, comes from its record.

A sharded point's strategy is rebuilt from what was saved with its exploration, and can be simulated under
changed costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tensoropt.cluster import Cluster, Mesh
from tensoropt.costs.effects import READ, READ_BACK, MoveEffects
from tensoropt.costs.prices import CommunicationCosts, Prices, runs_beside
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.evaluate import Evaluation, evaluate_strategy
from tensoropt.exploration.exploration import Exploration
from tensoropt.ops.layouts import layout_names
from tensoropt.placement.points import OVERLAP
from tensoropt.plan.plan import STAGE_AXIS
from tensoropt.plan.point import Point
from tensoropt.plan.point_records import PipelineRecord, PlacedRecord
from tensoropt.plan.recorded import Recorded, mesh_of
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload, workload
from tensoropt.report.step_parts import (
    COPIES,
    NOTHING,
    OPTIMIZER_TITLE,
    RECOMPUTATION,
    Computed,
    Detail,
    Part,
    Share,
    Spent,
    beside_groups,
    computed_by,
    kind_of,
    spent_by_group,
    step_parts,
)
from tensoropt.sharding.groups import Group
from tensoropt.sharding.storage import stored_words
from tensoropt.sharding.strategy import Edge, Strategy, strategy_from_dict
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.candidates import Overlap, overlap_of
from tensoropt.simulate.clock import TimedStep
from tensoropt.simulate.recording import (
    COMPUTE,
    MEMORY_KINDS,
    EdgeRow,
    MemoryAt,
    OperatorRow,
    TimelineEvent,
)


def carried_detail(exploration: Exploration, index: int) -> Detail:
    """Return the detail of placed or pipelined point ``index`` of ``all_points``, from its record."""
    point = exploration.all_points[index]
    assert point.record is not None, "a point with indices is simulated anew"
    recording = point.record.recording
    rows, timeline = recording.operator_rows(), recording.timeline()
    parts: tuple[Part, ...]
    if point.pipeline is not None:
        parts = _parts_of_pipeline(exploration, index, point.pipeline, timeline)
    else:
        rows = _copying_apart(rows, spent_by_group(timeline, {row.group for row in rows}))
        parts = _parts_of_placed(exploration, index, rows, timeline)
    return Detail(
        point=index,
        operators=tuple(rows),
        edges=(),
        timeline=timeline,
        memory_curve=recording.memory_curve(),
        step=point,
        overlap=OVERLAP if point.pipeline is None else point.pipeline.overlap,
        sources=point.sources,
        parts=parts,
        places=_places_of(point),
    )


def _copying_apart(rows: Sequence[OperatorRow], spent: Mapping[str, Spent]) -> list[OperatorRow]:
    """Return the rows of a placed plan with the seconds of its timeline; those that cut tensors into pieces,
    or join pieces, copy."""
    timed = []
    for row in rows:
        seconds = spent.get(row.group, NOTHING)
        worked = replace(row, communication_s=seconds.communication_s, forward_s=0.0, backward_s=0.0)
        if row.members:
            timed.append(replace(worked, forward_s=seconds.forward_s, backward_s=seconds.backward_s))
        else:
            timed.append(replace(worked, copies_s=seconds.forward_s + seconds.backward_s))
    return timed


def _parts_of_placed(
    exploration: Exploration, index: int, rows: Sequence[OperatorRow], timeline: Sequence[TimelineEvent]
) -> tuple[Part, ...]:
    """Return the parts of the step on the device that computes longest."""
    busy: dict[str, float] = defaultdict(float)
    for event in timeline:
        if event.is_computing:
            busy[event.lane] += event.duration_s
    lane = max(busy, key=busy.__getitem__, default="")
    own = [event for event in timeline if event.lane == lane]
    spent = spent_by_group(own, {row.group for row in rows})
    computed = []
    copied_s = 0.0
    for row in rows:
        took = spent.get(row.group, NOTHING)
        if row.members:
            computed.append(Computed(row.module, _kind(exploration, row), took.forward_s + took.backward_s))
        else:
            copied_s += took.forward_s + took.backward_s
    others = beside_groups(own, spent)
    others[COPIES] += copied_s
    return step_parts(exploration, index, computed, others, timeline)


def _kind(exploration: Exploration, row: OperatorRow) -> str:
    """Return what a placed group, or a piece of one, computes."""
    recorded = exploration.recorded
    group = recorded.grouped.group_of.get(row.members[0]) if recorded is not None else None
    return kind_of(group.anchor.target if group is not None else row.members[0])


def _parts_of_pipeline(
    exploration: Exploration, index: int, record: PipelineRecord, timeline: Sequence[TimelineEvent]
) -> tuple[Part, ...]:
    """Return the parts of the step on a rank of the busiest place."""
    if record.computed is None:  # saved by an older version: its stages' operators are not distinguished
        return step_parts(exploration, index, None, {}, timeline)
    computed = [Computed(module, kind_of(target), s) for _, module, target, s in record.computed]
    others = {RECOMPUTATION: record.again_s, OPTIMIZER_TITLE: record.optimizer_s}
    known_s = sum(others.values()) + sum(group.seconds for group in computed)
    # This includes the slow-down of computation during communication.
    others[COPIES] = max(exploration.all_points[index].compute_s - known_s, 0.0)
    return step_parts(exploration, index, computed, others, timeline)


def _places_of(point: Point) -> tuple[Share, ...]:
    """Return the peak and the seconds of each device of a placed plan, or of a rank of each place of a
    pipeline.

    Empty for pipelines that were explored before these were kept, and for points that carry no recording.
    """
    if point.placed is not None:
        return _devices(point.placed, sum(point.terms.values()))
    return () if point.pipeline is None else tuple(_places(point.pipeline))


def _devices(record: PlacedRecord, beside_bytes: float) -> tuple[Share, ...]:
    device_of = {row.group: row.configuration["device"] for row in record.recording.operator_rows()}
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in record.recording.timeline():
        if event.is_computing:
            seconds[event.lane.removeprefix("device ")][0] += event.duration_s
        elif event.group in device_of:
            seconds[device_of[event.group]][1] += event.duration_s
    return tuple(
        Share(f"device {number}", peak + beside_bytes, *seconds[str(number)])
        for number, peak in enumerate(record.info.peak_bytes)
    )


def _places(record: PipelineRecord) -> Iterator[Share]:
    if record.loads is None:
        return
    stages: dict[int, list[str]] = defaultdict(list)
    for row in record.recording.operator_rows():
        stages[int(row.configuration[STAGE_AXIS])].append(row.group.removeprefix("stage "))
    for number, (peak, seconds) in enumerate(zip(record.info.peak_bytes, record.loads, strict=True)):
        own = stages[number]
        title = f"place {number}, stage{'s' if len(own) > 1 else ''} {', '.join(own)}"
        yield Share(title, peak, *seconds)


@dataclass(frozen=True)
class Rebuilt:
    """A sharded point's strategy, with the workloads and the costs that it was simulated with.

    Attributes:
        works, facts: the workload and the facts of each group.
    """

    exploration: Exploration
    recorded: Recorded
    cluster: Cluster
    mesh: Mesh
    strategy: Strategy
    works: Mapping[str, Workload]
    facts: Mapping[str, Facts]

    def prices(
        self,
        *,
        cluster: Cluster | None = None,
        recorded: Recorded | None = None,
        communication: CommunicationCosts | None = None,
    ) -> Prices:
        """Return the prices of its exploration, or those of another cluster with the same mesh, of other
        seconds for workloads and links, or of collectives that are priced differently."""
        settings = self.exploration.settings
        prices = (recorded or self.recorded).prices(
            cluster or self.cluster,
            self.mesh,
            self.strategy.mesh,
            str(settings["optimizer"]),
            with_process=bool(settings.get("process_memory")),
        )
        if communication is not None:
            prices.communication = communication
        return prices

    def overlap(self, cluster: Cluster | None = None) -> Overlap:
        """Return what overlaps what on its cluster, or on another one with the same mesh."""
        wanted = str(self.exploration.settings.get("overlap", "default"))
        where = cluster or self.cluster
        return overlap_of(where, self.mesh, beside=runs_beside(where.device_type, wanted))

    def simulated(
        self,
        *,
        cluster: Cluster | None = None,
        recorded: Recorded | None = None,
        communication: CommunicationCosts | None = None,
    ) -> Evaluation:
        """Return one simulated step of it at :meth:`prices`."""
        prices = self.prices(cluster=cluster, recorded=recorded, communication=communication)
        return evaluate_strategy(self.strategy, self.works, self.facts, prices, self.overlap(cluster))


def rebuilt(exploration: Exploration, index: int, recorded: Recorded) -> Rebuilt:
    """Return point ``index`` of ``exploration.all_points``, which is neither placed nor a pipeline, rebuilt.

    Raises:
        TensorOptError: the costs of its workloads were not saved.
    """
    space = exploration.spaces[exploration.all_points[index].space]
    strategy = strategy_from_dict(exploration.plan(index).strategy_data(), recorded.grouped)
    cluster = Cluster.from_dict(exploration.cluster)
    works = {
        name: workload(recorded.grouped, configuration, strategy.mesh)
        for name, configuration in strategy.configurations.items()
    }
    return Rebuilt(
        exploration,
        recorded,
        cluster,
        mesh_of(cluster, space.mesh.shape, space.mesh.names),
        strategy,
        works,
        {name: recorded.compute.of(work).facts for name, work in works.items()},
    )


_COPYING = ("read", "gather", "hub", "output", "parameters", "reduce", "unshard")
"""The moments of a step whose work moves something to where it is used."""


def detail(exploration: Exploration, index: int) -> Detail:
    """Return everything about point ``index`` of ``exploration.all_points``, also for one loaded from disk.

    Raises:
        TensorOptError: there is no such point, or the exploration was saved without its costs.
    """
    points = exploration.all_points
    if not 0 <= index < len(points):
        raise TensorOptError(f"there is no point {index + 1}; there are points 1 to {len(points)}")
    if points[index].record is not None:
        return carried_detail(exploration, index)
    return _DetailBuilder(exploration, index, recorded_of(exploration)).build()


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


def recorded_step(exploration: Exploration, index: int) -> tuple[Evaluation, TimedStep]:
    """Return the step of a sharded point, simulated again and timed; errors as in :func:`detail`."""
    evaluated = rebuilt(exploration, index, recorded_of(exploration)).simulated()
    return evaluated, evaluated.timed()


def curve_of_step(evaluated: Evaluation, timed: TimedStep) -> tuple[MemoryAt, ...]:
    """Return the memory curve of one timed strategy."""
    lasting = dict(zip(MEMORY_KINDS, map(float, evaluated.metrics.memory[0, :3]), strict=False))
    return tuple(MemoryAt(time_s, **kinds) for time_s, kinds in timed.memory_at(lasting))


class _DetailBuilder:
    """The construction of a sharded point's detail, from its rebuilt strategy, its prices and its simulated
    step."""

    def __init__(self, exploration: Exploration, index: int, recorded: Recorded):
        self.exploration, self.index = exploration, index
        point = exploration.all_points[index]
        self.point, self.space = point, exploration.spaces[point.space]
        self.rebuilt = rebuilt(exploration, index, recorded)
        self.strategy: Strategy = self.rebuilt.strategy
        self.works, self.facts = self.rebuilt.works, self.rebuilt.facts
        self.prices: Prices = self.rebuilt.prices()
        self.overlap: Overlap = self.rebuilt.overlap()

    def build(self) -> Detail:
        evaluated = self.rebuilt.simulated()
        timed = evaluated.timed()
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
        computed = computed_by(spent, lambda name: groups[name].anchor)
        return Detail(
            point=self.index,
            operators=self._operators(spent, evaluated.batch),
            edges=tuple(row for edge in self.strategy.edges() if (row := self._edge(edge))),
            timeline=events,
            parts=step_parts(self.exploration, self.index, computed, beside_groups(events, spent), events),
            memory_curve=curve_of_step(evaluated, timed),
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
        facts = self.facts[group.name]
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
