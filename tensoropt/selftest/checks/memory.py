"""The bytes of a step: predicted and tracked, beside those that PyTorch's allocator handed out."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import CapturedModel, ModelSpec, load_model
from tensoropt.profiling.cuda_kernels import Capability
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.workload import workload
from tensoropt.selftest.checks.facts import off
from tensoropt.selftest.models import short_name, timed_models, unsplit_engine
from tensoropt.selftest.outcome import Bounded, CheckContext, Outcome
from tensoropt.simulate.owners import memory_curve
from tensoropt.verify.fake_ranks import RunStep, tracked_memory

_BOUND = {"cuda": 0.01, "cpu": 0.05}
"""The bound relative to the allocator's peak: the goal for a GPU. On the CPU, convolution kernels take
scratch memory from the same allocator, 4 % of a small VGG's peak."""
_WATCHED = "the step that is watched"


def run(context: CheckContext) -> Outcome:
    """Compare peaks of a step with Adam for the timed models."""
    figures: list[Bounded] = []
    for spec in timed_models(context):
        figures += _of_gpu(spec) if context.on_gpu else _of_cpu(spec, context.folder)
    if context.on_gpu:
        return Outcome.of(
            figures,
            "inputs, constants and what the process had before the step (libraries' workspaces) are added to "
            "what is tracked and predicted, as the allocator counts them",
        )
    return Outcome.of(
        figures,
        "on the CPU the allocator is asked through PyTorch's profiler: what it gives out during a step, on "
        "top of what lies there between two; scratch memory of kernels counts, which the tracker never sees",
    )


def _of_gpu(spec: ModelSpec) -> list[Bounded]:
    capability = torch.cuda.get_device_capability(0)
    loaded = load_model(spec)
    step = _ready(loaded)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(0)
    memory = tracked_memory(step)
    between = sum(memory[kind] for kind in ("parameters", "gradients", "optimizer"))
    # What lies on the GPU beside the step: inputs, constants, libraries' workspaces.
    outside = before - between
    name, allocated = short_name(spec), memory["allocated"]
    return [
        Bounded.share(
            f"{name}: tracked, against the allocator",
            off(memory["peak"] - memory["constants"] + outside, allocated),
            _BOUND["cuda"],
        ),
        Bounded.share(
            f"{name}: predicted, against the allocator",
            off(predicted_peak(loaded, capability) + outside, allocated),
            _BOUND["cuda"],
        ),
        Bounded(f"{name}: the allocator's peak", allocated, unit="bytes"),
        Bounded(f"{name}: taken from the GPU", memory["reserved"], unit="bytes"),
        Bounded(f"{name}: in use on the GPU beside that", _not_pytorchs(), unit="bytes"),
        Bounded(f"{name}: beside the step", outside, unit="bytes"),
        Bounded(f"{name}: of it, inputs and constants", memory["inputs_and_constants"], unit="bytes"),
    ]


def _not_pytorchs() -> int:
    """Return the bytes of the GPU that PyTorch's allocator did not take: CUDA's context, libraries, other
    processes."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free - torch.cuda.memory_reserved(0)


def _of_cpu(spec: ModelSpec, folder: Path) -> list[Bounded]:
    loaded = load_model(spec)
    step = _ready(loaded)
    memory = tracked_memory(step)
    between = sum(memory[kind] for kind in ("parameters", "gradients", "optimizer"))
    allocated = allocated_above(step, folder)
    predicted = predicted_peak(loaded, None)
    name, tracked = short_name(spec), memory["peak"] - memory["constants"]
    return [
        Bounded.share(
            f"{name}: tracked, against the allocator", off(tracked, between + allocated), _BOUND["cpu"]
        ),
        Bounded.share(
            f"{name}: predicted, against the allocator", off(predicted, between + allocated), _BOUND["cpu"]
        ),
        Bounded(f"{name}: the allocator's peak", between + allocated, unit="bytes"),
    ]


def _ready(loaded: CapturedModel) -> RunStep:
    """Return a step that has run once, so that libraries have their workspaces and the optimizer its
    state."""
    gc.collect()  # or the model before this one would be freed in the middle of the step
    step = RunStep(unsplit_engine(loaded), loaded.inputs, "adam")
    step()
    step()
    return step


def predicted_peak(loaded: CapturedModel, capability: Capability | None) -> float:
    """Return the most bytes of the unsplit model's rank, as simulated from fake tensors."""
    strategy = unsplit_strategy(loaded.graph)
    works = {n: workload(strategy.graph, c, strategy.mesh) for n, c in strategy.configurations.items()}
    facts = {n: find_facts(work, True, capability) for n, work in works.items()}
    return float(memory_curve(strategy, facts, "adam").peak.total)


def allocated_above(step: RunStep, folder: Path) -> int:
    """Return the most bytes that PyTorch's CPU allocator hands out during a step, above those at its
    beginning."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        # Twice, as the profiler does not see the freeing of memory that it did not see allocated.
        step()
        with record_function(_WATCHED):
            step()
    trace = folder / "memory.json"
    seen.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    trace.unlink()
    [begin] = [event["ts"] for event in events if event.get("name") == _WATCHED and event.get("ph") == "X"]
    now = peak = 0
    for event in events:
        # The device -1 is the host.
        if event.get("name") == "[memory]" and event["args"]["Device Id"] < 0 and event["ts"] >= begin:
            now += event["args"]["Bytes"]
            peak = max(peak, now)
    return peak
