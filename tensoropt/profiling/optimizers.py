"""Optimizers: what each keeps, allocates temporarily and moves per element, and the optimizers themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensoropt.errors import MeasurementError

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
    """Return the optimizer with a name in :data:`OPTIMIZERS`: multi-tensor, or ``adam_fused`` in one kernel.

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
