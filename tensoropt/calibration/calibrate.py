"""``tensoropt calibrate``: once per machine, some minutes of real steps, and what they say of its prices."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from tensoropt.calibration.fit import Run, fit_residuals
from tensoropt.calibration.runs import described, run_plan
from tensoropt.cluster import Cluster, load_cluster
from tensoropt.cluster.local import BUSY, cores_in_use
from tensoropt.console import shows_progress
from tensoropt.costs.residuals import NO_RESIDUALS, Residuals, save_residuals
from tensoropt.costs.source import CostSource
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.errors import TensorOptError
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tensoropt.ranks.local_hardware import has_local_cores, local_pool
from tensoropt.ranks.pool import RankPool
from tensoropt.types import Progress, ProgressChoice, heard
from tensoropt.verify.predict import predict
from tensoropt.verify.random_plans import draw_strategies, problem_of

MODELS: Mapping[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
    "decoder": ("zoo:gpt2-demo", (("layers", 2),)),
    "encoder and decoder": ("zoo:transformer-tiny", (("batch", 32), ("hidden", 256), ("inner", 512))),
    "convolutions": ("zoo:vgg11-tiny", (("batch", 32),)),
    "perceptron": ("zoo:mlp", (("batch", 256),)),
    "recurrent": ("zoo:lstm-lm-tiny", (("batch", 64), ("hidden", 128))),
}
"""The models that are run: one of each kind of layers, of some tens of milliseconds a step on a CPU core."""
PLANS = 6
"""Random strategies of each model: together about as many as there are terms, times two."""
_SEED = 20
_OPTIMIZER = "adam"
_KIND, _VERSION = "calibration", "6"
_LONGEST_WAIT_S = 20.0
"""The longest wait for an idle machine before a plan is run anyway: an assumption."""


@dataclass(frozen=True)
class Calibration:
    """What :func:`calibrate` found.

    Attributes:
        residuals: of the machine.
        runs: the plans that were run.
    """

    cluster: str
    residuals: Residuals
    runs: tuple[Run, ...]


@shows_progress
def calibrate(
    cluster: str | Cluster = "local",
    *,
    plans: int = PLANS,
    again: bool = False,
    store: ProfileStore | None = None,
    progress: ProgressChoice = None,
) -> Calibration:
    """Run short real steps on this machine and fit what they say of its prices; every exploration of the same
    machine counts with it from then on.

    Every run is saved at once, so that an interruption loses one; what is known is not run again.

    Args:
        cluster: ``local``, ``local:N`` or ``cpu:N``: CPU ranks of this machine.
        plans: random strategies of each of :data:`MODELS`.
        again: run also what is known.
        store: the store of measurements; by default the user's own.
        progress: as in :func:`tensoropt.explore`.

    Raises:
        TensorOptError: the cluster is not CPU ranks of this machine, or no plan is asked for.
    """
    if plans < 1:
        raise TensorOptError(f"{plans} plans of each model say nothing; give at least 1")
    where, report = load_cluster(cluster), heard(progress)
    if not has_local_cores(where) or (ranks := local_pool(where)) is None:
        raise TensorOptError(
            f"{where.name} is not CPU ranks of this machine, so its steps cannot be timed here; give local, "
            "local:N or cpu:N"
        )
    with nullcontext(store) if store else ProfileStore() as profile, ranks as pool:
        costs = CostSource(
            where, profile, Settings(optimizer=_OPTIMIZER), pool, report, residuals=NO_RESIDUALS
        )
        runs = []
        for done, name in enumerate(MODELS):
            report("calibrate", done, len(MODELS), name)
            runs += _runs_of(name, plans, costs, pool, again=again)
        residuals = fit_residuals(runs)
        save_residuals(profile, costs.prefix, residuals)
        report("calibrate", len(MODELS), len(MODELS), "done")
    return Calibration(where.name, residuals, tuple(runs))


def _runs_of(name: str, plans: int, costs: CostSource, pool: RankPool, *, again: bool) -> list[Run]:
    """Return the runs of one model, from the store or now."""
    source, settings = MODELS[name]
    spec = ModelSpec(source, settings=settings)
    keys = [_key(costs, spec, number) for number in range(plans)]
    known = {} if again else costs.store.get_many(keys, kind=_KIND)
    if any(record["cores_busy"] >= BUSY for record in known.values()) and cores_in_use() < BUSY:
        known = {key: record for key, record in known.items() if record["cores_busy"] < BUSY}
    if len(known) < len(set(keys)):
        loaded = load_model(spec)
        drawn = draw_strategies(loaded, problem_of(loaded), costs.cluster, plans, _SEED)
        missing = [(key, *one) for key, one in zip(keys, drawn, strict=True) if key not in known]
        # All at once: what several of them share is timed once.
        predict([(strategy, mesh) for _, strategy, mesh in missing], (), costs)
        for done, (key, strategy, mesh) in enumerate(missing):
            costs.progress("calibrate", done, len(missing), f"{name}, plan {done + 1} of {len(missing)}")
            before = _idle(costs.progress)
            ranks = run_plan(spec, strategy, _OPTIMIZER, pool)
            run = described(loaded, name, strategy, mesh, costs, ranks)
            known[key] = replace(run, cores_busy=max(before, cores_in_use())).to_record()
            costs.store.put(key, known[key], kind=_KIND)
    return [Run.from_record(known[key]) for key in keys]


def _idle(progress: Progress) -> float:
    """Wait until other programs leave the machine alone, but not for long; return the cores that they use."""
    until = time.monotonic() + _LONGEST_WAIT_S
    while (cores := cores_in_use()) >= BUSY and time.monotonic() < until:
        progress("calibrate", 0, 1, f"waiting for other programs, which use {cores:.1f} cores")
        time.sleep(1.0)
    return cores


def _key(costs: CostSource, spec: ModelSpec, number: int) -> str:
    """Return the store's key of a run: strategies follow from the model, the seed and the number."""
    about = repr((_VERSION, spec.source, spec.settings, _SEED, _OPTIMIZER, number))
    return f"{costs.prefix}/run/{hashlib.sha256(about.encode()).hexdigest()[:16]}"
