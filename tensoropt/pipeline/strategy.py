"""A pipelined strategy: a sharded strategy for each stage, and the schedule in which micro-batches pass
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from tensoropt.errors import PlanError
from tensoropt.pipeline.apart import check_apart
from tensoropt.pipeline.schedules import check_schedule, schedule_named, stage_place
from tensoropt.pipeline.stages import Cutter, Stage, arriving_group, departing_group
from tensoropt.sharding.configurations import AxisSizes
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.serialise import strategy_from_dict, strategy_to_dict
from tensoropt.sharding.strategy import Strategy


@dataclass(frozen=True)
class PipelinedStrategy:
    """The stages of a model on equal parts of the devices.

    Rank ``r`` of a job is at place ``r // k`` of the pipeline, with ``k`` devices per place, and has the
    stages that the schedule assigns to that place.

    Attributes:
        graph: the whole model.
        cuts: positions among the graph's groups at which the stages after the first begin.
        again: activations that stages make themselves instead of receiving them.
        stages: the strategy of each stage, all on equal meshes with the same number of micro-batches.
        schedule: one of :data:`tensoropt.pipeline.schedules.SCHEDULES`.
        places: the number of parts of the devices; the number of stages is a multiple of it.
        cutter: the graph's cutter, if there is one: it remembers the stages that it has made.

    Raises:
        PlanError: the strategies do not form one step; the message says where.
    """

    graph: GroupGraph
    cuts: tuple[int, ...]
    again: frozenset[str]
    stages: tuple[Strategy, ...]
    schedule: str
    places: int
    cutter: Cutter | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        meshes = {strategy.mesh for strategy in self.stages}
        if len(meshes) != 1:
            raise PlanError(f"the stages of a pipeline have one mesh, but these have {sorted(meshes)}")
        # Fewer than one place, which a file may contain, is refused like everything that the schedule does
        # not run.
        per_place, over = divmod(len(self.stages), max(self.places, 1))
        if over:
            raise PlanError(
                f"{len(self.stages)} stages do not divide over {self.places} parts of the devices"
            )
        check_schedule(self.schedule, self.places, per_place, self.micro_batches)
        if schedule_named(self.schedule).apart:
            self._check_apart()
        for number, (stage, left, right) in enumerate(
            zip(self.parts, self.stages, self.stages[1:], strict=False)
        ):
            for name in stage.departing:
                leaves = left.configurations[departing_group(name)].layout(name)
                enters = right.configurations[arriving_group(name)].layout(name)
                if leaves != enters:
                    raise PlanError(
                        f"{name} leaves stage {number} as {leaves} but enters stage {number + 1} as "
                        f"{enters}; a tensor crosses in one placement"
                    )
        for name in self.tied:
            layouts = {strategy.stored[name] for strategy in self.stages if name in strategy.stored}
            if len(layouts) > 1:
                raise PlanError(f"{name} is used in several stages, which have to store it alike")
            holding = [s for s, strategy in enumerate(self.stages) if name in strategy.stored]
            if len({self.place_of(stage) for stage in holding}) < len(holding):
                raise PlanError(
                    f"{name} is used in stages {holding}, two of which the schedule {self.schedule} puts on "
                    "the same devices; use a schedule that keeps them apart, such as 1f1b"
                )

    def _check_apart(self) -> None:
        """Refuse strategies that a split backward cannot run: it runs its nodes twice, each time for a part
        of their results."""
        for number, strategy in enumerate(self.stages):
            moves = any(any(strategy.steps(edge)) for edge in strategy.edges() if edge.kind != "output")
            if moves or strategy.recomputed:
                what = (
                    "recomputes a block"
                    if strategy.recomputed
                    else "passes collectives in forward or backward"
                )
                raise PlanError(
                    f"the schedule {self.schedule} takes backward apart, so that stages pass no collectives "
                    f"within a micro-batch and recompute nothing, but stage {number} {what}; use 1f1b or "
                    "interleaved_1f1b"
                )
            # Kept for the stages' own graphs, which plans with the same cuts share, so each is checked once.
            check_apart(self.schedule, number, self.parts[number].graph)

    @cached_property
    def parts(self) -> tuple[Stage, ...]:
        """The graphs of the stages."""
        return (self.cutter or Cutter(self.graph)).stages(self.cuts, self.again)

    @property
    def mesh(self) -> AxisSizes:
        """Micro-batches, places of the pipeline, then the axes of a stage's mesh."""
        micro_batches, *axes = self.stages[0].mesh
        return micro_batches, self.places, *axes

    @property
    def micro_batches(self) -> int:
        """The number of pieces in which the batch is run."""
        return self.stages[0].mesh[0]

    @property
    def devices_per_place(self) -> int:
        """The number of devices that compute a stage together."""
        return prod(self.stages[0].mesh[1:])

    @property
    def devices(self) -> int:
        """The number of devices altogether."""
        return self.places * self.devices_per_place

    def place_of(self, stage: int) -> int:
        """Return the part of the devices that has a stage."""
        return stage_place(self.schedule, self.places, stage)

    def stages_at(self, place: int) -> tuple[int, ...]:
        """Return the stages that a part of the devices has, in order."""
        return tuple(s for s in range(len(self.stages)) if self.place_of(s) == place)

    @cached_property
    def tied(self) -> tuple[str, ...]:
        """Parameters that several stages use."""
        names = [name for strategy in self.stages for name in strategy.stored]
        return tuple(name for name in dict.fromkeys(names) if names.count(name) > 1)

    @cached_property
    def sent_buffers(self) -> Mapping[str, int]:
        """The buffers that a step changes at one place and other places read, each with the place that makes
        its new value, which it sends to all at the end of the step."""
        found = {}
        for name, new in self.graph.atoms.graph.mutations.items():
            graphs = [part.graph.atoms.graph for part in self.parts]
            maker = next(self.place_of(s) for s, graph in enumerate(graphs) if new in graph.producer)
            readers = {self.place_of(s) for s, graph in enumerate(graphs) if name in graph.consumers}
            if readers - {maker}:
                found[name] = maker
        return found

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the stages that use a parameter."""
        return tuple(s for s, strategy in enumerate(self.stages) if name in strategy.stored)


def pipelined_to_dict(strategy: PipelinedStrategy) -> dict[str, Any]:
    """Return a strategy as plain data: the schedule, the groups with which stages begin, the strategy of each
    stage."""
    return {
        "schedule": strategy.schedule,
        "places": strategy.places,
        "begins": [strategy.graph.groups[cut].name for cut in strategy.cuts],
        "again": sorted(strategy.again),
        "stages": [strategy_to_dict(stage) for stage in strategy.stages],
    }


def pipelined_from_dict(data: Mapping[str, Any], graph: GroupGraph) -> PipelinedStrategy:
    """Return the strategy of this model that :func:`pipelined_to_dict` wrote; its inverse.

    Raises:
        PlanError: the data do not describe a pipelined strategy of this graph; the message names the first
            difference.
    """
    cutter = Cutter(graph)
    begins, stages = data.get("begins"), data.get("stages")
    if not isinstance(begins, Sequence) or not isinstance(stages, Sequence) or len(stages) != len(begins) + 1:
        raise PlanError("the plan's pipeline does not say with which operators its stages begin")
    cuts, again = tuple(map(cutter.beginning, begins)), frozenset(data.get("again", ()))
    parts = cutter.stages(cuts, again)
    return PipelinedStrategy(
        graph,
        cuts,
        again,
        tuple(strategy_from_dict(one, part.graph) for one, part in zip(stages, parts, strict=True)),
        str(data.get("schedule")),
        int(data.get("places", len(stages))),
    )
