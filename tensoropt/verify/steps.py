"""A step of a plan, run to be watched: what it sends, what it keeps alive, how long it takes.

The same functions watch ranks of this machine and fake ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from tensoropt.engine.engine import Engine
from tensoropt.profiling.optimizers import make_optimizer
from tensoropt.simulate.collectives import Collective
from tensoropt.verify.recorder import CollectiveRecorder, MemoryTracker


class RunStep:
    """A training step (clear, forward, backward, optimizer), or an inference call if the graph is for one.

    Attributes:
        optimizer: the optimizer; None in inference.
    """

    def __init__(self, engine: Engine, inputs: Sequence[torch.Tensor], optimizer: str):
        self.engine = engine
        self.inputs = tuple(inputs)
        trained = [v for v in engine.shards.leaves.values() if v.requires_grad]
        self.optimizer = make_optimizer(optimizer, trained) if engine.training and trained else None

    def model(self) -> None:
        """Run the step without its optimizer, with all communication between ranks."""
        if not self.engine.training:
            with torch.no_grad():
                self.engine(*self.inputs)
            return
        self.engine.shards.clear()
        self.engine(*self.inputs)[0].backward()

    def __call__(self) -> None:
        self.model()
        if self.optimizer is not None:
            self.optimizer.step()

    def optimizer_state(self) -> list[torch.Tensor]:
        """Return all tensors of the optimizer's state; empty before the first step."""
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        values = [value for state in states for value in state.values()]
        return [value for value in values if isinstance(value, torch.Tensor)]


def issued(engine: Engine, run: Callable[[], object]) -> list[Collective]:
    """Return the collectives that ``run`` issues on this rank, in order."""
    with CollectiveRecorder(engine.runtime.mesh) as recorder:
        run()
    return recorder.issued


def tracked_memory(step: RunStep) -> dict[str, int]:
    """Return the bytes of a step: parameters, gradients, optimizer state, and the peak with all that a step
    makes.

    The peak includes the graph's constants, which are also given separately. On GPUs there are also the peaks
    of PyTorch's allocator in the same step: ``allocated`` to tensors, whoever made them (including inputs and
    what the process has beside the step), and ``reserved`` from the device.

    Args:
        step: a step that has already run, so that the optimizer's state exists.
    """
    engine = step.engine
    tracker = MemoryTracker()
    # First: what is excluded is not counted even if a later list has it too.
    tracker.exclude(step.inputs)
    inputs_bytes = tracker.excluded_bytes
    # They exist all the time, so they are counted on top of the peak, as in predictions.
    tracker.exclude(engine.module.buffers())
    constants_bytes = tracker.excluded_bytes - inputs_bytes
    tracker.exclude(engine.buffers.values())
    sizes = {}
    # One list at a time: a step replaces its unsharded parameters, and nobody else may keep the old ones.
    for name, tensors in (
        ("parameters", engine.parameter_tensors),
        ("gradients", engine.gradient_tensors),
        ("optimizer", step.optimizer_state),
    ):
        before = tracker.now_bytes
        tracker.add(tensors())
        sizes[name] = tracker.now_bytes - before
    device = engine.runtime.device
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    if on_gpu:
        engine.runtime.synchronize()
        torch.cuda.empty_cache()  # what earlier runs left behind would count as reserved
        torch.cuda.reset_peak_memory_stats(device)
    with tracker:
        step()
    peak = tracker.peak_bytes + constants_bytes
    found = {**sizes, "constants": constants_bytes, "peak": peak}
    found["inputs_and_constants"] = tracker.excluded_bytes
    if on_gpu:
        engine.runtime.synchronize()
        found["allocated"] = torch.cuda.max_memory_allocated(device)
        found["reserved"] = torch.cuda.max_memory_reserved(device)
    return found


def step_times(step: RunStep, count: int) -> list[float]:
    """Return the seconds of each of ``count`` steps after one that warms up; all ranks start together."""
    runtime, seconds = step.engine.runtime, []
    # One more than requested: the first fills caches and is left out.
    for index in range(count + 1 if count else 0):
        if runtime.distributed:
            dist.barrier()
        runtime.synchronize()
        start = time.perf_counter()
        step()
        runtime.synchronize()
        if index:
            seconds.append(time.perf_counter() - start)
    return seconds
