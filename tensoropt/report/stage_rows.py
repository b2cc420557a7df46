"""The operators of one stage of a plan as table rows, with their durations and memory in a step.

A sharded plan is one stage, a pipeline has several. The durations are those of the events in the stage's
simulated step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tensoropt.evaluation.evaluate import Evaluation
from tensoropt.ops.layouts import layout_names
from tensoropt.plan.spent import NOTHING, Spent, beside_groups, spent_by_group
from tensoropt.report.step_parts import Computed
from tensoropt.sharding.groups import Group
from tensoropt.sharding.storage import stored_words
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.recording import COMPUTE, OperatorRow, TimelineEvent
from tensoropt.simulate.timed import StepEvent

_COPYING = ("read", "gather", "hub", "output", "parameters", "reduce", "unshard")
"""The moments of a step whose work moves data to where it is used."""


@dataclass(frozen=True)
class StageRows:
    """The data from which the rows and the timeline of one stage are made.

    Attributes:
        evaluation: the stage's simulated step.
        events: the events of one rank in the step; one event may stand for several equal ones, with the sum
            of their durations.
        axes: the names of the axes of the stage's mesh.
        stage: the stage's number by the name of the stage axis; empty in a plan of one stage.
        names: the name of the row of each group of operators.
    """

    strategy: Strategy
    evaluation: Evaluation
    events: Iterable[StepEvent]
    axes: Sequence[str]
    stage: Mapping[str, str]
    names: Mapping[str, str]

    def shown(self, event: StepEvent, device: str = COMPUTE, link: str = "link") -> TimelineEvent:
        """Return a simulated event as an event of the timeline for people.

        Args:
            device, link: the name of the lane for computation, and the beginning of those for collectives.
        """
        over = "" if event.axes is None else "+".join(self.axes[axis] for axis in event.axes)
        return TimelineEvent(
            event.name,
            f"{link} {over}" if over else device,
            event.start_s,
            event.duration_s,
            event.phase,
            self.names.get(event.group, event.group),
            copies=event.axes is None and event.kind in _COPYING,
        )

    @cached_property
    def timeline(self) -> tuple[TimelineEvent, ...]:
        """The timeline of the stage's own step."""
        return tuple(map(self.shown, self.events))

    @cached_property
    def _spent(self) -> dict[str, Spent]:
        return spent_by_group(self.timeline, set(self.names.values()))

    def computed(self) -> list[Computed]:
        """Return the computation time of each group of operators."""
        groups = {self.names[group.name]: group for group in self.strategy.graph.groups}
        return [Computed.of(groups[name], took, name) for name, took in self._spent.items()]

    def beside(self) -> dict[str, float]:
        """Return the seconds of computation that belong to no operator, such as copies, by title."""
        return beside_groups(self.timeline, self._spent)

    def operators(self) -> tuple[OperatorRow, ...]:
        counted: set[str] = set()
        rows = []
        for group in self.strategy.graph.groups:
            own = [n for n in (*group.parameters, *group.shared) if n not in counted]
            counted.update(own)
            rows.append(self._operator(group, own))
        return tuple(rows)

    def _operator(self, group: Group, own: Sequence[str]) -> OperatorRow:
        """Return the row of a group, with the memory of its ``own`` parameters (tied ones only in their first
        group)."""
        batch, spent = self.evaluation.batch, self._spent.get(self.names[group.name], NOTHING)
        (facts,), (work,) = batch.candidates.facts(group), batch.candidates.works(group)
        owners = [batch.owner("group", group.name), *(batch.owner("parameter", n) for n in own)]
        effects = [owner.effects.at(0) for owner in owners]
        labels = [str(s.label) for s in self.strategy.configurations[group.name].strategies[1:]]
        stored = (f"{n}: {', '.join(stored_words(layout_names(self.strategy.stored[n])))}" for n in own)
        learning = self.strategy.graph.atoms.graph.training
        recomputed = self.strategy.forwards(group.name) > 1
        return OperatorRow(
            group=self.names[group.name],
            members=tuple(op.name for op in group.operators),
            module=group.anchor.module,
            configuration={**self.stage, **dict(zip(self.axes, labels, strict=True))},
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
            source=batch.prices.compute.source_of(work),
            recomputed=recomputed,
        )
