"""The conversion of a point to a plan, which replaces the point's indices by the names of its choices."""

from __future__ import annotations

from typing import Any

from tensoropt.costs.variables import Variable
from tensoropt.plan.figures import KEPT
from tensoropt.plan.findings import Findings
from tensoropt.plan.plan import CollectiveCount, OperatorPlan, ParameterPlan, Plan, Predicted
from tensoropt.plan.point import Point
from tensoropt.plan.space import Space
from tensoropt.simulate.recording import MEMORY_KINDS


def plan_of(findings: Findings, point: Point) -> Plan:
    """Return the plan of a point of an exploration, without the model or a search."""
    space = findings.spaces[point.space]
    return Plan(
        planner=point.planner,
        model=findings.model,
        cluster=dict(findings.cluster),
        mesh=space.mesh,
        micro_batches=space.micro_batches,
        optimizer=findings.settings["optimizer"],
        predicted=_predicted(point),
        settings=dict(findings.settings),
        versions=dict(findings.versions),
        **_strategy_fields(space, point),
    )


def _predicted(point: Point) -> Predicted:
    figures = {name: point.figures.get(name) for name in KEPT.keys() & Predicted.model_fields}
    return Predicted(
        **{name: figure for name, figure in figures.items() if figure is not None or name == "gap"},
        memory=dict(zip(MEMORY_KINDS, point.memory, strict=True)),
        terms=point.terms,
        sources=point.sources,
        collectives=tuple(
            CollectiveCount(kind=k, axes=tuple(a), bytes=b, count=c) for k, a, b, c in point.collectives
        ),
    )


def _strategy_fields(space: Space, point: Point) -> dict[str, Any]:
    names = space.mesh.names
    operators, parameters = dict(point.record.operators), dict(point.record.parameters)
    position = dict(zip(space.variables, range(len(space.variables)), strict=True))
    for name, group in space.groups.items():
        which = point.choice[position[name]]
        labels = space.labels(name, which)
        operators[name] = OperatorPlan(
            axes=dict(zip(names, labels, strict=True)), micro=group["micro"], members=tuple(group["members"])
        )
        option = group["options"][space.position(name, which)][point.options[position[name]]]
        for parameter, stored in zip(group["parameters"], option, strict=True):
            parameters[parameter] = ParameterPlan(key=space.keys[parameter], stored=tuple(stored))
    for name, layouts in space.shared.items():
        stored = layouts[point.choice[position[Variable.of_parameter(name)]]]
        parameters[name] = ParameterPlan(key=space.keys[name], stored=tuple(stored))
    hubs = {
        name: tuple(layouts[point.choice[position[Variable.of_hub(name)]]])
        for name, layouts in space.hubs.items()
    }
    return {
        "operators": operators,
        "parameters": parameters,
        "hubs": hubs,
        "recomputed": (*point.record.recomputed, *space.recomputed(point.choice)),
        "once": space.once(point.choice),
        "gathered_again": space.gathered_again(point.options),
        "stages": point.record.stages,
    }
