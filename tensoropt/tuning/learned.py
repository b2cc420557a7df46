"""Correction factors on the costs of computing and of collectives, learned from measured steps of plans."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensoropt.cluster import Mesh
from tensoropt.costs.residuals import NETWORK, NO_RESIDUALS, REST, Residuals
from tensoropt.costs.source import CostSource
from tensoropt.evaluation.evaluate import evaluate_on
from tensoropt.ops.calls import CostClass
from tensoropt.pipeline.evaluate import evaluate_pipeline_on, stage_works
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.placement.prices import PlacedPrices
from tensoropt.placement.strategy import PlacedStrategy
from tensoropt.sharding.strategy import ParallelStrategy, Strategy
from tensoropt.tuning.steps import seconds_of
from tensoropt.verify.predict import predict_placed

_LEAST_S = 1e-3
"""The seconds below which a part of a step is ignored."""
_COMPUTING = (*(cls.value for cls in CostClass), REST)
"""The classes of operators whose costs are multiplied by the factor of computing."""
_BOUNDS = 0.25, 4.0
"""The range of plausible factors."""


def priced(
    strategy: ParallelStrategy, mesh: Mesh, costs: CostSource, residuals: Residuals = NO_RESIDUALS
) -> tuple[float, float]:
    """Return predicted durations of a step and its collectives, in s, after timing unmeasured operators."""
    if not isinstance(strategy, PlacedStrategy):  # placed strategies' prices time missing work themselves
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


@dataclass
class Learned:
    """The ratios of measured to predicted costs that several plans' steps showed (correction factors).

    Attributes:
        costs: the source of measured costs, without correction factors.
        known: earlier correction factors.
    """

    costs: CostSource
    known: Residuals = NO_RESIDUALS
    _factors: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def residuals(self) -> Residuals:
        factors = {kind: statistics.median(found) for kind, found in self._factors.items()}
        return Residuals({**self.known.factors, **factors})

    def learn(self, strategy: ParallelStrategy, mesh: Mesh, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Compare a strategy's step, measured on all ranks, with its predicted costs; record their ratios."""
        step_s, sent_s = (statistics.median(seconds) for seconds in seconds_of(ranks))
        priced_s, priced_sent_s = priced(strategy, mesh, self.costs)
        if sent_s and isinstance(strategy, Strategy):
            self._add(NETWORK, sent_s, priced_sent_s)
            step_s, priced_s = step_s - sent_s, priced_s - priced_sent_s
            kinds: tuple[str, ...] = _COMPUTING
        else:  # in pipelines and placed plans collectives contain waits, and a script's are not timed
            kinds = (*_COMPUTING, NETWORK)
        for kind in kinds:
            self._add(kind, step_s, priced_s)

    def _add(self, kind: str, measured_s: float, priced_s: float) -> None:
        if min(measured_s, priced_s) > _LEAST_S:
            self._factors[kind].append(min(max(measured_s / priced_s, _BOUNDS[0]), _BOUNDS[1]))
