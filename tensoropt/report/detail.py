"""The reasons for a point's costs: operators, reshardings, the timeline and the memory curve of its step.

This works on an exploration loaded from disk: everything is rebuilt from the operator graph and the costs
that were saved with it, and simulated anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensoropt.costs.effects import READ, READ_BACK
from tensoropt.costs.move_effects import MoveEffects
from tensoropt.costs.prices import Prices
from tensoropt.errors import TensorOptError
from tensoropt.ops.layouts import layout_names
from tensoropt.plan.evaluate import Evaluation
from tensoropt.plan.exploration import Exploration
from tensoropt.plan.recorded import Recorded
from tensoropt.report.carried import carried_detail
from tensoropt.report.rebuilt import rebuilt
from tensoropt.report.rows import Detail
from tensoropt.report.spent import NOTHING, Spent, beside_groups, computed_by, spent_by_group
from tensoropt.report.step_parts import step_parts
from tensoropt.sharding.groups import Group
from tensoropt.sharding.storage import stored_words
from tensoropt.sharding.strategy import Edge, Strategy
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.overlap import Overlap
from tensoropt.simulate.recorder import StepRecorder
from tensoropt.simulate.recording import (
    COMPUTE,
    MEMORY_KINDS,
    EdgeRow,
    MemoryAt,
    OperatorRow,
    TimelineEvent,
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
    return _Telling(exploration, index, recorded_of(exploration)).tell()


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


def recorded_step(exploration: Exploration, index: int) -> tuple[Evaluation, StepRecorder]:
    """Return the step of a sharded point, simulated anew and recorded; errors as in :func:`detail`."""
    return _Telling(exploration, index, recorded_of(exploration)).step()


def curve_of_step(evaluated: Evaluation, recorder: StepRecorder) -> tuple[MemoryAt, ...]:
    """Return the memory curve of one recorded strategy."""
    lasting = dict(zip(MEMORY_KINDS, map(float, evaluated.metrics.memory[0, :3]), strict=False))
    return tuple(MemoryAt(time_s, **kinds) for time_s, kinds in recorder.memory_at(lasting))


class _Telling:
    """Rebuilds a point's strategy and prices, simulates it, and describes what it finds."""

    def __init__(self, exploration: Exploration, index: int, recorded: Recorded):
        self.exploration, self.index = exploration, index
        point = exploration.all_points[index]
        self.point, self.space = point, exploration.spaces[point.space]
        self.found = rebuilt(exploration, index, recorded)
        self.strategy: Strategy = self.found.strategy
        self.works, self.facts = self.found.works, self.found.facts
        self.prices: Prices = self.found.prices()
        self.overlap: Overlap = self.found.overlap()

    def step(self) -> tuple[Evaluation, StepRecorder]:
        """Return the point's step, simulated anew and recorded."""
        recorder = StepRecorder()
        return self.found.simulated(recorder=recorder), recorder

    def tell(self) -> Detail:
        evaluated, recorder = self.step()
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
            for event in recorder.events
        )
        spent = spent_by_group(events, groups)
        computed = computed_by(spent, lambda name: groups[name].anchor)
        return Detail(
            point=self.index,
            operators=self._operators(spent, evaluated.batch),
            edges=tuple(row for edge in self.strategy.edges() if (row := self._edge(edge))),
            timeline=events,
            parts=step_parts(self.exploration, self.index, computed, beside_groups(events, spent), events),
            memory_curve=curve_of_step(evaluated, recorder),
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
            parameters_bytes=sum(one.parameters for one in effects),
            gradients_bytes=sum(one.gradients for one in effects),
            state_bytes=sum(one.optimizer for one in effects),
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
        # The steps are also given for the other direction: rows show moves, not what autograd passes on.
        ways = [effects.stepped(READ, edge.tensor, forward, forward)] * self.strategy.forwards_of(edge)
        ways.append(effects.stepped(READ_BACK, edge.tensor, backward, backward))
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
