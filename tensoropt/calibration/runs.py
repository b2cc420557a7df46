"""Plans that are run to be compared with what their prices say: step, collectives, computation by class."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from tensoropt.calibration.fit import Equation, Run
from tensoropt.calibration.steps import run_steps, seconds_of
from tensoropt.cluster import Mesh
from tensoropt.costs.compute import class_of
from tensoropt.costs.residuals import (
    BYTE,
    NO_RESIDUALS,
    SECONDS,
    TERMS,
    Residuals,
    factor_of_class,
    touched_bytes,
)
from tensoropt.costs.source import CostSource
from tensoropt.engine.models import CapturedModel, ModelSpec
from tensoropt.evaluation.evaluate import evaluate_on
from tensoropt.pipeline.evaluate import evaluate_pipeline_on, stage_works
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.placement.prices import PlacedPrices
from tensoropt.placement.strategy import PlacedStrategy
from tensoropt.ranks.pool import RankPool
from tensoropt.sharding.strategy import ParallelStrategy, Strategy
from tensoropt.verify.predict import predict_placed
from tensoropt.verify.timed_work import work_seconds

STEPS, STAMPED = 9, 3
"""Steps of which the median is a run's, and those in which operators are stamped: seconds for a small
model."""
_CHANGE_S = {BYTE: 1e-11}
"""The seconds by which a term is changed to see what depends on it; 1e-4 for all others."""
_OF_NETWORK, _OF_CLASS = 0.5, 0.3
"""The weights of a step's parts beside the whole, which is what counts; assumptions."""
_LEAST_S = 1e-3
"""Parts shorter than this say nothing about their class."""


def run_plan(
    spec: ModelSpec,
    strategy: ParallelStrategy,
    optimizer: str,
    pool: RankPool,
    *,
    steps: int = STEPS,
    stamped: int = STAMPED,
) -> list[dict[str, Any]]:
    """Return what each rank measures of a strategy (:func:`~tensoropt.calibration.steps.run_steps`)."""
    found: list[dict[str, Any]] = pool.run(run_steps, spec, strategy.to_data(), optimizer, steps, stamped)
    return found


def described(
    loaded: CapturedModel,
    model: str,
    strategy: ParallelStrategy,
    mesh: Mesh,
    costs: CostSource,
    ranks: Sequence[Mapping[str, Any]],
) -> Run:
    """Return a run: what ranks measured, beside what prices say of it.

    Args:
        costs: measured prices, without residuals; what is not known of the strategy's work is timed.
    """
    whole, network = seconds_of(ranks)
    step_s = statistics.median(whole)
    sent_s = statistics.median(sum(by_name.values()) for by_name in network)
    base = priced(strategy, mesh, costs, NO_RESIDUALS)
    step, sent = dict[str, float](), dict[str, float]()
    for term in TERMS:
        change = _CHANGE_S.get(term, 1e-4) if term in SECONDS else 1.0
        changed = Residuals({term: change if term in SECONDS else 2.0})
        time_s, network_s = priced(strategy, mesh, costs, changed)
        if time_s != base[0]:
            step[term] = (time_s - base[0]) / change
        if network_s != base[1]:
            sent[term] = (network_s - base[1]) / change
    return Run(
        model,
        Equation(step_s, base[0], step),
        Equation(sent_s, base[1], sent, _OF_NETWORK) if min(sent_s, base[1]) > _LEAST_S else None,
        tuple(_by_class(strategy, costs, ranks)) if isinstance(strategy, Strategy) else (),
    )


def priced(
    strategy: ParallelStrategy, mesh: Mesh, costs: CostSource, residuals: Residuals
) -> tuple[float, float]:
    """Return the predicted seconds of a step and of its collectives; a placed plan has none. Work that is not
    known is timed."""
    if not isinstance(strategy, PlacedStrategy):  # whose prices time what they lack
        works = {work.key: work for of in stage_works(strategy) for work in of.values()}
        if new := works.keys() - costs.timings.records.keys():
            costs.timings.measure({key: works[key] for key in new})
    in_step = costs.with_residuals(residuals)
    if isinstance(strategy, PipelinedStrategy):
        pipeline = evaluate_pipeline_on(strategy, mesh, in_step)
        return pipeline.time_s, pipeline.busiest.communication_s
    if isinstance(strategy, PlacedStrategy):
        placed = strategy.placed_graph
        prices = PlacedPrices(strategy.graph, costs.cluster, in_step)
        _, predicted = predict_placed(prices.price(placed.splits, placed.micro_batches), strategy.placement)
        return predicted.time_s, 0.0
    assert isinstance(strategy, Strategy)
    metrics = evaluate_on(strategy, mesh, in_step).metrics
    return float(metrics.time_s[0]), float(metrics.communication_s[0])


def _by_class(strategy: Strategy, costs: CostSource, ranks: Sequence[Mapping[str, Any]]) -> list[Equation]:
    """Return the seconds of computation by class of operators, as stamped and as priced."""
    found = work_seconds(strategy, ranks)
    (works,) = stage_works(strategy)
    compute = costs.with_residuals(NO_RESIDUALS).compute()
    measured, predicted, touched = (defaultdict[str, float](float) for _ in range(3))
    for work in works.values():
        if work.key in found:
            cls, facts = class_of(work), costs.facts.of(work)
            seconds = compute.seconds(work, facts)
            measured[cls] += sum(found[work.key])
            predicted[cls] += sum(seconds)
            touched[cls] += sum(size for size, s in zip(touched_bytes(facts), seconds, strict=True) if s > 0)
    return [
        Equation(
            measured[cls],
            s,
            {factor_of_class(cls): s, BYTE: touched[cls]},
            _OF_CLASS,
        )
        for cls, s in predicted.items()
        if min(s, measured[cls]) > _LEAST_S
    ]
