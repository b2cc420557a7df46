"""What ranks measure of a plan: seconds of its steps, their collectives, and every operator and edge."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from tensoropt.cluster import stolen_s
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.execute.executable import engine_of, strategy_class
from tensoropt.verify.fake_ranks import RunStep, tracked_memory
from tensoropt.verify.timed_work import operator_seconds

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
"""Those that the executor calls."""
Stamps = list[tuple[str, float, float]]
"""Name, start and end of collectives; ranks of a machine read one clock."""


def run_steps(
    rank: int,
    world_size: int,
    spec: ModelSpec,
    strategy: Mapping[str, Any],
    optimizer: str,
    steps: int,
    stamped_steps: int = 0,
    tracked: int = 0,
) -> dict[str, Any]:
    """Return what one rank measures of a strategy (runs in the pool).

    Args:
        steps: how many are timed, after one that warms up and makes the optimizer's state.
        stamped_steps: how many more are run with the seconds of each operator and edge, if the strategy is
            sharded.
        tracked: of how many more the most bytes are followed that are alive in each.

    Returns:
        ``steps``: start and end of each; ``collectives``: of each step; ``stolen_s``: seconds that the host
        of a virtual machine took meanwhile; ``forward_s``, ``backward_s``: medians by operator or edge;
        ``memory_bytes``.
    """
    loaded = load_model(spec)
    engine = engine_of(strategy_class(strategy).from_data(strategy, loaded.graph), loaded.values)
    step = RunStep(engine, loaded.inputs, optimizer)
    step()
    memory = [tracked_memory(step)["peak"] for _ in range(tracked)]
    whole: list[tuple[float, float]] = []
    collectives: list[Stamps] = []
    stolen: list[float] = []
    for _ in range(steps):
        if world_size > 1:
            dist.barrier()
        taken_s = stolen_s()
        with _collectives_stamped() as stamps:
            start = time.perf_counter()
            step()
            whole.append((start, time.perf_counter()))
        collectives.append(stamps)
        stolen.append(stolen_s() - taken_s)
    found = {
        "steps": whole,
        "collectives": collectives,
        "stolen_s": stolen,
        "memory_bytes": memory,
    }
    if stamped_steps:
        found |= operator_seconds(step, engine, stamped_steps)
    return found


def seconds_of(ranks: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[dict[str, float]]]:
    """Return the seconds of each step, and of these the seconds of its collectives by name.

    A collective counts from the call of the rank that comes last to the return of the one that is done last:
    it is what the collective takes, without the waiting for a rank that computes. The rest of the step is
    computing, and waiting for it.
    """
    whole = [_span(each) for each in zip(*(rank["steps"] for rank in ranks), strict=True)]
    network = []
    for stamps in zip(*(rank["collectives"] for rank in ranks), strict=True):
        by_name = defaultdict[str, float](float)
        for each in zip(*stamps, strict=True):
            by_name[each[0][0]] += _span([(start, end) for _, start, end in each])
        network.append(dict(by_name))
    return whole, network


def _span(stamps: Sequence[tuple[float, float]]) -> float:
    """From the last start to the last end."""
    return max(end for _, end in stamps) - max(start for start, _ in stamps)


@contextmanager
def _collectives_stamped() -> Iterator[Stamps]:
    """Collectives issued meanwhile, in the order in which they are issued.

    Asynchronous ones are waited for at once: gloo's threads run on the cores that compute, and nothing else
    tells how long one takes by itself.
    """
    stamps: Stamps = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def stamping(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            work = function(*args, **kwargs)
            if kwargs.get("async_op"):
                work.wait()
            stamps.append((name, start, time.perf_counter()))
            return work

        return call

    for name, function in originals.items():
        setattr(dist, name, stamping(name, function))
    try:
        yield stamps
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
