"""Prediction beside reality: plans are run next to the unsplit model on the same data.

What is predicted comes from the cost side (facts, measurements, link fits), what is measured from the
executor; here the two meet and ``ok`` is decided: the numbers agree to rounding, replicas agree, and the
collectives issued are those predicted, one by one. Memory and time are shown, not judged.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from tensoropt.api import MAX_AXES
from tensoropt.cluster import Cluster, Mesh, available_cores, load_cluster
from tensoropt.costs.collectives import predicted_collectives
from tensoropt.costs.pool import RankPool
from tensoropt.costs.prices import Prices
from tensoropt.costs.source import CostSource, is_local, real_shape
from tensoropt.costs.store import ProfileStore
from tensoropt.costs.workload import workload
from tensoropt.errors import PlanError, TensorOptError
from tensoropt.execute.counts import unsplit_strategy
from tensoropt.execute.models import LoadedModel, ModelSpec, load_model
from tensoropt.execute.rank_checks import CheckOptions
from tensoropt.execute.recorder import compare_collectives
from tensoropt.execute.verify import verify_module, verify_strategies, within_tolerance
from tensoropt.plan import Plan
from tensoropt.plan.judge import judge_strategy
from tensoropt.plan.overlap import overlap_of
from tensoropt.plan.plan import MeshInfo, OperatorPlan, ParameterPlan, Predicted
from tensoropt.plan.problem import Problem, Settings, micro_batch_counts
from tensoropt.plan.source import OnnxOptions
from tensoropt.sharding.configurations import MicroBatchRefused, micro_batch_strategies
from tensoropt.sharding.serialise import strategy_to_dict
from tensoropt.sharding.strategy import Strategy
from tensoropt.testing.strategies import micro_strategies, random_strategy

Progress = Callable[[str, int, int, str], None]
Rows = list[dict[str, Any]]
TIMEOUT_S = 600.0
"""For one strategy; big models on small machines take minutes."""


@dataclass(frozen=True)
class Prediction:
    """What the cost side says of a strategy: collectives (axes from 0), bytes and seconds of one rank."""

    collectives: Rows
    memory_bytes: float
    time_s: float


def verify_plan(plan: Plan, *, progress: Progress) -> dict[str, Any]:
    """:func:`verify_plans` for one plan."""
    return verify_plans([plan], progress=progress)


def verify_plans(plans: Sequence[Plan], *, progress: Progress) -> dict[str, Any]:
    """Run plans of one model and optimizer on CPU ranks of this machine beside the unsplit model.

    Returns:
        ``ok``, ``plans`` with an entry for each (keys of DESIGN section 9), and ``module``: the unsplit graph
        against the model it came from.

    Raises:
        PlanError: a plan is for another model, or cannot be run here.
    """
    for plan in plans:
        _check_runnable(plan)
    spec = model_spec(plans[0])
    progress("capture", 0, 1, spec.source)
    graph = load_model(spec).graph
    strategies = [plan.strategy(graph) for plan in plans]
    progress("capture", 1, 1, spec.source)
    predictions = [
        Prediction(
            [c.model_dump(mode="json") for c in plan.predicted.collectives],
            plan.predicted.memory_bytes,
            plan.predicted.time_s,
        )
        for plan in plans
    ]
    with RankPool(plans[0].devices, timeout_s=TIMEOUT_S) as pool:
        return _run(spec, strategies, predictions, pool, plans[0].optimizer, progress)


def _check_runnable(plan: Plan) -> None:
    if plan.model.mode != "train":
        raise PlanError(
            "the plan is for inference, but verify runs training plans only; explore with --mode train"
        )
    if not plan.model.source:
        raise PlanError(
            "the plan does not say where its model comes from, so it cannot be run without a script; explore "
            "with the command line, or pass source= to tensoropt.explore"
        )
    check_room(plan.devices)


def model_spec(plan: Plan) -> ModelSpec:
    """The model of a plan, as ranks build it."""
    return ModelSpec.of(plan)


def verify_random(
    source: str,
    cluster: str | Cluster,
    count: int,
    *,
    seed: int = 0,
    batch: int | None = None,
    dtype: str = "float32",
    onnx: OnnxOptions | None = None,
    store: ProfileStore | None = None,
    progress: Progress,
) -> dict[str, Any]:
    """Run random legal strategies of a model, not only those of a frontier; see :func:`verify_plan`.

    Args:
        source: of the model.
        cluster: its meshes are drawn from; every device becomes a CPU rank here.
        count: how many strategies.
        seed: decides the weights and the strategies.
        batch: of a zoo model.
        dtype: ``float32`` or ``bfloat16``, as for :func:`tensoropt.explore`.
        onnx: what an ONNX file leaves open.
    """
    if count < 1:
        raise TensorOptError(f"{count} random strategies prove nothing; ask for at least 1")
    where = load_cluster(cluster)
    check_room(where.device_count)
    settings = Settings(dtype=dtype)
    sizes = () if batch is None else (("batch", batch),)
    spec = ModelSpec(source, seed, settings=sizes, compute_dtype=dtype, onnx=onnx)
    progress("capture", 0, 1, source)
    loaded = load_model(spec)
    problem = _problem(loaded)
    progress("capture", 1, 1, source)
    meshes, counts = where.meshes(MAX_AXES), micro_batch_counts(problem, settings)
    rng = random.Random(seed)
    drawn: list[tuple[Strategy, Mesh]] = []
    for _ in range(count):
        mesh, micro = rng.choice(meshes), rng.choice(counts)
        per_group = micro_strategies(loaded.graph, micro)
        drawn.append((random_strategy(loaded.graph, (micro, *real_shape(mesh)), per_group, rng), mesh))
    return _predict_and_run(spec, loaded, drawn, where, settings, store, progress)


def verify_unsplit(spec: ModelSpec, optimizer: str, *, progress: Progress) -> dict[str, Any]:
    """The unsplit model on one rank, predicted and run like a plan: what the others are compared with."""
    loaded = load_model(spec)
    where = load_cluster("local:1")
    drawn = [(unsplit_strategy(loaded.graph), where.meshes(1)[0])]
    return _predict_and_run(spec, loaded, drawn, where, Settings(optimizer=optimizer), None, progress)


def unsplit_plan(like: Plan, found: Mapping[str, Any]) -> Plan:
    """The unsplit model as a plan for one device, to be run as others are.

    Args:
        like: a plan of the same model.
        found: what :func:`verify_unsplit` found.
    """
    data = strategy_to_dict(unsplit_strategy(load_model(model_spec(like)).graph))
    return like.model_copy(
        update={
            "planner": "unsplit",
            "cluster": load_cluster("local:1").to_dict(),
            "mesh": MeshInfo(shape=(), names=()),
            "micro_batches": 1,
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
                memory_bytes=found["memory_predicted_bytes"],
                time_s=found["time_predicted_s"],
                compute_s=found["time_predicted_s"],
                communication_s=0.0,
                additive_memory_bytes=found["memory_predicted_bytes"],
            ),
        }
    )


def _predict_and_run(
    spec: ModelSpec,
    loaded: LoadedModel,
    drawn: Sequence[tuple[Strategy, Mesh]],
    where: Cluster,
    settings: Settings,
    store: ProfileStore | None,
    progress: Progress,
) -> dict[str, Any]:
    with ExitStack() as stack:
        own = store or stack.enter_context(ProfileStore())
        pool = stack.enter_context(RankPool(where.device_count, timeout_s=TIMEOUT_S))
        costs = CostSource(
            where,
            own,
            settings,
            pool if is_local(where) else None,
            progress,
        )
        predictions = predict(drawn, costs)
        return _run(spec, [s for s, _ in drawn], predictions, pool, settings.optimizer, progress)


def predict(drawn: Sequence[tuple[Strategy, Mesh]], costs: CostSource) -> list[Prediction]:
    """Price strategies as the cost tables do, measuring only what these strategies need."""
    works = [
        {
            name: workload(strategy.graph, configuration, strategy.mesh)
            for name, configuration in strategy.configurations.items()
        }
        for strategy, _ in drawn
    ]
    costs.measure({w.key: w for of_strategy in works for w in of_strategy.values()})
    models = {mesh.label: costs.communication(mesh) for mesh in dict.fromkeys(mesh for _, mesh in drawn)}
    compute, upkeep = costs.compute(), costs.upkeep()
    predictions = []
    for (strategy, mesh), of_strategy in zip(drawn, works, strict=True):
        facts = {name: costs.facts_of(w) for name, w in of_strategy.items()}
        found = predicted_collectives(strategy, facts)
        optimizer = costs.settings.optimizer
        prices = Prices(strategy.graph, strategy.mesh, compute, models[mesh.label], optimizer, upkeep)
        overlap = overlap_of(costs.cluster, mesh)
        played = judge_strategy(strategy, of_strategy, facts, prices, optimizer, overlap).played
        rows = [{**c._asdict(), "axes": list(c.axes), "count": n} for c, n in sorted(found.items())]
        predictions.append(Prediction(rows, float(played.memory.sum()), float(played.total_s[0])))
    return predictions


def check_room(devices: int) -> None:
    """Refuse clusters whose ranks this machine could only pretend to run."""
    cores = len(available_cores())
    most = max(16, 2 * cores)
    if devices > most:
        raise TensorOptError(
            f"verify starts one process per device: {devices} are too many for {cores} cores; use a plan for "
            f"at most {most} devices, for example --cluster local:{cores}"
        )


def _problem(loaded: LoadedModel) -> Problem:
    try:
        return Problem(loaded.captured, loaded.graph, micro_batch_strategies(loaded.graph))
    except MicroBatchRefused as refusal:
        return Problem(loaded.captured, loaded.graph, micro_strategies(loaded.graph, 1), str(refusal))


def _run(
    spec: ModelSpec,
    strategies: Sequence[Strategy],
    predictions: Sequence[Prediction],
    pool: RankPool,
    optimizer: str,
    progress: Progress,
) -> dict[str, Any]:
    progress("reference", 0, 1, "the unsplit graph against the model itself")
    module = verify_module(replace(spec, compute_dtype="float32"), pool, spec.seed)
    progress("reference", 1, 1, "")
    progress("run", 0, len(strategies), "")
    results = verify_strategies(
        spec,
        [strategy_to_dict(s) for s in strategies],
        pool=pool,
        options=CheckOptions(optimizer=optimizer, seed=spec.seed),
        progress=lambda done, total: progress("run", done, total, ""),
    )
    rows = zip(strategies, predictions, results, strict=True)
    plans = [_joined(*row) for row in rows]
    faithful = module is None or within_tolerance(
        {"parameter_difference": 0.0, "buffer_difference": 0.0} | module
    )
    return {"ok": faithful and all(p["ok"] for p in plans), "plans": plans, "module": module}


def _joined(strategy: Strategy, predicted: Prediction, found: Mapping[str, Any]) -> dict[str, Any]:
    """Predicted and measured of one strategy."""
    issued = [row | {"axes": [a - 1 for a in row["axes"]]} for row in found["collectives_issued"]]
    unlike = [] if found["error"] else compare_collectives(predicted.collectives, issued)
    return {
        "ok": bool(found["numerics_ok"]) and not unlike,
        "mesh": "x".join(map(str, strategy.mesh[1:])) or "1",
        "micro_batches": strategy.micro_batches,
        "loss_difference": found["loss_difference"],
        "gradient_difference": found["gradient_difference"],
        "worst_gradient": found["worst_gradient"],
        "parameter_difference": found["parameter_difference"],
        "buffer_difference": found["buffer_difference"],
        "replicas_agree": found["replicas_agree"],
        "collectives_predicted": predicted.collectives,
        "collectives_issued": issued,
        "collectives_unlike": unlike,
        "memory_predicted_bytes": round(predicted.memory_bytes),
        "memory_tracked_bytes": found["memory_tracked_bytes"],
        "memory_tracked": found["memory_tracked"],
        "time_predicted_s": predicted.time_s,
        "time_measured_s": found["time_measured_s"],
        "error": found["error"],
    }
