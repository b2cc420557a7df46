"""Convert pipelined strategies to points of a frontier and to plans, and plans back to strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.errors import PlanError
from tensoropt.ops.layouts import layout_names
from tensoropt.pipeline.evaluate import PipelineEvaluation
from tensoropt.pipeline.stages import is_crossing
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.plan.plan import MeshInfo, OperatorPlan, ParameterPlan, Plan, StagePlan, StagesInfo, check_plan
from tensoropt.plan.point import Point, stages_point
from tensoropt.plan.point_records import FULL, IN_PART, StagesRecord
from tensoropt.plan.space import Space
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.recipes import recipe_name
from tensoropt.simulate.collectives import sent_bytes
from tensoropt.types import SOURCES


def plan_part(
    strategy: PipelinedStrategy,
    axes: tuple[str, ...],
    peak_bytes: tuple[float, ...] = (),
    kinds: tuple[str, ...] = (),
) -> StagesRecord:
    """Return the part of a plan that describes a pipelined strategy.

    Args:
        axes: the names of the axes of a stage's mesh.
        peak_bytes: the peak memory of each device group, in bytes.
    """
    tensors = strategy.graph.atoms.graph.tensors
    begins = ["", *(strategy.graph.groups[cut].name for cut in strategy.cuts)]
    operators: dict[str, OperatorPlan] = {}
    parameters: dict[str, ParameterPlan] = {}
    stages, recipes = [], dict[str, str]()
    for begin, of_stage in zip(begins, strategy.stages, strict=True):
        data = of_stage.to_data()
        stages.append(StagePlan(begins=begin, **{n: part for n, part in data.items() if n != "mesh"}))
        for region in of_stage.recomputed:
            recipes[region.name] = recipe_name(of_stage.graph, region, of_stage.once) or IN_PART
        for group in of_stage.graph.groups:
            if not is_crossing(group):
                micro, *labels = data["groups"][group.name]
                members = tuple(op.name for op in group.operators)
                plan = OperatorPlan(axes=dict(zip(axes, labels, strict=True)), micro=micro, members=members)
                operators.setdefault(group.name, plan)
        for name, layout in of_stage.stored.items():
            stored = tuple(layout_names(layout))
            parameters.setdefault(name, ParameterPlan(key=str(tensors[name].key), stored=stored))
    info = StagesInfo(
        schedule=strategy.schedule,
        again=tuple(sorted(strategy.duplicated)),
        stages=tuple(stages),
        peak_bytes=peak_bytes,
        kinds=kinds,
    )
    partly = {block: recipe for block, recipe in recipes.items() if recipe != FULL}
    return StagesRecord(info, operators, parameters, tuple(recipes), recipes=partly)


def pipelined_strategy(plan: Plan, graph: GroupGraph) -> PipelinedStrategy:
    """Return the pipelined strategy of a plan.

    Raises:
        PlanError: the plan has no pipeline, or is for another model; the message names the first difference.
    """
    info = plan.stages
    if info is None or not info.schedule:
        raise PlanError(f"this {plan.kind.name} by the planner {plan.planner} has no pipeline")
    check_plan(plan)  # again, because plans are also made from other plans
    places, *axes = plan.mesh.shape
    stages = [
        {**stage.model_dump(exclude={"begins"}), "mesh": [plan.micro_batches, *axes]} for stage in info.stages
    ]
    data = {
        "schedule": info.schedule,
        "places": places,
        "again": list(info.again),
        "begins": [stage.begins for stage in info.stages[1:]],
        "stages": stages,
    }
    # This comes before the fingerprint check: its errors name what differs; a fingerprint only says that
    # something does.
    strategy = PipelinedStrategy.from_data(data, graph)
    plan.check_model(graph)
    return strategy


def pipelined_space(
    mesh: Mesh,
    micro_batches: int,
    keys: Mapping[str, str],
    notes: Sequence[str] = (),
    sequence: Mapping[str, str] | None = None,
) -> Space:
    """Return the search space of the pipelines on one mesh.

    Args:
        keys: a parameter's name in the graph -> the model's own name.
        sequence: operator group -> the loop of the group (label) that a split along the sequence splits.
    """
    info = MeshInfo(shape=mesh.shape, names=mesh.names)
    return Space(info, micro_batches, keys=dict(keys), notes=tuple(notes), sequence=dict(sequence or {}))


def pipelined_point(
    evaluation: PipelineEvaluation,
    mesh: Mesh,
    *,
    space: int,
    additive: tuple[float, float] | None = None,
    planner: str = "frontier",
) -> Point:
    """Return a simulated pipeline as a point of a frontier, without a proof of optimality.

    Args:
        space: the index of the search space to which the pipeline belongs.
        additive: memory in bytes and time in seconds as sums of costs, by which a search compares strategies;
            by default the simulated ones.
    """
    fullest = evaluation.memory[evaluation.fullest]
    seconds = np.sum([stage.metrics.sources[0] for stage in evaluation.stages], axis=0)
    sent = evaluation.sent_by(evaluation.fullest * evaluation.strategy.devices_per_place)
    busiest = evaluation.busiest
    memory, time_s = additive or (evaluation.memory_bytes, evaluation.time_s)
    peaks = tuple(evaluation.peaks.tolist())
    return stages_point(
        plan_part(evaluation.strategy, mesh.names[1:], peaks, evaluation.kinds),
        dict(zip(SOURCES, map(float, seconds), strict=True)),
        sent,
        memory_bytes=evaluation.memory_bytes,
        time_s=evaluation.time_s,
        **vars(busiest),
        hidden_s=max(busiest.communication_s - busiest.exposed_s, 0.0),
        idle_s=evaluation.idle_s,
        sent_bytes=max(
            sent_bytes(evaluation.sent_by(rank), mesh.shape) for rank in range(evaluation.strategy.devices)
        ),
        additive_memory_bytes=memory,
        additive_time_s=time_s,
        memory=tuple(fullest.tolist()),
        terms=evaluation.terms[evaluation.fullest],
        space=space,
        planner=planner,
    )
