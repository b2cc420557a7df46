"""Conversion of pipelined strategies to plan files and back."""

from __future__ import annotations

from tensoropt.errors import PlanError
from tensoropt.ops.layouts import layout_names
from tensoropt.pipeline.stages import is_crossing
from tensoropt.pipeline.strategy import PipelinedStrategy, pipelined_from_dict
from tensoropt.plan.plan import OperatorPlan, ParameterPlan, PipelineInfo, Plan, StagePlan
from tensoropt.plan.plan_checks import check_plan
from tensoropt.plan.point_records import PipelineRecord
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.serialise import strategy_to_dict


def plan_part(
    strategy: PipelinedStrategy,
    axes: tuple[str, ...],
    peak_bytes: tuple[float, ...] = (),
    kinds: tuple[str, ...] = (),
) -> PipelineRecord:
    """Return the plan of a pipelined strategy, without a recording of its step.

    Args:
        axes: names of the axes of a place's mesh.
        peak_bytes: the peak of each place.
        kinds: the names of the kinds of devices at each place, if places differ in them.
    """
    tensors = strategy.graph.atoms.graph.tensors
    begins = ["", *(strategy.graph.groups[cut].name for cut in strategy.cuts)]
    operators: dict[str, OperatorPlan] = {}
    parameters: dict[str, ParameterPlan] = {}
    stages, recomputed = [], []
    for begin, one in zip(begins, strategy.stages, strict=True):
        data = strategy_to_dict(one)
        stages.append(
            StagePlan(
                begins=begin,
                groups={name: tuple(labels) for name, labels in data["groups"].items()},
                hubs={name: tuple(layout) for name, layout in data["hubs"].items()},
                stored={name: tuple(layout) for name, layout in data["stored"].items()},
                recomputed=tuple(data["recomputed"]),
            )
        )
        recomputed += data["recomputed"]
        for group in one.graph.groups:
            if not is_crossing(group):
                micro, *labels = data["groups"][group.name]
                members = tuple(op.name for op in group.operators)
                plan = OperatorPlan(axes=dict(zip(axes, labels, strict=True)), micro=micro, members=members)
                operators.setdefault(group.name, plan)
        for name, layout in one.stored.items():
            stored = tuple(layout_names(layout))
            parameters.setdefault(name, ParameterPlan(key=str(tensors[name].key), stored=stored))
    info = PipelineInfo(
        schedule=strategy.schedule,
        again=tuple(sorted(strategy.again)),
        stages=tuple(stages),
        peak_bytes=peak_bytes,
        kinds=kinds,
    )
    return PipelineRecord(info, operators, parameters, tuple(dict.fromkeys(recomputed)))


def pipelined_strategy(plan: Plan, graph: GroupGraph) -> PipelinedStrategy:
    """Return the pipelined strategy of a plan, for the grouped graph of its model.

    Raises:
        PlanError: the plan has no pipeline, or is for another model; the message names the first difference.
    """
    info = plan.pipeline
    if info is None:
        raise PlanError(f"this plan of {plan.planner} has no pipeline")
    check_plan(plan)  # once more, as plans are also made from others
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
    strategy = pipelined_from_dict(data, graph)
    plan.check_model(graph)
    return strategy
