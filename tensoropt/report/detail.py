"""Why a point costs what it costs: operators, reshardings, the timeline and memory curve of its step.

Works on an exploration loaded from disk: everything is rebuilt from the operator graph and the costs that
were saved with it, and played again.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensoropt.cluster import Cluster
from tensoropt.costs.prices import Prices
from tensoropt.errors import TensorOptError
from tensoropt.plan.evaluate import Judged, judge_strategy
from tensoropt.plan.exploration import Exploration
from tensoropt.plan.recorded import Recorded, mesh_of
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload, workload
from tensoropt.report.placed import placed_detail
from tensoropt.report.rows import Detail
from tensoropt.sharding.groups import Group
from tensoropt.sharding.placement import layout_names
from tensoropt.sharding.serialise import strategy_from_dict
from tensoropt.sharding.storage import stored_words
from tensoropt.sharding.strategy import Edge, Strategy
from tensoropt.simulate.batch import Play
from tensoropt.simulate.overlap import Overlap, overlap_of
from tensoropt.simulate.recording import (
    COMPUTE,
    MEMORY_KINDS,
    EdgeRow,
    MemoryAt,
    OperatorRow,
    StepTime,
    TimelineEvent,
)
from tensoropt.simulate.step_tasks import DEVICE, schedule_of
from tensoropt.simulate.timeline import Timeline, length_s


def detail(exploration: Exploration, index: int) -> Detail:
    """Everything about point ``index`` of ``exploration.all_points``, also of one loaded from disk.

    Raises:
        TensorOptError: there is no such point, or the exploration was saved without its costs.
    """
    points = exploration.all_points
    if not 0 <= index < len(points):
        raise TensorOptError(f"there is no point {index}; there are points 0 to {len(points) - 1}")
    if points[index].placed is not None:
        return placed_detail(points[index], index)
    return _Telling(exploration, index, recorded_of(exploration)).tell()


def recorded_of(exploration: Exploration) -> Recorded:
    """The graph and the costs of an exploration.

    Raises:
        TensorOptError: it was saved without them.
    """
    if exploration.recorded is None:
        raise TensorOptError(
            "this exploration was saved without its operator graph and costs (by an older version, or for an "
            "operator that no file can hold); explore again to see why its points cost what they cost"
        )
    return exploration.recorded


class _Telling:
    """Rebuilds a point's strategy and prices, plays it, and words what it finds."""

    def __init__(self, exploration: Exploration, index: int, recorded: Recorded):
        self.exploration, self.index = exploration, index
        point = exploration.all_points[index]
        self.point, self.space = point, exploration.spaces[point.space]
        self.strategy: Strategy = strategy_from_dict(
            exploration.plan(index).strategy_data(), recorded.grouped
        )
        cluster = Cluster.from_dict(exploration.cluster)
        mesh = mesh_of(cluster, self.space.mesh.shape, self.space.mesh.names)
        optimizer = str(exploration.settings["optimizer"])
        self.optimizer = optimizer
        self.works: dict[str, Workload] = {
            name: workload(recorded.grouped, c, self.strategy.mesh)
            for name, c in self.strategy.configurations.items()
        }
        self.facts: dict[str, Facts] = {n: recorded.compute.of(w).facts for n, w in self.works.items()}
        self.prices: Prices = recorded.prices(cluster, mesh, self.strategy.mesh, optimizer)
        self.overlap: Overlap = overlap_of(cluster, mesh)

    def tell(self) -> Detail:
        judged = judge_strategy(
            self.strategy, self.works, self.facts, self.prices, self.optimizer, self.overlap
        )
        timeline, axes = schedule_of(judged.play)
        names = self.space.mesh.names
        lanes = [COMPUTE if a is None else "link " + "+".join(names[i] for i in a) for a in axes]
        events = tuple(
            TimelineEvent(e.task.name, lane, e.start_s, e.task.duration_s, e.task.phase, e.task.group)
            for e, lane in zip(timeline.events, lanes, strict=True)
            if e.task.duration_s
        )
        return Detail(
            point=self.index,
            operators=self._operators(events, judged.play),
            edges=tuple(row for edge in self.strategy.edges() if (row := self._edge(edge))),
            timeline=events,
            memory_curve=tuple(
                MemoryAt(time_s, **{kind: kinds.get(kind, 0.0) for kind in MEMORY_KINDS})
                for time_s, kinds in timeline.memory(DEVICE)
            ),
            step=step_time(timeline, judged),
            overlap=self.overlap.words,
            sources=dict(self.point.sources),
        )

    def _operators(self, events: tuple[TimelineEvent, ...], play: Play) -> tuple[OperatorRow, ...]:
        sent: dict[str, float] = {}
        for event in events:
            if event.lane != COMPUTE:
                sent[event.group] = sent.get(event.group, 0.0) + event.duration_s
        counted: set[str] = set()
        rows = []
        for group in self.strategy.graph.groups:
            own = [n for n in (*group.parameters, *group.shared) if n not in counted]
            counted.update(own)
            rows.append(self._operator(group, sent.get(group.name, 0.0), own, play))
        return tuple(rows)

    def _operator(self, group: Group, sent_s: float, own: Sequence[str], play: Play) -> OperatorRow:
        """One row, with the parameters ``own``: a tied one counts with the first group that uses it."""
        facts, micro = self.facts[group.name], self.strategy.micro_batches
        forwards = self.strategy.forwards(group.name)
        learning = self.strategy.graph.atoms.graph.training
        held = [play.piece_of(group.name), *(play.piece_of(n) for n in own)]
        forward, backward = self.prices.compute.seconds(self.works[group.name], facts)
        labels = [s.label for s in self.strategy.configurations[group.name].strategies[1:]]
        stored = (f"{n}: {', '.join(stored_words(layout_names(self.strategy.stored[n])))}" for n in own)
        return OperatorRow(
            group=group.name,
            members=tuple(op.name for op in group.operators),
            module=group.anchor.module,
            configuration=dict(zip(self.space.mesh.names, labels, strict=True)),
            options=tuple(stored) if labels else (),
            parameters_bytes=sum(piece.parameters for piece in held),
            gradients_bytes=sum(piece.gradients for piece in held),
            state_bytes=sum(piece.optimizer for piece in held),
            kept_bytes=facts.kept_bytes if learning and forwards == 1 else 0,
            transient_bytes=max(facts.forward_peak_bytes, facts.backward_peak_bytes),
            forward_s=forward * forwards * micro,
            backward_s=backward * micro,
            communication_s=sent_s,
            source=self.prices.compute.source_of(self.works[group.name]),
            recomputed=forwards > 1,
        )

    def _edge(self, edge: Edge) -> EdgeRow | None:
        forward, backward = self.strategy.steps(edge)
        if not forward and not backward:
            return None
        size, times = self.strategy.tensor(edge.tensor).element_bytes, self.strategy.times(edge)
        ways = [forward] * self.strategy.forwards_of(edge) + [backward]
        sends = [s for steps in ways for s in self.prices.steps(steps, size)[1]]
        maker = self.strategy.graph.atoms.graph.producer.get(edge.tensor)
        words = [
            f"{way} {s.kind} over {'+'.join(self.space.mesh.names[a] for a in s.axes)}"
            for way, steps in (("forward", forward), ("backward", backward))
            for s in self.prices.steps(steps, size)[1]
        ]
        return EdgeRow(
            tensor=edge.tensor,
            kind=edge.kind,
            producer=self.strategy.graph.group_of[maker.name].name if maker else "",
            consumer=edge.reader,
            source=layout_names(edge.source)[1:],
            target=layout_names(edge.target)[1:],
            collectives=tuple(words),
            bytes=sum(s.bytes for s in sends) * times,
            seconds=sum(self.prices.steps_s(steps, size) for steps in ways) * times,
        )


def step_time(timeline: Timeline, judged: Judged) -> StepTime:
    """The breakdown of a played step, from its timeline."""
    resources = {r for e in timeline.events for r in e.task.resources}
    idle = max(timeline.total_s - length_s(timeline.busy(resources)), 0.0)
    if idle < 1e-9 * timeline.total_s:  # rounding between touching spans
        idle = 0.0
    compute, communication = float(judged.played.compute_s[0]), float(judged.played.communication_s[0])
    exposed = min(max(timeline.total_s - compute - idle, 0.0), communication)
    return StepTime(timeline.total_s, compute, exposed, max(communication - exposed, 0.0), idle)
