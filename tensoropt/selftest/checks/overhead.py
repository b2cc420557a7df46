"""The overhead of a step of the lowered graph over the module's own, as it is and under ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import ModelSpec, open_model
from tensoropt.execute.parallel import parallelize
from tensoropt.profiling.optimizers import make_optimizer
from tensoropt.selftest.models import device_of_check, loss_of, module_of, short_name, timed_models
from tensoropt.selftest.outcome import Bounded, CheckContext, Outcome
from tensoropt.selftest.timing import in_turns, over, unless_busy

_BOUND = {"cuda": 0.03, "cpu": 0.15}
_COMPILED_BOUND = {"cuda": 0.01, "cpu": 0.15}
"""The relative bounds: for a GPU the goal, for a core of a machine that others use the noise of its
timings."""
ROUNDS = 12
_WARM_UP = 3
_COMPILED = 1
"""The number of timed models that are compiled, the smallest first: each takes a minute or so."""

_Step = Callable[[], object]
_Wrap = Callable[[nn.Module], Any]


def run(context: CheckContext) -> Outcome:
    """Compare steps of the module and of the parallelized module, in turns."""
    return unless_busy(lambda at: _of(timed_models(at), at, _BOUND[at.device]), context)


def run_compiled(context: CheckContext) -> Outcome:
    """Compare the same steps with both compiled."""
    if reason := why_not_compiled(context):
        return Outcome.skipped(reason)
    specs, bound = timed_models(context)[:_COMPILED], _COMPILED_BOUND[context.device]
    return unless_busy(lambda at: _of(specs, at, bound, torch.compile), context)


_WORDS = f"the fastest of {ROUNDS} rounds of a step of each in turns, Adam included"


def why_not_compiled(context: CheckContext) -> str:
    """Say why ``torch.compile`` has no compiler on this machine; empty if it has one."""
    if context.on_gpu:
        from torch.utils._triton import has_triton

        return "" if has_triton() else "torch.compile needs Triton for this GPU, and it is not installed"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "torch.compile needs a C++ compiler on the CPU, and there is none; install g++"
    return ""


def _of(
    specs: Sequence[ModelSpec], context: CheckContext, bound: float, wrap: _Wrap = lambda model: model
) -> Outcome:
    compared = [_compared(spec, context, bound, wrap) for spec in specs]
    return Outcome.of([figure for figures in compared for figure in figures], _WORDS)


def _compared(spec: ModelSpec, context: CheckContext, bound: float, wrap: _Wrap) -> list[Bounded]:
    device = device_of_check(context)
    steps = [_step_of_module(spec, device, wrap), step_of_graph(spec, device, wrap)]
    for step in steps:
        for _ in range(_WARM_UP):
            step()
    module, graph = in_turns(steps, device, ROUNDS)
    name = short_name(spec)
    return [
        Bounded.share(f"{name}: over the module's step", over(graph, module), bound),
        Bounded(f"{name}: step of the module", min(module), unit="s"),
        Bounded(f"{name}: step of the lowered graph", min(graph), unit="s"),
    ]


def _step_of_module(spec: ModelSpec, device: torch.device, wrap: _Wrap) -> _Step:
    """Return a training step of the module as its author wrote it."""
    return _step(*module_of(spec, device), wrap)


def step_of_graph(spec: ModelSpec, device: torch.device, wrap: _Wrap) -> _Step:
    """Return a training step of the same module, parallelized for one device."""
    model, args, kwargs = spec.build()
    strategy = unsplit_strategy(open_model(spec).graph)
    # Threads and cores are the same for both.
    parallelize(model, strategy, args, kwargs, device=device, as_measured=False)
    return _step(model, *module_of(spec, device)[1:], wrap)


def _step(model: nn.Module, args: Any, kwargs: Any, wrap: _Wrap) -> _Step:
    optimizer = make_optimizer("adam", model.parameters())
    called = wrap(model)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(called(*args, **kwargs)).backward()
        optimizer.step()

    return step
