"""Checks of strategies on real ranks: numbers against the unsplit model, collectives, memory and time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensoropt.engine.models import ModelSpec
from tensoropt.errors import PlanError
from tensoropt.ranks.pool import RankPool
from tensoropt.ranks.worker_process import RankError
from tensoropt.types import Progress, silent
from tensoropt.verify.agreement import disagreements
from tensoropt.verify.findings import (
    Differences,
    NarrowDistance,
    RunFindings,
    is_rounding,
    near_enough,
    replicas_agree,
    replicas_near,
    within_tolerance,
)
from tensoropt.verify.rank_checks import CheckOptions, RankFindings, check_plan, narrow_distance

_TIMEOUT_S = 600.0
"""The time-out of one strategy, in seconds."""


def verify_strategies(
    model: ModelSpec,
    strategies: Sequence[Mapping[str, Any]],
    *,
    pool: RankPool,
    options: CheckOptions | None = None,
    progress: Progress = silent,
) -> list[RunFindings]:
    """Run strategies on ranks of this machine and compare them with the unsplit model.

    Args:
        strategies: strategies as data, from :meth:`tensoropt.sharding.strategy.ParallelStrategy.to_data`.
        pool: ranks, as many as each strategy has devices.
        progress: a function called after each strategy, with the stage ``run``.

    Raises:
        PlanError: a strategy is for another model.
    """
    options = options or CheckOptions()
    results = []
    for done, data in enumerate(strategies, start=1):
        results.append(_check(model, data, pool, options))
        progress("run", done, len(strategies), "")
    # A second pass, as double precision needs another model, and each rank keeps one model loaded.
    return [
        _decide_in_double(model, data, pool, options, found)
        if _may_be_rounding(found) and model.dtype is None
        else found
        for data, found in zip(strategies, results, strict=True)
    ]


def _may_be_rounding(findings: RunFindings) -> bool:
    """Return whether to compare again in double precision: differences are too large, but finite."""
    return findings.numerics_ok is False and not findings.error and findings.differences.finite


def _decide_in_double(
    model: ModelSpec, data: Mapping[str, Any], pool: RankPool, options: CheckOptions, narrow: RunFindings
) -> RunFindings:
    """Return ``narrow`` with a comparison in double precision, which tells rounding from a fault.

    Rounding across a kink (a ReLU at zero) changes gradients by whole elements: 7 % on a ResNet with 2x2
    images, 55 % in bfloat16 on a small VGG. In double precision that is a billion times rarer, and a wrong
    placement is as wrong as before. :func:`near_enough` finds faults that only the narrow type has.
    """
    numerics = replace(options, memory=False, timed_steps=0)
    double = _check(replace(model, dtype="float64"), data, pool, numerics)
    if double.error:
        return narrow
    # Replicas first: bits that differ between them are not rounding in any precision.
    right = bool(double.replicas_agree) and is_rounding(narrow.differences, double.differences)
    error = narrow.error
    if right:
        assert narrow.compared_in is not None
        try:
            ranks = pool.run(narrow_distance, model, data, numerics, timeout_s=_TIMEOUT_S)
        except RankError as failure:
            return replace(narrow, error=str(failure))
        far = [distance for distance in ranks if not near_enough(distance, narrow.compared_in)]
        if far:
            right, error = False, _only_narrow(far[0], narrow.compared_in)
    return replace(
        narrow,
        differences=double.differences,
        worst_gradient=double.worst_gradient,
        worst_parameter=double.worst_parameter,
        replicas_agree=double.replicas_agree,
        replica_difference=double.replica_difference,
        numerics_ok=right,
        compared_in=double.compared_in,
        narrow=narrow.differences,
        error=error,
    )


def _only_narrow(distance: NarrowDistance, precision: str) -> str:
    return (
        f"right in float64, wrong in {precision}: gradients are off by {distance.split:.1e} of their norm, "
        f"the unsplit model's in {precision} by {distance.unsplit:.1e}; look for a cast to a narrow type"
    )


def _check(model: ModelSpec, data: Mapping[str, Any], pool: RankPool, options: CheckOptions) -> RunFindings:
    try:
        ranks = pool.run(check_plan, model, data, options, timeout_s=_TIMEOUT_S)
    except RankError as error:
        # A plan for another model is the caller's mistake, not a finding about the strategy.
        if isinstance(error.cause, PlanError):
            raise error.cause from error
        return RunFindings.failed(str(error))
    return _joined(ranks)


def _joined(ranks: Sequence[RankFindings]) -> RunFindings:
    # A step takes as long as its slowest rank; the median is taken over steps, not over ranks.
    steps = [max(times) for times in zip(*(r.times_s for r in ranks), strict=True)]
    memory = [r.memory for r in ranks if r.memory is not None]
    findings = RunFindings(
        collectives_of_ranks=[r.collectives for r in ranks],
        ranks_checked=list(range(len(ranks))),
        ranks_unlike=disagreements({rank: r.calls for rank, r in enumerate(ranks)}),
        memory_tracked=max(memory, key=lambda m: m["peak"], default={}),
        memory_tracked_of_ranks=[m["peak"] for m in memory],
        time_measured_s=statistics.median(steps) if steps else None,
    )
    return _with_numerics(findings, ranks)


def _with_numerics(findings: RunFindings, ranks: Sequence[RankFindings]) -> RunFindings:
    numerics = [r.numerics for r in ranks if r.numerics is not None]
    if not numerics:
        return findings
    gradient, parameter, buffer = (
        max(getattr(n, kind) for n in numerics) for kind in ("gradient", "parameter", "buffer")
    )
    differences = Differences(max(n.loss for n in numerics), gradient.size, parameter.size, buffer.size)
    precision = ranks[0].precision
    # All ranks that share a shard have the same number; other ranks have others.
    spreads = [n.spread for n in numerics if n.spread is not None]
    spread = max(spreads, default=None)
    alike = replicas_agree([n.replicas for n in numerics])
    agree = alike or replicas_near(spread, precision)
    return replace(
        findings,
        differences=differences,
        worst_gradient=gradient.name,
        worst_parameter=parameter.name,
        not_finite=numerics[0].not_finite,
        replicas_agree=agree,
        replica_difference=0.0 if alike else spread,
        unsplit_on=numerics[0].unsplit_on,
        numerics_ok=agree and within_tolerance(differences, precision, numerics[0].rounding),
        compared_in=precision,
    )
