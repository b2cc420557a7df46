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
    """The memory and traffic of an optimizer's step, as numbers of values per element of the parameters.

    Attributes:
        state: values kept besides the parameter and its gradient.
        transient: temporaries that a step makes for all parameters at once.
        traffic: values that a step reads and writes.
        largest: temporaries made for one parameter at a time, per element of the largest parameter.
        code: a hash of the file that defines a user's optimizer.
    """

    state: float
    transient: float
    traffic: float
    largest: float = 0
    code: str = ""

    def made(self, elements: int, largest: tuple[int, int]) -> float:
        """Return the number of temporary values of a step per element of a parameter.

        Args:
            elements: the elements of the parameter.
            largest: the elements of the model's largest parameter, and the number of parameters of that size,
                which share temporaries.
        """
        size, count = largest
        return self.transient + (self.largest / count if elements == size else 0)


OPTIMIZERS = {
    "sgd": OptimizerKind(state=0, transient=0, traffic=3),
    "momentum": OptimizerKind(state=1, transient=0, traffic=8),
    "adam": OptimizerKind(state=2, transient=1, traffic=18),
    "adam_fused": OptimizerKind(state=2, transient=0, traffic=7),
}
"""The built-in optimizers' values per element, for multi-tensor steps (``foreach=True``) of several kernels.

Adam (``_multi_tensor_adam`` of ``torch/optim/adam.py``) reads and writes: first moment 3, second 2 and 3, its
root, quotient and sum 2 each, parameter 4; it allocates denominators. Momentum: 2 and 3, parameter 3. Fused
Adam reads parameter, gradient and state once."""


def with_kind(name: str) -> str:
    """Return an optimizer's name; a user's gets its memory and traffic appended:
    ``module.py:make?state=2&...``.

    The optimizer is stepped on small tensors to find them. Readers of plans then need not run its code.

    Raises:
        MeasurementError: there is no optimizer of that name, or it cannot be used.
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
    """Return an optimizer's memory and traffic by its name, as :func:`with_kind` returns it.

    Raises :class:`MeasurementError` if the name is unknown.
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
    """Return an optimizer's name without the figures that :func:`with_kind` appends."""
    return name.partition("?")[0]


def _unknown(name: str) -> MeasurementError:
    return MeasurementError(f"unknown optimizer '{name}'; use {', '.join(OPTIMIZERS)} or module.py:make")


def make_optimizer(name: str, parameters: Iterable[torch.Tensor], lr: float = 1e-3) -> torch.optim.Optimizer:
    """Make an optimizer by its name in :data:`OPTIMIZERS`, or by a user's function.

    Args:
        lr: the learning rate, unless a user's function sets its own.

    Raises:
        MeasurementError: there is no optimizer of that name.
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
