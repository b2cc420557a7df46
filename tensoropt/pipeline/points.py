"""Pipelined strategies as points of a frontier: their figures, their part of a plan file, and the timeline of
all stages.

The tables of one mesh do not contain pipelines, so a pipeline's point has a record of its plan and its step.

The module also converts pipelined strategies to plan files and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.errors import PlanError
from tensoropt.ops.layouts import layout_names
from tensoropt.pipeline.evaluate import PipelineEvaluation
from tensoropt.pipeline.stages import is_crossing
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.pipeline.timing import NO_MICRO_BATCH
from tensoropt.plan.plan import (
    MeshInfo,
    OperatorPlan,
    ParameterPlan,
    Plan,
    StagePlan,
    StagesInfo,
    check_plan,
)
from tensoropt.plan.point import Point, stages_point
from tensoropt.plan.point_records import StagesRecord
from tensoropt.plan.space import Space
from tensoropt.sharding.groups import GroupGraph
from tensoropt.simulate.collectives import sent_bytes
from tensoropt.simulate.recording import OperatorRow, Recording
from tensoropt.types import SOURCES


def plan_part(
    strategy: PipelinedStrategy,
    axes: tuple[str, ...],
    peak_bytes: tuple[float, ...] = (),
    kinds: tuple[str, ...] = (),
) -> StagesRecord:
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
    for begin, of_stage in zip(begins, strategy.stages, strict=True):
        data = of_stage.to_data()
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
    return StagesRecord(info, operators, parameters, tuple(dict.fromkeys(recomputed)))


def pipelined_strategy(plan: Plan, graph: GroupGraph) -> PipelinedStrategy:
    """Return the pipelined strategy of a plan, for the grouped graph of its model.

    Raises:
        PlanError: the plan has no pipeline, or is for another model; the message names the first difference.
    """
    info = plan.stages
    if info is None or not info.schedule:
        raise PlanError(f"this {plan.kind.name} of {plan.planner} has no pipeline")
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
    strategy = PipelinedStrategy.from_data(data, graph)
    plan.check_model(graph)
    return strategy


_PHASES = {
    "F": "forward",
    "B": "backward",
    "I": "backward",
    "W": "backward",
    "S": "send forward",
    "R": "send backward",
    "G": "gradients",
    "O": "optimizer",
}


def pipelined_space(
    mesh: Mesh, micro_batches: int, keys: Mapping[str, str], notes: Sequence[str] = ()
) -> Space:
    """Return the space of the pipelines on one mesh.

    Args:
        keys: parameter name in the graph -> the model's own name.
    """
    info = MeshInfo(shape=mesh.shape, names=mesh.names)
    return Space(info, micro_batches, keys=dict(keys), notes=tuple(notes))


def pipelined_point(
    evaluation: PipelineEvaluation,
    mesh: Mesh,
    *,
    space: int,
    additive: tuple[float, float] | None = None,
    planner: str = "frontier",
) -> Point:
    """Return a simulated pipeline as a point of space ``space``, with nothing proven about it.

    Args:
        additive: the memory and time that a search summed; by default the simulated ones.
    """
    fullest = evaluation.memory[evaluation.fullest]
    seconds = np.sum([stage.metrics.sources[0] for stage in evaluation.stages], axis=0)
    sent = evaluation.sent_by(evaluation.fullest * evaluation.strategy.devices_per_place)
    busiest = evaluation.busiest
    memory, time_s = additive or (evaluation.memory_bytes, evaluation.time_s)
    return stages_point(
        _record(evaluation, mesh),
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
        memory=tuple(float(size) for size in fullest),
        terms=evaluation.terms[evaluation.fullest],
        allocator=evaluation.allocator(),
        space=space,
        planner=planner,
    )


def _record(evaluation: PipelineEvaluation, mesh: Mesh) -> StagesRecord:
    peaks = tuple(float(size) for size in evaluation.peaks)
    curve = ((start_s, *kinds.tolist()) for start_s, kinds in evaluation.memory_curve())
    return replace(
        plan_part(evaluation.strategy, mesh.names[1:], peaks, evaluation.kinds),
        loads=tuple((load.compute_s, load.communication_s) for load in evaluation.loads),
        **_computed(evaluation),
        recording=Recording.of(_rows(evaluation), _events(evaluation), curve, evaluation.owners()),
    )


def _computed(evaluation: PipelineEvaluation) -> dict[str, Any]:
    """Return the computation of a rank of the busiest place: (group, module, target, seconds) of each group
    of operators, and the seconds of recomputation and of the optimizer.

    The rest of the place's computation time is copies, additions, and the slow-down of computation during
    communication.
    """
    groups: list[tuple[str, str, str, float]] = []
    again_s = optimizer_s = 0.0
    for number, (stage, strategy) in enumerate(
        zip(evaluation.stages, evaluation.strategy.stages, strict=True)
    ):
        if evaluation.strategy.place_of(number) != evaluation.busiest_place:
            continue
        seconds: dict[str, float] = {}
        for owner in stage.batch.owners:
            for effect in owner.effects.at(0).effects:
                when, seconds_of_effect = (
                    effect.when,
                    effect.local_s * (1 if effect.when.once else strategy.micro_batches),
                )
                if when.phase == "optimizer" and when.what == "step":
                    optimizer_s += seconds_of_effect
                elif owner.kind == "group" and when.what == "compute":
                    if when.phase == "again":
                        again_s += seconds_of_effect
                    else:
                        seconds[owner.name] = seconds.get(owner.name, 0.0) + seconds_of_effect
        # The simulated step may be that of an equal stage, whose groups have other names.
        for simulated, group in zip(stage.batch.graph.groups, strategy.graph.groups, strict=True):
            seconds_of_effect, anchor = seconds.get(simulated.name, 0.0), group.anchor
            if seconds_of_effect and not is_crossing(group):
                groups.append((group.name, anchor.module, anchor.target, seconds_of_effect))
    return {"computed": tuple(groups), "again_s": again_s, "optimizer_s": optimizer_s}


_Event = tuple[str, str, float, float, str, str]
"""The fields of a :class:`~tensoropt.simulate.recording.TimelineEvent`."""


def _events(evaluation: PipelineEvaluation) -> Iterator[_Event]:
    """Yield all actions and messages, the end of the step at each place, and what follows when all are
    done."""
    for h in (*evaluation.times.happenings, *evaluation.times.closing):
        phase, stage = _PHASES[h.kind], f"stage {h.stage}"
        whose = stage if h.micro_batch == NO_MICRO_BATCH else f"micro-batch {h.micro_batch}, {stage}"
        lane = "device" if h.kind in "FBIWO" else "link"
        yield f"{phase} of {whose}", f"{lane} {h.place}", h.start_s, h.end_s - h.start_s, phase, stage
    after_s = evaluation.time_s - evaluation.times.total_s
    if after_s > 0:
        last = len(evaluation.stages) - 1
        place = evaluation.strategy.place_of(last)
        name = "results to all ranks, gradients of tied parameters"
        yield name, f"link {place}", evaluation.times.total_s, after_s, "communication", f"stage {last}"


def _rows(evaluation: PipelineEvaluation) -> list[OperatorRow]:
    """Return a row for every stage: its stored tensors, and its seconds in the schedule of all
    micro-batches.
    """
    rows = []
    for number, (stage, strategy) in enumerate(
        zip(evaluation.stages, evaluation.strategy.stages, strict=True)
    ):
        parts, memory = stage.metrics.parts, stage.metrics.memory[0]
        groups = [group for group in strategy.graph.groups if not is_crossing(group)]
        rows.append(
            OperatorRow(
                group=f"stage {number}",
                members=tuple(group.name for group in groups),
                module=groups[0].anchor.module if groups else "",
                configuration={"stage": str(evaluation.strategy.place_of(number))},
                options=(*(f"recomputes {region.name}" for region in strategy.recomputed),),
                parameters_bytes=int(memory[0]),
                gradients_bytes=int(memory[1]),
                state_bytes=int(memory[2]),
                kept_bytes=int(parts.between_bytes[0]),
                transient_bytes=int(parts.within_bytes[0]),
                forward_s=_over_micro_batches(parts.forward_s[0], strategy.micro_batches),
                backward_s=_over_micro_batches(parts.backward_s[0], strategy.micro_batches),
                communication_s=float(stage.metrics.communication_s[0]),
                source="",
            )
        )
    return rows


def _over_micro_batches(seconds: np.ndarray, micro_batches: int) -> float:
    """Return the seconds of all micro-batches, given those of the first, of each between and of the last."""
    first, between, last = (float(x) for x in seconds)
    return last if micro_batches == 1 else first + (micro_batches - 2) * between + last
