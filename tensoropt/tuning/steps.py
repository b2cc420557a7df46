"""Measurement of a plan's steps on its ranks: the durations of steps and of their collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.execute.executable import engine_of, strategy_from_data
from tensoropt.verify.fake_ranks import RunStep

_COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
_Stamps = list[tuple[str, float, float]]
"""The name, start and end of each collective, on the ranks' common clock."""


def run_steps(
    rank: int, world_size: int, spec: ModelSpec, strategy: Mapping[str, Any], optimizer: str, steps: int
) -> dict[str, Any]:
    """Measure the steps of a strategy on one rank; all ranks of the pool run this function.

    Args:
        steps: the number of timed steps, after a warm-up.

    Returns:
        ``steps``: (start, end) of each step, in seconds; ``collectives``: for each step, the name, start and
            end of its collectives.
    """
    loaded = load_model(spec)
    engine = engine_of(strategy_from_data(strategy, loaded.graph), loaded.values)
    step = RunStep(engine, loaded.inputs, optimizer)
    step()
    whole: list[tuple[float, float]] = []
    collectives: list[_Stamps] = []
    for _ in range(steps):
        if world_size > 1:
            dist.barrier()
        with _collectives_stamped() as stamps:
            start = time.perf_counter()
            step()
            whole.append((start, time.perf_counter()))
        collectives.append(stamps)
    return {"steps": whole, "collectives": collectives}


def seconds_of(ranks: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Return the duration in seconds of each step, and that of all its collectives together.

    A collective lasts from the last rank's call to the last rank's return, excluding waits for computation.
    """
    whole = [_span(each) for each in zip(*(rank["steps"] for rank in ranks), strict=True)]
    network = [
        sum(_span([(start, end) for _, start, end in each]) for each in zip(*stamps, strict=True))
        for stamps in zip(*(rank["collectives"] for rank in ranks), strict=True)
    ]
    return whole, network


def _span(stamps: Sequence[tuple[float, float]]) -> float:
    return max(end for _, end in stamps) - max(start for start, _ in stamps)


@contextmanager
def _collectives_stamped() -> Iterator[_Stamps]:
    """Record start and end of collectives; all are made synchronous, as gloo runs on the ranks' cores."""
    stamps: _Stamps = []
    originals = {name: getattr(dist, name) for name in _COLLECTIVES}

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
