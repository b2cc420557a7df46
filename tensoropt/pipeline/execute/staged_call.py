"""Run a model call in eval mode on the stages of a pipelined plan, one part of its graph after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
import torch.distributed as dist

from tensoropt.engine.lower import Lowered, lower
from tensoropt.engine.lowered_call import CallGraph, Collect, LoweredCall, Read, given_result
from tensoropt.engine.runtime import Runtime, through_host
from tensoropt.errors import PlanError
from tensoropt.ops.layouts import Layout, local_shape
from tensoropt.pipeline.stages import Stage, arriving_group, departing_group, stage_of
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.sharding.configurations import AxisSizes, Configuration, fits
from tensoropt.sharding.evaluating import evaluating_strategy
from tensoropt.sharding.groups import Group, GroupGraph
from tensoropt.sharding.strategy import Strategy


@dataclass(frozen=True)
class _Part:
    """Consecutive operator groups of a call that one stage's devices compute.

    Attributes:
        place: the number of the device group that computes the part.
        stage: the operator groups as a graph of their own.
        strategy: the part's sharded strategy on the device group's mesh.
    """

    place: int
    stage: Stage
    strategy: Strategy

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.stage.graph.atoms.graph.outputs


class StagedCall(LoweredCall):
    """A call in eval mode by a pipelined plan; every rank passes in and gets back the whole batch.

    Args:
        collect: a function that broadcasts a result from the device group that computes it.

    Raises:
        PlanError: no stage has all parameters of an operator group, or the call needs other factors of a
            sharded parameter's dims than the plan.
    """

    def __init__(self, plan: PipelinedStrategy, call: CallGraph, job: Runtime, collect: Collect):
        self.source, self.job, self.collect = call.source, job, collect
        self.place = job.position[0]
        mesh = (1, *plan.stages[0].mesh[1:])
        self.runtime = Runtime(mesh, seed=job.seed, device=job.device, job=job)
        group = job.group((1,))
        assert group is not None, "a pipeline has several places"
        self._along = group
        self.parts = _parts(plan, call, mesh)
        self.lowered = {
            number: self._lowered(part.strategy)
            for number, part in enumerate(self.parts)
            if part.place == self.place
        }
        self._makers = {name: number for number, part in enumerate(self.parts) for name in part.outputs}
        # Tensor -> the numbers of the parts that receive it.
        self._readers: dict[str, list[int]] = {}
        for number, part in enumerate(self.parts):
            for name in part.stage.arriving:
                self._readers.setdefault(name, []).append(number)

    def _lowered(self, strategy: Strategy) -> Lowered:
        lowered = lower(strategy, self.runtime)
        lowered.module.to(self.job.device)
        return lowered

    def __call__(self, inputs: Sequence[torch.Tensor], read: Read) -> list[torch.Tensor]:
        crossed: dict[str, torch.Tensor] = {}
        made: dict[str, torch.Tensor] = {}
        for number, part in enumerate(self.parts):
            if part.place == self.place:
                arrived = [crossed[name] for name in part.stage.arriving]
                results = self._run(self.lowered[number], [*inputs, *arrived], read)
                made.update(zip(part.outputs, results, strict=False))
                departing = results[len(part.outputs) :]
                crossed.update(zip(part.stage.departing, departing, strict=False))
                del arrived, results, departing
            for name in part.stage.departing:
                for place in sorted({self.parts[reader].place for reader in self._readers[name]}):
                    if place != part.place:
                        self._cross(name, part, place, crossed)
            for name in [name for name in crossed if self._last_reader(name) <= number]:
                del crossed[name]
        return [self._result(name, made, inputs, read) for name in self.source.outputs]

    def _last_reader(self, name: str) -> int:
        own = (reader for reader in self._readers[name] if self.parts[reader].place == self.place)
        return max(own, default=-1)

    @staticmethod
    def _run(lowered: Lowered, inputs: Sequence[torch.Tensor], read: Read) -> tuple[torch.Tensor, ...]:
        program = lowered.program
        results: tuple[torch.Tensor, ...] = lowered.module(
            *inputs, *map(read, (*program.parameters, *program.buffers))
        )
        return results

    def _cross(self, name: str, part: _Part, target: int, crossed: dict[str, torch.Tensor]) -> None:
        device, host = self.job.device, through_host(self.job.device)
        if self.place == part.place:
            value = crossed[name].cpu() if host else crossed[name].contiguous()
            dist.send(value, dist.get_global_rank(self._along, target), group=self._along)
        elif self.place == target:
            layout = part.strategy.configurations[departing_group(name)].layout(name)
            mesh, place = part.strategy.mesh, self.runtime.place
            value = torch.empty(
                local_shape(part.strategy.atoms(name), layout, mesh, place),
                dtype=getattr(torch, self.source.tensors[name].dtype),
                device="cpu" if host else device,
            )
            dist.recv(value, dist.get_global_rank(self._along, part.place), group=self._along)
            crossed[name] = value.to(device)

    def _result(
        self, name: str, made: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor], read: Read
    ) -> torch.Tensor:
        tensor = self.source.tensors[name]
        if tensor.kind != "activation":
            return given_result(self.source, name, inputs, read)
        return self.collect(tensor, made.get(name), self.parts[self._makers[name]].place)


def _parts(plan: PipelinedStrategy, call: CallGraph, mesh: AxisSizes) -> list[_Part]:
    stages = _stages(plan, call)
    runs = [
        (stage, [group for _, group in run])
        for stage, run in groupby(zip(stages, call.groups.groups, strict=True), lambda pair: pair[0])
    ]
    maker = {
        name: number
        for number, (_, groups) in enumerate(runs)
        for group in groups
        for op in group.operators
        for name in op.outputs
    }
    arriving: list[dict[str, None]] = [{} for _ in runs]
    departing: list[dict[str, None]] = [{} for _ in runs]
    for number, (_, groups) in enumerate(runs):
        for name in (name for group in groups for name in group.reads if maker[name] != number):
            arriving[number][name] = departing[maker[name]][name] = None
    graph, crossing, parts = _with_own_results(call.groups), dict[str, Layout](), list[_Part]()
    for (stage, groups), arrive, depart in zip(runs, arriving, departing, strict=True):
        part = stage_of(graph, groups, tuple(arrive), tuple(depart))
        strategy = _strategy(plan.stages[stage], part, call.planned, mesh, crossing)
        crossing |= {name: strategy.configurations[departing_group(name)].layout(name) for name in depart}
        parts.append(_Part(plan.place_of(stage), part, strategy))
    if any(part.strategy.zigzag for part in parts):  # all parts must agree about the shards that cross
        return [replace(part, strategy=replace(part.strategy, zigzag_beside=True)) for part in parts]
    return parts


def _stages(plan: PipelinedStrategy, call: CallGraph) -> list[int]:
    """Return the stage that runs each operator group; PlanError if no stage has a group's parameters."""
    planned: dict[str, int] = {}
    for number, part in enumerate(plan.parts):
        for group in part.graph.groups:
            planned.setdefault(group.name, number)
    made: dict[str, int] = {}
    stages = []
    for group in call.groups.groups:
        able = set(range(len(plan.stages)))
        for name in (*group.parameters, *group.shared):
            if name in call.planned:
                able.intersection_update(plan.holders(call.planned[name]))
        if not able:
            raise PlanError(
                f"no stage of the plan has all parameters that {group.name} reads in this call; evaluate it "
                "with the module that `with tensoropt.whole(model) as plain:` gives"
            )
        latest = max((made[name] for name in group.reads), default=0)
        wanted = planned.get(group.name, latest)
        stage = min(able, key=lambda number: abs(number - wanted))
        made.update((name, stage) for op in group.operators for name in op.outputs)
        stages.append(stage)
    return stages


def _with_own_results(groups: GroupGraph) -> GroupGraph:
    source = groups.atoms.graph
    made = tuple(name for name in source.outputs if source.tensors[name].kind == "activation")
    return replace(groups, atoms=replace(groups.atoms, graph=replace(source, outputs=made)))


def _strategy(
    plan: Strategy, part: Stage, planned: Mapping[str, str], mesh: AxisSizes, crossing: Mapping[str, Layout]
) -> Strategy:
    """Return the strategy by which a stage's devices compute a part (consecutive groups) of a model call.

    Args:
        plan: the stage's strategy in the pipelined plan.
        planned: parameter in the call's graph -> its name in the plan.
        crossing: tensor that an earlier part sends -> its layout.
    """
    graph = part.graph

    def crossed(group: str, name: str, layout: Layout) -> Configuration:
        return _crossing(graph, graph.group_of[group], name, layout, mesh)

    arrivals = {arriving_group(n): crossed(arriving_group(n), n, crossing[n]) for n in part.arriving}
    strategy = evaluating_strategy(plan, graph, planned, (), arrivals)
    left = {departing_group(n): crossed(departing_group(n), n, strategy.made[n]) for n in part.departing}
    return replace(strategy, configurations={**strategy.configurations, **left})


def _crossing(graph: GroupGraph, group: Group, name: str, layout: Layout, mesh: AxisSizes) -> Configuration:
    chosen = tuple(
        next((s for s in group.strategies if code >= 0 and s.placements[name] == code), group.unsplit)
        for code in layout
    )
    whole = (group.unsplit,) * len(mesh)
    return Configuration(group, chosen if fits(graph.atoms, group, chosen, mesh) else whole)
