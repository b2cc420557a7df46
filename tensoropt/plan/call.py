"""The call a plan was made for, as data: shapes and dtypes where tensors go, numbers as they are.

With it a plan can be applied to a model object without an example call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensoropt.errors import PlanError

_TENSOR = "tensor"


def describe_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """``{"args": [...], "kwargs": {...}}``, or None for a call with arguments JSON cannot hold."""
    try:
        return {"args": [_describe(a) for a in args], "kwargs": {k: _describe(v) for k, v in kwargs.items()}}
    except TypeError:
        return None


def _describe(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return {_TENSOR: list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    # JSON has no tuples; a model may tell them from lists.
    if isinstance(value, tuple):
        return {"tuple": [_describe(v) for v in value]}
    if isinstance(value, list):
        return [_describe(v) for v in value]
    if isinstance(value, dict):
        return {"dict": {k: _describe(v) for k, v in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(type(value).__name__)


def example_call(data: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of the described shapes, filled with zeros.

    Raises:
        PlanError: the description is damaged.
    """
    try:
        return tuple(_example(a) for a in data["args"]), {k: _example(v) for k, v in data["kwargs"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise PlanError(
            f"the plan does not say readably how the model is called ({type(error).__name__}: {error}); "
            "choose the plan again, or pass args=... and kwargs=..."
        ) from error


def _example(value: Any) -> Any:
    import torch

    if isinstance(value, list):
        return [_example(v) for v in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return torch.zeros(value[_TENSOR], dtype=getattr(torch, value["dtype"]))
    if "tuple" in value:
        return tuple(_example(v) for v in value["tuple"])
    return {k: _example(v) for k, v in value["dict"].items()}
