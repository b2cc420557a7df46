"""What one rank measures of a plan: seconds of steps and of their collectives, and the peak of memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from tensoropt.cluster import stolen_s
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.sharding.strategy import Strategy
from tensoropt.verify.fake_ranks import RunStep, tracked_memory

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
"""Those that the executor calls."""
TRACKED = 3
"""A thread of gloo's can hold a tensor for a moment after its collective was waited for, and so add one to a
peak in one step and not in the next."""
Stamps = list[tuple[float, float]]


def run_plan(
    rank: int,
    world_size: int,
    spec: ModelSpec,
    strategy: Mapping[str, Any],
    optimizer: str,
    steps: int,
    tracked: int = 0,
) -> dict[str, Any]:
    """Start and end of each step and of each of its collectives, and the seconds of the machine's cores that
    its host gave to others meanwhile (runs in the pool).

    Ranks of a machine read one clock, so that stamps of several ranks can be compared.

    Args:
        tracked: of how many steps the most bytes are followed that are alive in each.
    """
    loaded = load_model(spec)
    engine = ShardedEngine(Strategy.from_data(strategy, loaded.graph), loaded.values)
    step = RunStep(engine, loaded.inputs, optimizer)
    step()  # warms up, makes the optimizer's state
    memory = [tracked_memory(step)["peak"] for _ in range(tracked)]
    whole: Stamps = []
    collectives: list[Stamps] = []
    stolen: list[float] = []
    for _ in range(steps):
        dist.barrier()
        taken_s = stolen_s()
        with _stamped() as stamps:
            start = time.perf_counter()
            step()
            whole.append((start, time.perf_counter()))
        collectives.append(stamps)
        stolen.append(stolen_s() - taken_s)
    return {"steps": whole, "collectives": collectives, "stolen_s": stolen, "memory_bytes": memory}


def seconds_of(ranks: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of these the seconds of its collectives.

    A collective counts from the call of the rank that comes last to the return of the one that is done last:
    it is what the collective takes, without the waiting for a rank that computes. The rest of the step is
    computing, and waiting for it.
    """
    whole = [_span(each) for each in zip(*(rank["steps"] for rank in ranks), strict=True)]
    network = [
        sum(_span(each) for each in zip(*stamps, strict=True))
        for stamps in zip(*(rank["collectives"] for rank in ranks), strict=True)
    ]
    return whole, network


def _span(stamps: Sequence[tuple[float, float]]) -> float:
    """From the last start to the last end."""
    return max(end for _, end in stamps) - max(start for start, _ in stamps)


@contextmanager
def _stamped() -> Iterator[Stamps]:
    """Start and end of the collectives issued meanwhile, in the order in which they are issued.

    Asynchronous ones are waited for at once: gloo's threads run on the cores that compute, and nothing else
    tells how long one takes by itself.
    """
    stamps: Stamps = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def stamped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            work = function(*args, **kwargs)
            if kwargs.get("async_op"):
                work.wait()
            stamps.append((start, time.perf_counter()))
            return work

        return call

    for name, function in originals.items():
        setattr(dist, name, stamped(function))
    try:
        yield stamps
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
