"""Optimizers: their state, temporaries and traffic per element, and a function that makes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensoropt.errors import MeasurementError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OptimizerKind:
    """The values that an optimizer keeps or moves, per element of the parameters.

    Attributes:
        state: besides the parameter and its gradient.
        transient: temporaries of a step for all parameters at once.
        traffic: read and written by a step.
        largest: temporaries of a step that are made for one parameter at a time, per element of the largest.
        code: a hash of a user's file.
    """

    state: float
    transient: float
    traffic: float
    largest: float = 0
    code: str = ""

    def made(self, elements: int, largest: tuple[int, int]) -> float:
        """Return the temporaries of a step per element of a parameter.

        Args:
            elements: the elements of the parameter.
            largest: the elements of the model's largest parameter, and the number of parameters of that
                size, which share temporaries.
        """
        size, count = largest
        return self.transient + (self.largest / count if elements == size else 0)


OPTIMIZERS = {
    "sgd": OptimizerKind(state=0, transient=0, traffic=3),
    "momentum": OptimizerKind(state=1, transient=0, traffic=8),
    "adam": OptimizerKind(state=2, transient=1, traffic=18),
    "adam_fused": OptimizerKind(state=2, transient=0, traffic=7),
}
"""Values per element of multi-tensor steps (``foreach=True``), several kernels over all elements.

Adam (``_multi_tensor_adam`` of ``torch/optim/adam.py``): first moment 3, second 2 and 3, its root, quotient
and sum 2 each, parameter 4; it allocates denominators. Momentum: 2 and 3, parameter 3. Fused Adam reads
parameter, gradient and state once.
"""


def with_kind(name: str) -> str:
    """Return the name of a user's optimizer with its figures: ``module.py:make?state=2&transient=1&...``.

    It is stepped on small tensors once, so that readers of plans need not run its code.

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
    plain = {key: value if isinstance(value, str) else f"{value:g}" for key, value in found.items()}
    return f"{name}?{'&'.join(f'{key}={value}' for key, value in plain.items())}"


def kind_of(name: str) -> OptimizerKind:
    """Return an optimizer's figures by its name (:func:`with_kind`); MeasurementError if unknown."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    written = dict(part.partition("=")[::2] for part in name.partition("?")[2].split("&"))
    try:
        values = {key: float(written[key]) for key in ("state", "transient", "traffic", "largest")}
        return OptimizerKind(**values, code=written["code"])
    except (KeyError, ValueError):
        raise _unknown(name) from None


def short_optimizer(name: str) -> str:
    """Return an optimizer's name without figures."""
    return name.partition("?")[0]


def _unknown(name: str) -> MeasurementError:
    return MeasurementError(f"unknown optimizer '{name}'; use {', '.join(OPTIMIZERS)} or module.py:make")


def make_optimizer(name: str, parameters: Iterable[torch.Tensor], lr: float = 1e-3) -> torch.optim.Optimizer:
    """Make the optimizer with a name in :data:`OPTIMIZERS`, or a user's.

    Args:
        lr: unless a user's function sets its own.

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
