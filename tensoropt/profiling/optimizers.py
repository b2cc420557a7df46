"""Optimizers: what each keeps, allocates temporarily and moves per element, and the optimizers themselves.

The time of an optimizer's step per element of its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tensoropt.errors import MeasurementError
from tensoropt.profiling.store import ProfileStore
from tensoropt.profiling.timers import local_timer, repeated
from tensoropt.ranks.pool import RankPool

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _OptimizerKind:
    """The values per element of the parameters.

    Attributes:
        state: kept in addition to the parameter and its gradient.
        transient: allocated temporarily by a step, for all parameters at once.
        traffic: read and written by a step.
    """

    state: int
    transient: int
    traffic: int


OPTIMIZERS = {
    "sgd": _OptimizerKind(state=0, transient=0, traffic=3),
    "momentum": _OptimizerKind(state=1, transient=0, traffic=8),
    "adam": _OptimizerKind(state=2, transient=1, traffic=18),
    "adam_fused": _OptimizerKind(state=2, transient=0, traffic=7),
}
"""A multi-tensor step (``foreach=True``) is several kernels, each of which goes through all elements. Adam's
traffic (``_multi_tensor_adam`` of ``torch/optim/adam.py``): the first moment 3, the second 2 and 3, its root,
quotient and sum 2 each, the parameter 4; it allocates denominators. The momentum optimizer's: 2 and 3, and 3
for the parameter. A fused Adam reads parameter, gradient and state once and writes parameter and state."""


def make_optimizer(name: str, parameters: Iterable[torch.Tensor], lr: float = 1e-3) -> torch.optim.Optimizer:
    """The optimizer with a name in :data:`OPTIMIZERS`: multi-tensor, or ``adam_fused`` in one kernel.

    Raises:
        MeasurementError: there is none with that name.
    """
    if name not in OPTIMIZERS:
        raise MeasurementError(f"unknown optimizer '{name}'; use {', '.join(OPTIMIZERS)}")
    # Imported only when one is created, because the command line reads just the names.
    import torch

    if name == "adam_fused":
        return torch.optim.Adam(parameters, lr=lr, fused=True)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=lr, foreach=True)
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9 if name == "momentum" else 0.0, foreach=True)


def _time_optimizer(rank: int, world_size: int, name: str, elements: int) -> float:
    """The seconds of one optimizer step over ``elements`` float32 parameters on this rank's device."""
    timer = local_timer()
    # Several parameters, because multi-tensor steps work on lists; eight is an assumption.
    parameters = [torch.randn(elements // 8, device=timer.device).requires_grad_() for _ in range(8)]
    flat = torch.randn(elements // 8 * 8, device=timer.device)
    for parameter, piece in zip(parameters, flat.split(elements // 8), strict=True):
        # Gradients are slices of one flat tensor, as in the executor's buckets.
        parameter.grad = piece
    optimizer = make_optimizer(name, parameters)
    # The first step creates the optimizer's state, which later steps reuse.
    optimizer.step()

    def step() -> None:
        flat.zero_()
        optimizer.step()

    meet = dist.barrier if world_size > 1 else lambda: None
    return repeated(timer, step, 5, before=meet, warm_ups=timer.host_apart * 2).usual_s


_OPTIMIZER_SIZES = (1 << 18, 1 << 22)
"""The elements of the two steps that are timed. Their difference excludes the time of a step per parameter,
an overhead (:mod:`tensoropt.profiling.overheads`). The larger has 16 MiB of parameters."""


def measure_optimizer(pool: RankPool, store: ProfileStore, prefix: str, name: str) -> float:
    """The seconds per element of an optimizer step, from the slope between two sizes."""
    key = f"{prefix}/optimizer-{name}"
    record = store.get(key)
    if record is None:
        small, large = (max(pool.run(_time_optimizer, name, n)) for n in _OPTIMIZER_SIZES)
        slope = max(large - small, 0.0) / (_OPTIMIZER_SIZES[1] - _OPTIMIZER_SIZES[0])
        record = {"seconds_per_element": slope}
        store.put(key, record)
    return float(record["seconds_per_element"])
