"""The memory and traffic of a user's optimizer, found by stepping it on small tensors."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tensoropt.errors import MeasurementError, TensorOptError
from tensoropt.files import named_function
from tensoropt.profiling.fact_finding import LiveTensors

_SIGNATURE = "(parameters) returning a torch.optim.Optimizer"
_ELSE = "with sharded parameters, each rank would compute other updates than on the whole parameter"
_SHAPE, _STEPS, _ALIKE = (24, 16), 3, 1e-3
"""The shape of the stepped parameter, steps before the comparison, relative rounding; assumptions."""
_FEW, _MORE, _SIDE = 2, 5, 64
"""The two numbers of parameters whose steps' memory is compared, and the parameters' side; assumptions."""

_Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def optimizer_from(name: str, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer that a user's function makes.

    Args:
        name: ``module.py:make`` or ``package.module:make``.

    Raises:
        MeasurementError: there is no such function, or it makes no optimizer.
    """
    return _made(name, _function(name), parameters)


def found_figures(name: str) -> dict[str, float | str]:
    """Return the memory and traffic of a user's optimizer, as fields of ``optimizers.OptimizerKind``.

    Raises:
        MeasurementError: there is no such function, it makes no optimizer, or one that cannot step on small
            parameters or does not treat each element by itself.
    """
    make = _function(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            _check_element_wise(name, make)
            return _counted(name, make)
        except TensorOptError:
            raise
        except Exception as error:
            raise MeasurementError(
                f"{name}: a step on small parameters raised {type(error).__name__}: {error}; it has to work "
                "on parameters of two dims with gradients, without a closure"
            ) from error


def _function(name: str) -> _Make:
    try:
        return named_function(name, _SIGNATURE)
    except TensorOptError as error:
        raise MeasurementError(str(error)) from error


def _made(name: str, make: _Make, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    optimizer = make(list(parameters))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise MeasurementError(
            f"{name} returned a {type(optimizer).__name__}; it must return a torch.optim.Optimizer of the "
            "parameters that it is given"
        )
    return optimizer


def _check_element_wise(name: str, make: _Make) -> None:
    values, *gradients = (torch.randn(_SHAPE, dtype=torch.float64) for _ in range(1 + _STEPS))
    whole, state = _stepped(name, make, values, gradients)
    way = float((whole - values).abs().max())
    for key, value in state.items():
        if value.numel() > 1 and value.shape != values.shape:
            raise MeasurementError(
                f"{name}: '{key}' of its state is {list(value.shape)} for a parameter of {list(_SHAPE)}, and "
                f"of another shape for a shard: {_ELSE}. Explore with an optimizer whose state is a value "
                "for each element, or for each parameter"
            )
    for dim in range(len(_SHAPE)):
        cut = _SHAPE[dim] // 3
        sizes = [cut, _SHAPE[dim] - cut]
        pieces = zip(values.split(sizes, dim), *(g.split(sizes, dim) for g in gradients), strict=True)
        joined = torch.cat([_stepped(name, make, piece, own)[0] for piece, *own in pieces], dim)
        far = float((joined - whole).abs().max())
        if far > _ALIKE * way:
            raise MeasurementError(
                f"{name}: a parameter stepped in pieces differs from one stepped whole ({far / way:.1%} "
                f"of the change after {_STEPS} steps), as with norms or products of whole matrices: {_ELSE}. "
                "Explore with an optimizer that treats every element by itself"
            )


def _stepped(
    name: str, make: _Make, values: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    parameter = values.clone().requires_grad_()
    optimizer = _made(name, make, [parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    state = optimizer.state[parameter]
    return parameter.detach(), {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}


def _counted(name: str, make: _Make) -> dict[str, float | str]:
    few, more = _watched(name, make, _FEW), _watched(name, make, _MORE)
    # The difference is without what is done once per step, and without what is made for one parameter at a
    # time. That is counted for a single one: what is left of the one before is usually smaller.
    elements = _SIDE * _SIDE * (_MORE - _FEW)
    state, transient = (
        max(round((of_more - of_few) / (4 * elements), 3), 0.0)
        for of_few, of_more in zip(few, more, strict=True)
    )
    single = _watched(name, make, 1)[1] / (4 * _SIDE * _SIDE)
    largest = max(round(single - transient, 3), 0.0)
    # As of multi-tensor momentum: three for parameter and gradient, five for each value of the state.
    traffic = 3.0 + 5.0 * state
    values = {"state": state, "transient": transient, "traffic": traffic, "largest": largest}
    return {**values, "code": _digest(make)}


def _watched(name: str, make: _Make, count: int) -> tuple[int, int]:
    """Return the sizes, in bytes, of the state and of a step's temporaries for ``count`` parameters."""
    parameters = [torch.randn(_SIDE, _SIDE).requires_grad_() for _ in range(count)]
    watch = LiveTensors()
    for parameter in parameters:
        gradient = parameter.grad = torch.randn(_SIDE, _SIDE)
        watch.ignore(parameter)
        watch.ignore(gradient)
    optimizer = _made(name, make, parameters)
    with watch:
        optimizer.step()
        kept = watch.now
        watch.restart()
        optimizer.step()
    return kept, watch.peak - kept


def _digest(make: _Make) -> str:
    try:
        return hashlib.sha256(Path(inspect.getfile(make)).read_bytes()).hexdigest()[:12]
    except (TypeError, OSError):  # made by another function, or built in
        return ""
