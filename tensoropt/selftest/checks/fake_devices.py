"""Programs that are lowered for GPUs, run on fake CUDA devices: as far as a check can go without a card.

PyTorch is imported only once there are such devices, so this module does not import it.
"""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from typing import Any

from tensoropt import fake_cuda
from tensoropt.selftest.outcome import Bounded, CheckContext, Outcome

_DEVICES = 8
_CASES = (
    ("zoo:gpt-mini-dropout", "float32", (2, 2, 2)),
    ("zoo:transformer-tiny", "bfloat16", (1, 2, 2)),
    ("zoo:moe-mini", "float32", (2, 2, 2)),
)
"""Models, precisions, and micro-batches with the axis sizes of a random strategy's mesh."""
_BOUND = 0.01
"""The relative bound on memory: the goal."""


def run(context: CheckContext) -> Outcome:
    """Check that nothing lies on the CPU, that collectives equal the CPU ranks', and that memory is as
    predicted."""
    if reason := _why_not(context):
        return Outcome.skipped(reason)
    from tensoropt.profiling.store import default_path

    # Kept on disk, as compiling takes half a minute.
    fake_cuda.load(fake_cuda.compiled(default_path().parent / "fake_cuda"), _DEVICES)
    from tensoropt.engine.models import ModelSpec, load_model
    from tensoropt.fake_cuda.operators import cuda_operators
    from tensoropt.selftest.checks.fake_steps import watched_random

    figures: list[Bounded] = []
    unlike: dict[str, Any] = {}
    with cuda_operators():
        for source, dtype, mesh in _CASES:
            loaded = load_model(ModelSpec(source, 0, compute_dtype=dtype, device="meta"))
            name = f"{source.removeprefix('zoo:')}, {dtype}"
            seen = watched_random(loaded, mesh, 0)
            figures += figures_of(name, seen)
            unlike[name] = _misplaced(seen)
    wrong = {name: operators for name, operators in unlike.items() if operators}
    return Outcome.of(figures, f"{_DEVICES} fake devices; they compute no numbers", made_on_the_cpu=wrong)


def _why_not(context: CheckContext) -> str:
    """Say why this process cannot have fake CUDA devices; empty if it can."""
    if context.on_gpu:
        return "there is a GPU: fake CUDA devices are for machines without one"
    if built_for_cuda():
        return "this PyTorch is built for CUDA: fake CUDA devices need a build for CPUs"
    return fake_cuda.why_not()


def built_for_cuda() -> bool:
    """Return whether the installed PyTorch is built for CUDA, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda") is not None


def _misplaced(seen: dict[str, Any]) -> list[str]:
    """Return the operators that made a tensor on the CPU and may not."""
    from tensoropt.selftest.checks.fake_steps import ON_THE_CPU

    return [operator for operator in seen["cpu"] if operator not in ON_THE_CPU]


def figures_of(name: str, seen: dict[str, Any]) -> list[Bounded]:
    """Return the observations of one strategy (:func:`~.fake_steps.watched`) as figures."""
    return [
        Bounded(f"{name}: operators that make a tensor on the CPU", len(_misplaced(seen)), 0),
        Bounded(f"{name}: steps with other collectives than on the CPU", int(not seen["alike"]), 0),
        Bounded.share(
            f"{name}: memory, predicted against tracked", abs(seen["predicted"] / seen["tracked"] - 1), _BOUND
        ),
    ]
