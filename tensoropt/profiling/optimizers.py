"""Optimizers: what each keeps, allocates temporarily and moves per element, and the optimizers themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensoropt.errors import MeasurementError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OptimizerKind:
    """The values per element of the parameters.

    Attributes:
        state: kept in addition to the parameter and its gradient.
        transient: allocated temporarily by a step, for all parameters at once.
        traffic: read and written by a step.
        largest: allocated temporarily by a step that takes one parameter after the other, for the largest.
        code: of a user's optimizer, a hash of its file.
    """

    state: float
    transient: float
    traffic: float
    largest: float = 0
    code: str = ""

    def made(self, elements: int, largest: tuple[int, int]) -> float:
        """Return the values that a step allocates temporarily for each of a parameter's own.

        Args:
            elements: of the parameter, which has a gradient.
            largest: the elements of the largest such parameter of the model, and how many have as many; what
                is allocated for one of them is counted in equal parts for each, as they may be cut unlike.
        """
        size, count = largest
        return self.transient + (self.largest / count if elements == size else 0)


OPTIMIZERS = {
    "sgd": OptimizerKind(state=0, transient=0, traffic=3),
    "momentum": OptimizerKind(state=1, transient=0, traffic=8),
    "adam": OptimizerKind(state=2, transient=1, traffic=18),
    "adam_fused": OptimizerKind(state=2, transient=0, traffic=7),
}
"""A multi-tensor step (``foreach=True``) is several kernels, each of which goes through all elements. Adam's
traffic (``_multi_tensor_adam`` of ``torch/optim/adam.py``): the first moment 3, the second 2 and 3, its root,
quotient and sum 2 each, the parameter 4; it allocates denominators. The momentum optimizer's: 2 and 3, and 3
for the parameter. A fused Adam reads parameter, gradient and state once and writes parameter and state."""


def with_kind(name: str) -> str:
    """Return an optimizer's name with what it keeps, makes and moves behind it, if a user brings it:
    ``module.py:make`` is stepped on small tensors, and becomes ``module.py:make?state=2&transient=1&...``. So
    all that is kept under the name knows it, and nobody who reads a plan has to run its code.

    Raises:
        MeasurementError: there is none with that name, or it cannot be used.
    """
    if name in OPTIMIZERS or "?" in name:
        kind_of(name)
        return name
    if ":" not in name:
        raise _unknown(name)
    from tensoropt.profiling.own_optimizers import found_figures  # takes PyTorch

    found = found_figures(name)
    return f"{name}?{'&'.join(f'{key}={_plain(value)}' for key, value in found.items())}"


def kind_of(name: str) -> OptimizerKind:
    """Return what an optimizer keeps, makes and moves, by its name in :data:`OPTIMIZERS` or as
    :func:`with_kind` wrote it.

    Raises:
        MeasurementError: there is none with that name.
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    written = dict(part.partition("=")[::2] for part in name.partition("?")[2].split("&"))
    try:
        values = {key: float(written[key]) for key in ("state", "transient", "traffic", "largest")}
        return OptimizerKind(**values, code=written["code"])
    except (KeyError, ValueError):
        raise _unknown(name) from None


def short_optimizer(name: str) -> str:
    """Return an optimizer's name as a person writes it."""
    return name.partition("?")[0]


def _unknown(name: str) -> MeasurementError:
    return MeasurementError(f"unknown optimizer '{name}'; use {', '.join(OPTIMIZERS)} or module.py:make")


def _plain(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def make_optimizer(name: str, parameters: Iterable[torch.Tensor], lr: float = 1e-3) -> torch.optim.Optimizer:
    """Return the optimizer with a name in :data:`OPTIMIZERS` (multi-tensor, or ``adam_fused`` in one kernel),
    or the one that a user's function makes.

    Args:
        lr: the learning rate; a user's function sets its own.

    Raises:
        MeasurementError: there is none with that name.
    """
    if name not in OPTIMIZERS:
        if ":" not in name:
            raise _unknown(name)
        from tensoropt.profiling.own_optimizers import optimizer_from

        return optimizer_from(short_optimizer(name), list(parameters))
    # Imported only when one is created, because the command line reads just the names.
    import torch

    if name == "adam_fused":
        return torch.optim.Adam(parameters, lr=lr, fused=True)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=lr, foreach=True)
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9 if name == "momentum" else 0.0, foreach=True)
