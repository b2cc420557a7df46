"""What one rank measures of a plan: seconds of steps and of their collectives, and the peak of memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tensoropt.costs.measure import make_optimizer
from tensoropt.execute.engine import Engine
from tensoropt.execute.models import ModelSpec, load_model
from tensoropt.execute.recorder import MemoryTracker
from tensoropt.sharding.serialise import strategy_from_dict

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
"""Those that the executor calls."""


def run_plan(
    rank: int, world_size: int, spec: ModelSpec, strategy: Mapping[str, Any], optimizer: str, steps: int
) -> dict[str, Any]:
    """Median seconds of a step, seconds of each of its collectives, most bytes alive (runs in the pool)."""
    loaded = load_model(spec)
    engine = Engine(strategy_from_dict(strategy, loaded.graph), loaded.values)
    leaves = engine.shards.leaves.values()
    stepper = make_optimizer(optimizer, [leaf for leaf in leaves if leaf.requires_grad])

    def step() -> None:
        engine.shards.clear()
        engine(*loaded.inputs)[0].backward()
        stepper.step()

    step()  # warms up, makes the optimizer's state
    memory = _peak(engine, loaded.inputs, stepper, step)
    times = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    runs = []
    for _ in range(steps):
        with _timed() as seconds:
            step()
        runs.append(seconds)
    each = [statistics.median(values) for values in zip(*runs, strict=True)]
    return {"step_s": statistics.median(times), "collectives_s": each, "memory_bytes": memory}


def _peak(engine: Engine, inputs: Any, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> int:
    tracker = MemoryTracker()
    for values in (inputs, engine.lowered.module.buffers(), engine.buffers.values()):
        tracker.exclude(values)
    tracker.add(leaf.detach() for leaf in engine.shards.leaves.values())
    tracker.add(flat for _, flat in engine.shards.buckets)
    states = (value for state in optimizer.state.values() for value in state.values())
    tracker.add(value for value in states if isinstance(value, torch.Tensor))
    with tracker:
        step()
    return tracker.peak_bytes


@contextmanager
def _timed() -> Iterator[list[float]]:
    """Seconds of the collectives issued meanwhile, in the order in which they are issued."""
    seconds: list[float] = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            dist.barrier()  # so that none is charged for another rank's delay
            start = time.perf_counter()
            work = function(*args, **kwargs)
            if kwargs.get("async_op"):
                work.wait()
            seconds.append(time.perf_counter() - start)
            return work

        return call

    for name, function in originals.items():
        setattr(dist, name, timed(function))
    try:
        yield seconds
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
