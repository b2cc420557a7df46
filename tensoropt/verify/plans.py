"""Plans and random strategies, predicted, run and compared."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from tensoropt.api import MAX_AXES
from tensoropt.cluster import Cluster, Mesh, load_cluster
from tensoropt.costs.source import CostSource, real_shape
from tensoropt.engine.counts import unsplit_strategy
from tensoropt.engine.models import LoadedModel, ModelSpec, load_model
from tensoropt.errors import PlanError, TensorOptError
from tensoropt.placement.plans import PlacedStrategy, placed_strategy, placed_to_dict
from tensoropt.placement.prices import PlacedPrices
from tensoropt.plan import Plan
from tensoropt.plan.model_source import OnnxOptions
from tensoropt.plan.plan import MeshInfo, OperatorPlan, ParameterPlan, Predicted
from tensoropt.plan.problem import Problem, Settings, micro_batch_counts
from tensoropt.profiling.store import ProfileStore
from tensoropt.ranks.local_hardware import local_backend
from tensoropt.ranks.pool import RankPool
from tensoropt.sharding.configurations import MicroBatchRefused, micro_batch_strategies
from tensoropt.sharding.serialise import strategy_to_dict
from tensoropt.sharding.strategy import Strategy
from tensoropt.types import Progress
from tensoropt.verify.check import verify_module, verify_strategies, within_tolerance
from tensoropt.verify.fake_ranks import check_on_fake_ranks, check_placed_on_fake_ranks, fake_result
from tensoropt.verify.places import Place, Wanted, cluster_of, place_for
from tensoropt.verify.predict import Prediction, predict, predict_placed, prediction_of
from tensoropt.verify.random_placements import random_placement, random_splits
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tensoropt.verify.rank_checks import CheckOptions
from tensoropt.verify.recorder import compare_collectives, shown_axes

AnyStrategy = Strategy | PlacedStrategy
RECOMPUTE = 0.3
"""How often a repeated block of a random strategy is recomputed."""
TIMEOUT_S = 600.0
"""For one strategy; big models on small machines take minutes."""


def verify_plan(plan: Plan, *, where: Wanted = "auto", progress: Progress) -> dict[str, Any]:
    """:func:`verify_plans` for one plan."""
    return verify_plans([plan], where=where, progress=progress)


def verify_plans(plans: Sequence[Plan], *, where: Wanted = "auto", progress: Progress) -> dict[str, Any]:
    """Run plans of one model, cluster and optimizer beside the unsplit model.

    Args:
        where: ``auto`` takes the plan's own devices where they are here, else fake ranks; ``ranks`` takes CPU
            ranks of this machine whatever the plan is for; ``fake`` takes fake ranks.

    Returns:
        ``ok``, ``plans`` with an entry for each (keys of DESIGN section 9; None for what fake ranks cannot
        say), ``checked_on`` in words, and ``module``: the unsplit graph against the model it came from.

    Raises:
        PlanError: a plan is for another model, or cannot be run here.
    """
    first = plans[0]
    for plan in plans:
        _check_runnable(plan)
    place = place_for(first.devices, *cluster_of(first.cluster), where)
    spec = replace(model_spec(first), device=place.device)
    progress("capture", 0, 1, spec.source)
    graph = load_model(spec).graph
    strategies = [placed_strategy(p, graph) if p.placed is not None else p.strategy(graph) for p in plans]
    progress("capture", 1, 1, spec.source)
    predictions = [prediction_of(plan, graph) for plan in plans]
    if place.kind == "fake":
        return _check_fake(spec, strategies, predictions, place, first.optimizer, progress)
    with RankPool(first.devices, timeout_s=TIMEOUT_S, backend=place.backend) as pool:
        return _run(spec, strategies, predictions, place, pool, first.optimizer, progress)


def _check_runnable(plan: Plan) -> None:
    if not plan.model.source:
        raise PlanError(
            "the plan does not say where its model comes from, so it cannot be run without a script; explore "
            "with the command line, or pass source= to tensoropt.explore"
        )


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
    where: Wanted = "auto",
    placed: bool = False,
    store: ProfileStore | None = None,
    progress: Progress,
) -> dict[str, Any]:
    """Run random legal strategies of a model, not only those of a frontier; see :func:`verify_plans`.

    Args:
        source: of the model.
        cluster: its meshes are drawn from.
        count: how many strategies.
        seed: decides the weights and the strategies.
        batch: of a zoo model.
        dtype: ``float32`` or ``bfloat16``, as for :func:`tensoropt.explore`.
        onnx: what an ONNX file leaves open.
        where: as for :func:`verify_plans`.
        placed: random placements instead, some operators in pieces, in random orders.
    """
    if count < 1:
        raise TensorOptError(f"{count} random strategies prove nothing; ask for at least 1")
    target = load_cluster(cluster)
    place = place_for(target.device_count, target.device_type, target.name, where)
    sizes = () if batch is None else (("batch", batch),)
    spec = ModelSpec(source, seed, settings=sizes, compute_dtype=dtype, onnx=onnx, device=place.device)
    progress("capture", 0, 1, source)
    loaded = load_model(spec)
    problem = _problem(loaded)
    progress("capture", 1, 1, source)
    if placed:
        return _predict_and_run_placed(
            spec, loaded, count, seed, target, place, Settings(dtype=dtype), store, progress
        )
    drawn = draw_strategies(loaded, problem, target, count, seed)
    return _predict_and_run(spec, loaded, drawn, target, place, Settings(dtype=dtype), store, progress)


def draw_strategies(
    loaded: LoadedModel, problem: Problem, cluster: Cluster, count: int, seed: int
) -> list[tuple[Strategy, Mesh]]:
    """Random legal strategies on random meshes of a cluster, with random micro-batch counts."""
    meshes, counts = cluster.meshes(MAX_AXES), micro_batch_counts(problem, Settings())
    rng = random.Random(seed)
    drawn = []
    for _ in range(count):
        mesh, micro = rng.choice(meshes), rng.choice(counts)
        per_group = micro_strategies(loaded.graph, micro)
        strategy = random_strategy(loaded.graph, (micro, *real_shape(mesh)), per_group, rng, RECOMPUTE)
        drawn.append((strategy, mesh))
    return drawn


def verify_unsplit(spec: ModelSpec, optimizer: str, *, progress: Progress) -> dict[str, Any]:
    """The unsplit model on one rank, predicted and run like a plan: what the others are compared with."""
    loaded = load_model(spec)
    one = load_cluster("local:1")
    drawn = [(unsplit_strategy(loaded.graph), one.meshes(1)[0])]
    settings = Settings(mode=spec.mode, optimizer=optimizer)
    place = place_for(1, "cpu", one.name, "ranks")
    return _predict_and_run(spec, loaded, drawn, one, place, settings, None, progress)


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


def _predict_and_run_placed(
    spec: ModelSpec,
    loaded: LoadedModel,
    count: int,
    seed: int,
    cluster: Cluster,
    place: Place,
    settings: Settings,
    store: ProfileStore | None,
    progress: Progress,
) -> dict[str, Any]:
    rng, devices = random.Random(seed), cluster.device_count
    with ExitStack() as stack:
        costs, pool = _costs(stack, cluster, place, settings, store, progress)
        prices = PlacedPrices(loaded.graph, cluster, costs)
        drawn = []
        for _ in range(count):
            graph = prices.price(random_splits(loaded.graph, devices, rng))
            drawn.append(predict_placed(graph, random_placement(graph.graph, devices, rng)))
        strategies, predictions = [s for s, _ in drawn], [p for _, p in drawn]
        if pool is None:
            return _check_fake(spec, strategies, predictions, place, settings.optimizer, progress)
        return _run(spec, strategies, predictions, place, pool, settings.optimizer, progress)


def _costs(
    stack: ExitStack,
    cluster: Cluster,
    place: Place,
    settings: Settings,
    store: ProfileStore | None,
    progress: Progress,
) -> tuple[CostSource, RankPool | None]:
    """Where figures come from, and the ranks to run on, both open as long as ``stack``."""
    own = store or stack.enter_context(ProfileStore())
    pool: RankPool | None = None
    if place.kind != "fake":
        pool = stack.enter_context(RankPool(cluster.device_count, timeout_s=TIMEOUT_S, backend=place.backend))
    measured_on = pool if pool is not None and pool.backend == local_backend(cluster) else None
    return CostSource(cluster, own, settings, measured_on, progress), pool


def _predict_and_run(
    spec: ModelSpec,
    loaded: LoadedModel,
    drawn: Sequence[tuple[Strategy, Mesh]],
    cluster: Cluster,
    place: Place,
    settings: Settings,
    store: ProfileStore | None,
    progress: Progress,
) -> dict[str, Any]:
    strategies = [s for s, _ in drawn]
    with ExitStack() as stack:
        costs, pool = _costs(stack, cluster, place, settings, store, progress)
        predictions = predict(drawn, costs)
        if pool is None:
            return _check_fake(spec, strategies, predictions, place, settings.optimizer, progress)
        return _run(spec, strategies, predictions, place, pool, settings.optimizer, progress)


def _problem(loaded: LoadedModel) -> Problem:
    try:
        return Problem(loaded.captured, loaded.graph, micro_batch_strategies(loaded.graph))
    except MicroBatchRefused as refusal:
        return Problem(loaded.captured, loaded.graph, micro_strategies(loaded.graph, 1), str(refusal))


def _run(
    spec: ModelSpec,
    strategies: Sequence[AnyStrategy],
    predictions: Sequence[Prediction],
    place: Place,
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
        [_data(s) for s in strategies],
        pool=pool,
        options=CheckOptions(optimizer=optimizer, seed=spec.seed),
        progress=progress,
    )
    return _answer(strategies, predictions, results, place, module)


def _check_fake(
    spec: ModelSpec,
    strategies: Sequence[AnyStrategy],
    predictions: Sequence[Prediction],
    place: Place,
    optimizer: str,
    progress: Progress,
) -> dict[str, Any]:
    loaded = load_model(spec)
    results = []
    for done, strategy in enumerate(strategies):
        progress("fake ranks", done, len(strategies), "")
        if isinstance(strategy, PlacedStrategy):
            found = check_placed_on_fake_ranks(loaded, strategy, optimizer)
        else:
            found = check_on_fake_ranks(loaded, strategy, optimizer)
        results.append(fake_result(found))
    progress("fake ranks", len(strategies), len(strategies), "")
    return _answer(strategies, predictions, results, place, None)


def _answer(
    strategies: Sequence[AnyStrategy],
    predictions: Sequence[Prediction],
    results: Sequence[Mapping[str, Any]],
    place: Place,
    module: Mapping[str, Any] | None,
) -> dict[str, Any]:
    plans = [_joined(*row) for row in zip(strategies, predictions, results, strict=True)]
    faithful = module is None or within_tolerance(module)
    return {
        "ok": faithful and all(p["ok"] for p in plans),
        "checked_on": place.text,
        "plans": plans,
        "module": module,
    }


FOUND = (
    "loss_difference", "gradient_difference", "worst_gradient", "parameter_difference", "worst_parameter",
    "buffer_difference", "not_finite", "replicas_agree", "compared_in", "narrow", "ranks_checked",
    "memory_tracked_bytes", "memory_tracked", "memory_tracked_of_ranks", "time_measured_s", "error",
)  # fmt: skip


def _data(strategy: AnyStrategy) -> dict[str, Any]:
    """As ranks get it."""
    if isinstance(strategy, PlacedStrategy):
        return {"placed": placed_to_dict(strategy)}
    return strategy_to_dict(strategy)


def _mesh(strategy: AnyStrategy) -> str:
    if isinstance(strategy, PlacedStrategy):
        return f"placed on {strategy.devices}"
    return "x".join(map(str, strategy.mesh[1:])) or "1"


def _joined(strategy: AnyStrategy, predicted: Prediction, found: Mapping[str, Any]) -> dict[str, Any]:
    """Predicted and measured of one strategy."""
    issued = [row | {"axes": shown_axes(row)} for row in found["collectives_issued"]]
    unlike = [] if found["error"] else compare_collectives(predicted.collectives, issued)
    unlike += found["ranks_unlike"]
    return {
        "ok": found["numerics_ok"] is not False and not found["error"] and not unlike,
        "mesh": _mesh(strategy),
        "micro_batches": 1 if isinstance(strategy, PlacedStrategy) else strategy.micro_batches,
        **{key: found[key] for key in FOUND},
        "collectives_predicted": predicted.collectives,
        "collectives_issued": issued,
        "collectives_unlike": unlike,
        "memory_predicted_bytes": round(predicted.memory_bytes),
        "time_predicted_s": predicted.time_s,
    }
