"""The unsplit model as a plan for one device: the basis of comparison for the others."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from tensoropt.cluster import load_cluster
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.plan.plan import MeshInfo, OperatorPlan, ParameterPlan, Plan, Predicted
from tensoropt.question.settings import Settings
from tensoropt.types import Progress
from tensoropt.verify.predict import place_for, predict
from tensoropt.verify.run import predict_and_run, ranks_with


def verify_unsplit(spec: ModelSpec, optimizer: str, *, progress: Progress) -> dict[str, Any]:
    """Predict the unsplit model on one rank and run it like a plan; returns what
    :func:`tensoropt.verify.verify_plans` does."""
    cluster = load_cluster("cpu:1")
    settings = Settings(mode=spec.mode, optimizer=optimizer)
    # On a CPU rank, whatever the plans are for: one device needs no job.
    place = place_for(1, "cpu", cluster.name, "ranks")
    with ranks_with(spec, place, 1) as pool:
        drawn = [(unsplit_strategy(load_model(spec).graph), cluster.meshes(1)[0])]
        return predict_and_run(
            spec, functools.partial(predict, drawn, ()), cluster, place, pool, settings, None, progress
        )


def unsplit_plan(like: Plan, findings: Mapping[str, Any]) -> Plan:
    """Return the unsplit model as a plan for one device, which runs as others do.

    Args:
        like: a plan of the same model.
        findings: the result of :func:`verify_unsplit`.
    """
    data = unsplit_strategy(load_model(ModelSpec.of(like)).graph).to_data()
    return like.model_copy(
        update={
            "planner": "unsplit",
            "cluster": load_cluster("cpu:1").to_dict(),
            "mesh": MeshInfo(shape=(), names=()),
            "micro_batches": 1,
            "recomputed": (),
            "once": (),
            "gathered_again": (),
            "operators": {
                name: OperatorPlan(axes={}, micro=labels[0], members=like.operators[name].members)
                for name, labels in data["groups"].items()
            },
            "hubs": {name: tuple(layout) for name, layout in data["hubs"].items()},
            "parameters": {
                name: ParameterPlan(key=like.parameters[name].key, stored=tuple(layout))
                for name, layout in data["stored"].items()
            },
            "predicted": Predicted(
                memory_bytes=findings["memory_predicted_bytes"],
                time_s=findings["time_predicted_s"],
                compute_s=findings["time_predicted_s"],
                communication_s=0.0,
                additive_memory_bytes=findings["memory_predicted_bytes"],
            ),
        }
    )
