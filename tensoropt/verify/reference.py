"""Runs of the unsplit model, as a graph and as a PyTorch module, with which a plan's results are compared."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from tensoropt.capture import WithLoss
from tensoropt.capture.exporting import run_as_it_trains
from tensoropt.capture.fidelity import copied, doubled
from tensoropt.capture.no_grad import in_mode
from tensoropt.capture.other_processes import no_other_processes
from tensoropt.capture.steps import (
    GRADIENT_FLOOR,
    LEAST_OUTPUT,
    ModelStep,
    apart,
    difference,
    largest_of,
    precision,
    run_step,
    seeded,
    wide,
)
from tensoropt.engine.engine import Engine, unsplit_strategy
from tensoropt.engine.models import CapturedModel, ModelSpec, load_model
from tensoropt.engine.runtime import Runtime
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.ops.localise import draws_numbers
from tensoropt.verify.findings import MODULE_SHRUNK, Differences, within_tolerance

_Found = TypeVar("_Found")


def outputs_difference(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    assert len(got) == len(want), (len(got), len(want))
    pairs = zip(got, want, strict=True)
    return max((difference(actual, expected, floor=LEAST_OUTPUT) for actual, expected in pairs), default=0.0)


def named_difference(got: Mapping[str, Tensor], want: Mapping[str, Tensor], floor: float = 0.0) -> float:
    """Return the largest relative difference of tensors with equal names; divisors are at least ``floor``."""
    return max((difference(value, want[name], floor=floor) for name, value in got.items()), default=0.0)


def not_finite(named: Mapping[str, Tensor]) -> dict[str, int]:
    """Count the NaN and infinite values of each tensor; tensors without any are left out."""
    counts = {name: int((~wide(value).isfinite()).sum()) for name, value in named.items()}
    return {name: count for name, count in counts.items() if count}


_OPTIMIZER_STEPS = 2
"""The number of optimizer steps before parameters are compared; only the second has non-zero state."""
_NARROW_FLOOR = 5e-2
"""The least divisor of gradients' differences under mixed precision, as a share of the model's largest
gradient. It replaces :data:`~tensoropt.capture.steps.GRADIENT_FLOOR`, as bfloat16 rounds values by 4e-3."""


def _smooth_optimizers(floor: float) -> dict[str, Any]:
    """Return optimizers whose steps are smooth functions of the gradients. Adam's ``eps`` is at least
    ``floor``, because with a tiny one Adam's first step is only the gradients' *sign*."""
    # Not below Adam's own default.
    eps = max(floor, 1e-8)
    # Rates at which parameters move visibly in two steps and stay finite; untuned assumptions.
    return {
        "momentum": lambda leaves: torch.optim.SGD(leaves, lr=1e-2, momentum=0.9),
        "adam": lambda leaves: torch.optim.Adam(leaves, lr=1e-3, eps=eps),
    }


@dataclass(frozen=True)
class Results:
    """The results of running the unsplit model: tensors by name.

    Attributes:
        outputs: the loss alone in training, all outputs in inference.
        after: optimizer -> parameters after two of its steps.
        buffers: the buffers after these optimizer steps.
        floor: the lower bound of the divisor in relative differences of gradients.
        rounding: the differences that mixed precision makes; None in float32.
        ran_on: the device of the run.
        repeated: the outputs of a second call, before any optimizer step.
        stepped: the buffers after the second call.
    """

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor]
    after: Mapping[str, Mapping[str, Tensor]]
    buffers: Mapping[str, Tensor]
    floor: float = 0.0
    rounding: Differences | None = None
    ran_on: str = "cpu"
    repeated: tuple[Tensor, ...] = ()
    stepped: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def not_finite(self) -> dict[str, int]:
        outputs = {f"output {i}": value for i, value in enumerate(self.outputs)}
        gradients = {f"gradient of {name}": value for name, value in self.gradients.items()}
        after = {
            f"{name} after {optimizer}": value
            for optimizer, values in self.after.items()
            for name, value in values.items()
        }
        buffers = {f"buffer {name}": value for name, value in self.buffers.items()}
        return not_finite({**outputs, **gradients, **after, **buffers})


def first_step(engine: Engine, loaded: CapturedModel) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Run forward, in training also backward; return the outputs and copies of the gradients by parameter."""
    engine.runtime.step = 0
    if not engine.training:
        with torch.no_grad():
            return engine(*loaded.inputs), {}
    outputs = engine(*loaded.inputs)
    outputs[0].backward()
    return (outputs[0].detach(),), {n: g.clone() for n, g in engine.shards.gradients.items()}


def after_steps(
    engine: Engine, loaded: CapturedModel, floor: float
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Train two steps with each optimizer (``floor``: Adam's ``eps``), then restore the engine. Return the
    parameters by optimizer, and the buffers, after the steps; both are empty in inference."""
    after: dict[str, dict[str, Tensor]] = {}
    buffers: dict[str, Tensor] = {}
    if not engine.training:
        return after, buffers
    for name, make in _smooth_optimizers(floor).items():
        engine.load(loaded.values)
        engine.runtime.step = 0
        leaves = list(engine.shards.leaves.values())
        optimizer = make(leaves) if leaves else None
        for _ in range(_OPTIMIZER_STEPS):
            engine.shards.clear()
            engine(*loaded.inputs)[0].backward()
            if optimizer is not None:
                optimizer.step()
        # Ranks of a placed plan have buffers up to date only where they read them.
        engine.sync_buffers()
        after[name] = {n: leaf.detach().clone() for n, leaf in engine.shards.leaves.items()}
        buffers = {n: value.clone() for n, value in engine.buffers.items()}
    engine.load(loaded.values)
    engine.shards.clear()
    return after, buffers


def reference(loaded: CapturedModel, seed: int, floor: float | None = None) -> Results:
    """Return the unsplit graph's results, run once and cached on the CPU. All ranks must call this together.

    On GPUs only rank 0 runs the graph, so that no other GPU holds the whole model.
    """
    key = ("reference", seed)
    if key not in loaded.results:

        def run() -> Results:
            return _unsplit(loaded, seed, floor)

        loaded.results[key] = run() if loaded.device.type == "cpu" else _of_first_rank(run)
    return loaded.results[key]


def _of_first_rank(run: Callable[[], Results]) -> Results:
    """Run ``run`` on rank 0, and return its result on all ranks of this host, which read it from a file."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return run()
    path = [""]
    results = None
    if dist.get_rank() == 0:
        results = run()
        handle, path[0] = tempfile.mkstemp(prefix="tensoropt-unsplit-")
        os.close(handle)
        torch.save(results, path[0])
    dist.broadcast_object_list(path, src=0)
    if results is None:
        # Mapped: the host has the values once, however many ranks look at them. The file is this job's own.
        results = torch.load(path[0], mmap=True, weights_only=False)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(path[0]).unlink()
    assert isinstance(results, Results)
    return results


def _unsplit(loaded: CapturedModel, seed: int, floor: float | None) -> Results:
    return _where_it_fits(loaded.device, lambda device: _unsplit_on(device, loaded, seed, floor))


def _where_it_fits(device: torch.device, run: Callable[[torch.device], _Found]) -> _Found:
    """Return the result of ``run`` on a device, or on the CPU if the device has too little memory."""
    try:
        return run(device)
    except torch.OutOfMemoryError:
        pass  # outside of the handler the error, and with it all tensors of the run, is gone
    torch.cuda.empty_cache()
    return run(torch.device("cpu"))


def _unsplit_on(device: torch.device, loaded: CapturedModel, seed: int, floor: float | None) -> Results:
    narrow = loaded.spec.compute_dtype != "float32"
    moved = replace(loaded, inputs=tuple(value.to(device) for value in loaded.inputs))
    engine = ShardedEngine(
        unsplit_strategy(loaded.graph), loaded.values, runtime=Runtime((1,), seed=seed, device=device)
    )
    outputs, gradients = first_step(engine, moved)
    # A second call, which reads the buffers that the first one wrote.
    with torch.set_grad_enabled(engine.training):
        repeated = tuple(value.detach() for value in engine(*moved.inputs)[: len(outputs)])
    stepped = {name: value.clone() for name, value in engine.buffers.items()}
    if floor is None:
        floor = (_NARROW_FLOOR if narrow else GRADIENT_FLOOR) * largest_of(gradients.values())
    after, buffers = after_steps(engine, moved, floor)
    results = (outputs, gradients, after, buffers, repeated, stepped)
    # Under the same names, so that the device's tensors are freed before another run.
    outputs, gradients, after, buffers, repeated, stepped = pytree.tree_map_only(Tensor, Tensor.cpu, results)
    del results
    unsplit = Results(
        outputs, gradients, after, buffers, floor, ran_on=str(device), repeated=repeated, stepped=stepped
    )
    return replace(unsplit, rounding=_rounding(loaded.spec, seed, unsplit)) if narrow else unsplit


def _rounding(spec: ModelSpec, seed: int, narrow: Results) -> Differences:
    # The floor is that of the narrow type, so that both are compared on one scale.
    wide = _unsplit(load_model(replace(spec, compute_dtype="float32")), seed, narrow.floor)
    changes = {
        "loss": outputs_difference(narrow.outputs, wide.outputs),
        "gradient": named_difference(narrow.gradients, wide.gradients, narrow.floor),
        "parameter": max(
            (
                named_difference(values, wide.after[optimizer], GRADIENT_FLOOR)
                for optimizer, values in narrow.after.items()
            ),
            default=0.0,
        ),
        "buffer": named_difference(narrow.buffers, wide.buffers, GRADIENT_FLOOR),
    }
    # If the narrow type overflows, nothing is learned about its rounding, and nothing more is allowed.
    return Differences(**{k: change if math.isfinite(change) else 0.0 for k, change in changes.items()})


@dataclass(frozen=True)
class ModuleFindings:
    """The differences between the captured graph and the PyTorch module that it was captured from; picklable.

    Attributes:
        differences: the differences of the loss or outputs, of gradients, and of buffers after two calls.
        not_finite: the number of NaN and infinite values of the graph's results, by name.
        worst_gradient: the model's name of the parameter whose gradient differs most.
        rounding: the distance of a 16-bit graph from float64, if that sets the tolerances; otherwise None.
        compared_in: the precision of the comparison that decided.
        worst_buffer: the model's name of the buffer that differs most.
    """

    differences: Differences
    not_finite: Mapping[str, int]
    worst_gradient: str = ""
    rounding: Differences | None = None
    compared_in: str = "float32"
    worst_buffer: str = ""

    @property
    def ok(self) -> bool:
        return within_tolerance(self.differences, rounding=self.rounding)


def module_difference(rank: int, world_size: int, spec: ModelSpec, seed: int) -> ModuleFindings | None:
    """Compare the captured graph with its PyTorch module on rank 0; return None on other ranks, and if
    training draws random numbers."""
    loaded = load_model(spec)
    # The module draws from PyTorch's generator and the graph by counters: their steps cannot be alike.
    draws = any(draws_numbers(op) for op in loaded.captured.graph.operators)
    if draws and spec.mode != "inference":
        return None
    ref = reference(loaded, seed)
    if rank:
        return None
    device = torch.device(ref.ran_on)
    return _where_it_fits(device, lambda where: _against_module(loaded, ref, seed, where))


def _against_module(loaded: CapturedModel, ref: Results, seed: int, device: torch.device) -> ModuleFindings:
    model, args, kwargs = loaded.spec.build_to_run()
    own = model.model if isinstance(model, WithLoss) else model
    own.to(device)
    call = pytree.tree_map_only(Tensor, lambda v: v.to(device), (args, kwargs))
    before = {name: buffer.clone() for name, buffer in own.named_buffers()}
    if loaded.spec.mode == "inference":
        calls = []
        with in_mode(own, "inference"), torch.no_grad(), no_other_processes():
            for _ in range(2):
                given, named = copied(call)
                with seeded(model=own):
                    calls.append(pytree.tree_leaves(own(*given, **named)))
        first, second = ([v for v in call if isinstance(v, Tensor)] for call in calls)
        found = ModelStep([], {}, dict(own.named_buffers()))
        buffer = apart(_step_of(loaded, ref, before), found).buffer
        loss = max(outputs_difference(ref.outputs, first), outputs_difference(ref.repeated, second))
        return ModuleFindings(Differences(loss, buffer=buffer.size), ref.not_finite, worst_buffer=buffer.name)
    step = _own_step(loaded, model, own, call)
    findings = _compared(loaded, ref, step, before, ref.floor)
    if findings.ok:
        return findings
    wide = _unsplit_on(device, load_model(replace(loaded.spec, dtype="float64")), seed, ref.floor)
    lowest = precision(loaded.captured.graph)
    if lowest in ("bfloat16", "float16"):
        # The module and its graph round at other places: each may be as far from the exact step as the narrow
        # type takes it.
        floor = _NARROW_FLOOR * largest_of(ref.gradients.values())
        change = apart(_step_of(loaded, ref, before), _step_of(loaded, wide, before), floor)
        rounding = Differences(change.loss, change.gradient.size, buffer=change.buffer.size)
        narrow = _compared(loaded, ref, step, before, floor)
        return replace(narrow, rounding=rounding, compared_in=lowest)
    return _in_double(loaded, wide, findings)


def _own_step(loaded: CapturedModel, model: torch.nn.Module, own: torch.nn.Module, call: Any) -> ModelStep:
    subject = run_as_it_trains(model if isinstance(model, WithLoss) else WithLoss(model, None))
    by_name = dict(own.named_parameters(remove_duplicate=False))
    trained = (str(t.key) for t in loaded.captured.graph.parameters if t.requires_grad)

    def run() -> Tensor:
        given, named = copied(call)
        with seeded(model=own):
            loss: Tensor = subject(*given, **named)
        return loss

    with in_mode(own, "train"), no_other_processes():
        return run_step(run, {key: by_name[key] for key in trained}, own, calls=2)


def _compared(
    loaded: CapturedModel, ref: Results, step: ModelStep, before: Mapping[str, Tensor], floor: float
) -> ModuleFindings:
    found = apart(_step_of(loaded, ref, before), step, floor)
    differences = Differences(found.loss, found.gradient.size, buffer=found.buffer.size)
    return ModuleFindings(differences, ref.not_finite, found.gradient.name, worst_buffer=found.buffer.name)


def _in_double(loaded: CapturedModel, wide: Results, single: ModuleFindings) -> ModuleFindings:
    """Return the comparison in float64 (``wide``) if it shows ``single`` to be rounding; else ``single``."""
    model, args, kwargs = loaded.spec.build_to_run()
    own = model.model if isinstance(model, WithLoss) else model
    call = pytree.tree_map_only(Tensor, doubled, (args, kwargs))
    before = {name: doubled(buffer.clone()) for name, buffer in own.named_buffers()}
    try:
        step = _own_step(loaded, model, own.double(), call)
    except (RuntimeError, TypeError, ValueError):  # code that takes one precision only
        return single
    findings = replace(_compared(loaded, wide, step, before, wide.floor), compared_in="float64")
    pairs = zip(findings.differences.compared.values(), single.differences.compared.values(), strict=True)
    # Casts to float32 in the model's own code stay there, so that less shrinks than between two graphs.
    return findings if findings.ok and all(d <= MODULE_SHRUNK * s for d, s in pairs if s > 0) else single


def _step_of(loaded: CapturedModel, ref: Results, before: Mapping[str, Tensor]) -> ModelStep:
    """Return the unsplit graph's results under the module's names of parameters and buffers.

    Args:
        before: the module's buffers before the step, for buffers that the graph lacks.
    """
    key_of = {tensor.name: str(tensor.key) for tensor in loaded.captured.graph.tensors.values()}
    losses = [outputs[0] for outputs in (ref.outputs, ref.repeated)] if ref.gradients else []
    return ModelStep(
        losses,
        {key_of[name]: value for name, value in ref.gradients.items()},
        {**before, **{key_of[name]: value for name, value in ref.stepped.items()}},
    )


_KINKED = re.compile(
    r"(leaky_|p|r)?relu6?|hard\w+|softshrink|threshold|clamp\w*|abs|(arg|a)?(max|min)|maximum|minimum|"
    r"(adaptive_)?max_pool\w+|topk|sort|gt|ge|lt|le|round|floor|ceil|trunc|sign|l1_loss"
)


def has_kinks(loaded: CapturedModel) -> bool:
    """Return whether operators have kinks (as ReLU at 0), where rounding may change gradients a lot."""
    packets = (op.target.split(".")[1] for op in loaded.captured.graph.operators if "." in op.target)
    return any(_KINKED.fullmatch(packet) for packet in packets)
