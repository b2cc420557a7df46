"""Checks of a plan without its devices: one rank at a time, with fake tensors and a fake process group."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from tensoropt.engine.engine import Engine
from tensoropt.engine.models import CapturedModel
from tensoropt.errors import PlanError
from tensoropt.execute.executable import engine_of
from tensoropt.profiling.fact_finding import KernelStorages
from tensoropt.profiling.optimizers import make_optimizer
from tensoropt.sharding.strategy import ParallelStrategy
from tensoropt.verify.agreement import disagreements
from tensoropt.verify.findings import RunFindings
from tensoropt.verify.recorder import CollectiveRecorder, MemoryTracker, summarise


class RunStep:
    """A training step (clear gradients, forward, backward, optimizer), or an inference call."""

    def __init__(self, engine: Engine, inputs: Sequence[torch.Tensor], optimizer: str):
        self.engine = engine
        self.inputs = tuple(inputs)
        trained = [v for v in engine.shards.leaves.values() if v.requires_grad]
        self.optimizer = make_optimizer(optimizer, trained) if engine.training and trained else None

    def model(self) -> None:
        """Run the step with all communication, but without the optimizer."""
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
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        values = [value for state in states for value in state.values()]
        return [value for value in values if isinstance(value, torch.Tensor)]


def recorded(engine: Engine, run: Callable[[], object]) -> CollectiveRecorder:
    """Return a recorder of the collectives that ``run`` issues on this rank."""
    with CollectiveRecorder(engine.runtime.mesh) as recorder:
        run()
    return recorder


def tracked_memory(step: RunStep) -> dict[str, int]:
    """Return the sizes in bytes of parameters, gradients, optimizer state and constants, and a step's peak.

    On GPUs also the allocator's peaks, ``allocated`` to all tensors and ``reserved`` from the device.

    Args:
        step: a step that has run once, so that the optimizer's state exists.
    """
    engine = step.engine
    tracker = MemoryTracker()
    # Excluded first: excluded tensors are not counted even if a list below contains them.
    tracker.exclude(step.inputs)
    inputs_bytes = tracker.excluded_bytes
    # Constants exist all the time, so their size is added to the peak, as in predictions.
    tracker.exclude(engine.module.buffers())
    constants_bytes = tracker.excluded_bytes - inputs_bytes
    tracker.exclude(engine.buffers.values())
    sizes = {}
    # One list at a time, so that unsharded parameters that a step replaces are not kept alive here.
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
    memory = {**sizes, "constants": constants_bytes, "peak": peak}
    memory["inputs_and_constants"] = tracker.excluded_bytes
    if on_gpu:
        engine.runtime.synchronize()
        memory["allocated"] = torch.cuda.max_memory_allocated(device)
        memory["reserved"] = torch.cuda.max_memory_reserved(device)
    return memory


def step_times(step: RunStep, count: int) -> list[float]:
    """Return the durations of ``count`` steps in seconds after a warm-up; ranks start each step together."""
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


@contextlib.contextmanager
def fake_job(rank: int, world_size: int) -> Iterator[None]:
    """Make this process a rank of a job whose other ranks do not exist; PlanError if it is in a real job."""
    if dist.is_initialized():
        raise PlanError(
            "this process is already a rank of a real job; check plans on fake ranks in a process of its own"
        )
    # PyTorch's own test machinery, whose import makes the backend "fake": only here, where it is used.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()


def check_on_fake_ranks(loaded: CapturedModel, strategy: ParallelStrategy, optimizer: str) -> RunFindings:
    """Check a strategy's collectives and memory on those fake ranks that represent all ranks."""
    calls, sent, memory = {}, [], []
    for rank in strategy.representatives:
        # One rank at a time: a process can be only one rank of one job.
        with step_on(rank, loaded, strategy, optimizer) as step:
            recorder = recorded(step.engine, step)
            memory.append(tracked_memory(step))
        calls[rank] = recorder.calls
        sent.append(summarise(recorder.issued))
    return RunFindings(
        collectives_of_ranks=sent,
        ranks_checked=list(calls),
        ranks_unlike=disagreements(calls),
        memory_tracked=max(memory, key=lambda m: m["peak"]),
        memory_tracked_of_ranks=[m["peak"] for m in memory],
    )


@contextlib.contextmanager
def step_on(
    rank: int, loaded: CapturedModel, strategy: ParallelStrategy, optimizer: str, device: str = "cpu"
) -> Iterator[RunStep]:
    with contextlib.ExitStack() as stack:
        if strategy.devices > 1:
            stack.enter_context(fake_job(rank, strategy.devices))
        # Operators may meet real tensors: constants of the captured graph are real ones until they are
        # replaced below.
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(KernelStorages())
        engine = engine_of(strategy, {n: _like(v, device) for n, v in loaded.values.items()})
        # Constants are the model's own tensors, or have no data: operators want fake ones of the same device.
        for module in engine.module.modules():
            for name, constant in module.named_buffers(recurse=False):
                setattr(module, name, _like(constant, device))
        yield RunStep(engine, [_like(v, device) for v in loaded.inputs], optimizer)


def _like(value: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=device)
