"""Verification of strategies: predict their costs, run them on ranks, and compare."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from tensoropt.cluster import Cluster, load_cluster
from tensoropt.console import shows_progress
from tensoropt.costs.source import CostSource
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.errors import MeasurementError, PlanError
from tensoropt.execute.executable import strategy_of_plan
from tensoropt.exploration.rates import made_for
from tensoropt.plan.plan import Plan
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tensoropt.ranks.local_hardware import local_backend
from tensoropt.ranks.pool import RankPool
from tensoropt.ranks.worker_process import RankError
from tensoropt.sharding.strategy import ParallelStrategy
from tensoropt.types import Progress, ProgressChoice, heard
from tensoropt.verify.answer import answer_of
from tensoropt.verify.fake_ranks import check_on_fake_ranks
from tensoropt.verify.findings import RunFindings
from tensoropt.verify.onnx_file import verify_file
from tensoropt.verify.predict import Place, Prediction, Wanted, cluster_of, place_for, prediction_of
from tensoropt.verify.rank_checks import CheckOptions, hold_model
from tensoropt.verify.real_ranks import verify_strategies
from tensoropt.verify.reference import ModuleFindings, module_difference

Predicted = tuple[ParallelStrategy, Prediction]
_TIMEOUT_S = 600.0
"""The time-out of one strategy, in seconds."""


@contextmanager
def ranks_with(spec: ModelSpec, place: Place, devices: int) -> Iterator[RankPool | None]:
    """Yield a pool of ranks that capture the model in the background, or None for fake ranks. Errors of the
    capture are ignored, as they appear again when the pool is used."""
    if place.kind == "fake":
        yield None
        return
    with place.pool(devices, _TIMEOUT_S) as pool:

        def prepare() -> None:
            with suppress(RankError, MeasurementError):
                pool.run(hold_model, spec)

        ahead = threading.Thread(target=prepare, name="ranks-ahead")
        ahead.start()
        try:
            yield pool
        except BaseException:
            pool.interrupt()  # do not wait for ranks after an error or an interrupt
            raise
        finally:
            ahead.join()


def predict_and_run(
    spec: ModelSpec,
    predict_all: Callable[[CostSource], Sequence[Predicted]],
    cluster: Cluster,
    place: Place,
    pool: RankPool | None,
    settings: Settings,
    store: ProfileStore | None,
    progress: Progress,
    *,
    numerics: bool = True,
) -> dict[str, Any]:
    """Predict strategies, run them, and return the report (:func:`tensoropt.verify.answer.answer_of`).

    Args:
        predict_all: a function from a source of costs to strategies with their predictions.
        pool: the ranks of :func:`ranks_with`.
        store: the profile store; None for this machine's.
        numerics: whether to compare numbers, which takes most of the time.
    """
    with nullcontext(store) if store else ProfileStore() as own:
        # Ranks of another kind than the cluster's devices run its strategies, but their times say nothing
        # about the cluster.
        alike = not place.shared and place.backend == local_backend(cluster)
        measured_on = pool if alike else None
        costs = CostSource(cluster, own, settings, measured_on, progress)
        predicted = predict_all(costs)
    strategies, predictions = [s for s, _ in predicted], [p for _, p in predicted]
    module: ModuleFindings | None = None
    if pool is None:
        findings = _on_fake_ranks(spec, strategies, settings.optimizer, progress)
    else:
        if numerics:
            progress("reference", 0, 1, "the unsplit graph against the model itself")
            # In float32 whatever the plan computes in: the module itself knows nothing of the plan's
            # precision.
            module = pool.run(module_difference, replace(spec, compute_dtype="float32"), spec.seed)[0]
            progress("reference", 1, 1, "")
        options = CheckOptions(optimizer=settings.optimizer, seed=spec.seed, numerics=numerics)
        if place.shared:
            options = replace(options, timed_steps=0)
        progress("run", 0, len(strategies), "")
        data = [strategy.to_data() for strategy in strategies]
        findings = verify_strategies(spec, data, pool=pool, options=options, progress=progress)
    file = verify_file(spec)
    return answer_of(strategies, predictions, findings, place, module, file, cluster.device_type)


def _on_fake_ranks(
    spec: ModelSpec, strategies: Sequence[ParallelStrategy], optimizer: str, progress: Progress
) -> list[RunFindings]:
    loaded = load_model(spec)
    findings = []
    for done, strategy in enumerate(strategies):
        progress("fake ranks", done, len(strategies), "")
        findings.append(check_on_fake_ranks(loaded, strategy, optimizer))
    progress("fake ranks", len(strategies), len(strategies), "")
    return findings


@shows_progress
def verify_plan(plan: Plan, *, where: Wanted = "auto", progress: ProgressChoice = None) -> dict[str, Any]:
    """Check a plan by running it beside the unsplit model.

    Args:
        where: ``auto`` for the plan's own devices if this machine has them, else fake ranks; ``ranks`` for
            this machine's CPU ranks; ``share-gpu`` for untimed ranks on its first GPU; or ``fake``.
        progress: True for a bar, False for none, or a function; by default a bar if a person is watching.

    Returns:
        The keys of :func:`tensoropt.verify.answer.answer_of`. ``plans`` has one entry, whose keys
        :func:`tensoropt.verify.answer.entry_of` explains.

    Raises:
        PlanError: the plan cannot be run on this machine.
    """
    report = heard(progress)
    if not plan.model.source:
        raise PlanError(
            "the plan does not say where its model comes from, so it cannot be run without a script; explore "
            "with the command line, or pass source= to tensoropt.explore"
        )
    place = place_for(plan.devices, *cluster_of(plan.cluster), where)
    spec = replace(ModelSpec.of(plan), device=place.device)
    with ranks_with(spec, place, plan.devices) as pool:
        report("capture", 0, 1, spec.source)
        strategy = strategy_of_plan(plan, load_model(spec).graph)
        # CPU ranks if the plan names no cluster.
        cluster = made_for(plan.cluster) or load_cluster(f"cpu:{strategy.devices}")
        settings = Settings(mode=spec.mode, optimizer=plan.optimizer, dtype=plan.compute_dtype)
        report("capture", 1, 1, spec.source)

        def predict_all(costs: CostSource) -> list[Predicted]:
            return [(strategy, prediction_of(plan, strategy, costs))]

        return predict_and_run(spec, predict_all, cluster, place, pool, settings, None, report)
