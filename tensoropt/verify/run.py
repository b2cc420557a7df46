"""Strategies run at a place where they can be: the one way from predictions to an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from tensoropt.cluster import Cluster
from tensoropt.costs.source import CostSource
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.errors import MeasurementError
from tensoropt.execute.executable import AnyStrategy, executable_of
from tensoropt.plan.settings import Settings
from tensoropt.profiling.store import ProfileStore
from tensoropt.ranks.failures import RankError
from tensoropt.ranks.local_hardware import local_backend
from tensoropt.ranks.pool import RankPool
from tensoropt.types import Progress
from tensoropt.verify.answer import answer_of
from tensoropt.verify.fake_ranks import check_on_fake_ranks
from tensoropt.verify.findings import RunFindings
from tensoropt.verify.onnx_file import verify_file
from tensoropt.verify.places import Place
from tensoropt.verify.predict import Prediction
from tensoropt.verify.rank_checks import CheckOptions, hold_model
from tensoropt.verify.real_ranks import verify_module, verify_strategies
from tensoropt.verify.reference import ModuleFindings

Predicted = tuple[AnyStrategy, Prediction]
TIMEOUT_S = 600.0
"""The timeout for one strategy; big models on small machines take minutes."""


@contextmanager
def ranks_with(spec: ModelSpec, place: Place, devices: int) -> Iterator[RankPool | None]:
    """Yield ranks of a place, which import PyTorch and capture the model while the caller does; None for fake
    ones.

    A failure there is raised when the ranks are used.
    """
    if place.kind == "fake":
        yield None
        return
    with place.pool(devices, TIMEOUT_S) as pool:

        def prepare() -> None:
            with suppress(RankError, MeasurementError):
                pool.run(hold_model, spec)

        ahead = threading.Thread(target=prepare, name="ranks-ahead")
        ahead.start()
        try:
            yield pool
        except BaseException:
            pool.interrupt()  # a model that is refused, or a person who gives up, waits for no rank
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
) -> dict[str, Any]:
    """Return the answer (:func:`tensoropt.verify.answer.answer_of`) about strategies that are yet to be
    predicted.

    Args:
        spec: the model.
        predict_all: returns the strategies with their predictions, given a source of the figures that it
            needs.
        cluster: the cluster that they are for.
        pool: ranks of the place's kind (:func:`ranks_with`); None for fake ranks.
        store: the store of measurements that predictions need; None for this machine's.
    """
    with nullcontext(store) if store else ProfileStore() as own:
        # Ranks of another kind than the cluster's devices run its strategies, but say nothing about its
        # speed.
        alike = not place.shared and place.backend == local_backend(cluster)
        measured_on = pool if alike else None
        predicted = predict_all(CostSource(cluster, own, settings, measured_on, progress))
        return run_and_answer(spec, predicted, place, pool, settings.optimizer, progress)


def run_and_answer(
    spec: ModelSpec,
    predicted: Sequence[Predicted],
    place: Place,
    pool: RankPool | None,
    optimizer: str,
    progress: Progress,
) -> dict[str, Any]:
    """Run strategies at ``place`` and compare the findings with the predictions (:func:`answer_of`).

    Args:
        spec: the model.
        pool: ranks of the place's kind; None for fake ranks.
        optimizer: the optimizer, for memory and time of a step.
    """
    strategies, predictions = [s for s, _ in predicted], [p for _, p in predicted]
    module: ModuleFindings | None = None
    if pool is None:
        findings = _on_fake_ranks(spec, strategies, optimizer, progress)
    else:
        progress("reference", 0, 1, "the unsplit graph against the model itself")
        # In float32 whatever the plan computes in: the module itself knows nothing of the plan's precision.
        module = verify_module(replace(spec, compute_dtype="float32"), pool, spec.seed)
        progress("reference", 1, 1, "")
        options = CheckOptions(optimizer=optimizer, seed=spec.seed)
        if place.shared:
            options = replace(options, timed_steps=0)
        findings = _on_real_ranks(spec, strategies, pool, options, progress)
    executables = list(map(executable_of, strategies))
    return answer_of(executables, predictions, findings, place, module, verify_file(spec))


def _on_real_ranks(
    spec: ModelSpec,
    strategies: Sequence[AnyStrategy],
    pool: RankPool,
    options: CheckOptions,
    progress: Progress,
) -> list[RunFindings]:
    progress("run", 0, len(strategies), "")
    return verify_strategies(
        spec,
        [executable_of(strategy).to_dict() for strategy in strategies],
        pool=pool,
        options=options,
        progress=progress,
    )


def _on_fake_ranks(
    spec: ModelSpec, strategies: Sequence[AnyStrategy], optimizer: str, progress: Progress
) -> list[RunFindings]:
    loaded = load_model(spec)
    findings = []
    for done, strategy in enumerate(strategies):
        progress("fake ranks", done, len(strategies), "")
        findings.append(check_on_fake_ranks(loaded, strategy, optimizer))
    progress("fake ranks", len(strategies), len(strategies), "")
    return findings
