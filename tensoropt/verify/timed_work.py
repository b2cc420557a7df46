"""What a plan's operators take in its real steps, for the next exploration of the same machine.

Operators that were timed by themselves are priced by that; those that were timed in a step, which is what
they are for, are priced by what they took there (:class:`~tensoropt.costs.residuals.Residuals`).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from tensoropt.costs.residuals import save_works
from tensoropt.costs.source import CostSource
from tensoropt.engine.engine import Engine
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.engine.stamps import StepStamps, median_seconds, stamped
from tensoropt.pipeline.evaluate import stage_works
from tensoropt.sharding.strategy import ParallelStrategy, Strategy
from tensoropt.verify.fake_ranks import RunStep


def operator_seconds(step: RunStep, engine: Engine, count: int) -> dict[str, dict[str, float]]:
    """Return ``forward_s`` and ``backward_s``, the median seconds of each operator and edge on this rank in
    ``count`` more steps; empty for plans that are not sharded, for inference and on GPUs."""
    if not isinstance(engine, ShardedEngine) or not engine.training or engine.runtime.device.type != "cpu":
        return {}
    steps: list[StepStamps] = []
    for _ in range(count):
        if engine.runtime.distributed:
            dist.barrier()
        with stamped(engine) as stamps:
            step.model()
        steps.append(stamps)
    return median_seconds(steps)


def work_seconds(strategy: Strategy, ranks: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return the (forward, backward) seconds in a step of each of a strategy's workloads, by key, of one
    micro-batch on the slowest rank; without those of recomputed blocks, which run as one."""
    if not all("forward_s" in rank for rank in ranks):
        return {}
    (works,) = stage_works(strategy)
    again = {name for region in strategy.recomputed for name in region.groups}
    by_key: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for group in strategy.graph.groups:
        if group.name in again:
            continue
        seconds = [
            tuple(
                sum(rank[way].get(op.name, 0.0) for op in group.operators)
                for way in ("forward_s", "backward_s")
            )
            for rank in ranks
        ]
        forward_s, backward_s = (max(times) / strategy.micro_batches for times in zip(*seconds, strict=True))
        by_key[works[group.name].key].append((forward_s, backward_s))
    return {
        key: (statistics.median(f for f, _ in times), statistics.median(b for _, b in times))
        for key, times in by_key.items()
    }


def keep_seconds(strategy: ParallelStrategy, ranks: Sequence[Mapping[str, Any]], costs: CostSource) -> None:
    """Keep in the store what a strategy's workloads took in its steps.

    Args:
        ranks: what :func:`operator_seconds` returned on each.
    """
    if isinstance(strategy, Strategy) and (works := work_seconds(strategy, ranks)):
        save_works(costs.store, costs.prefix, works)
