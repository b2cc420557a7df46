"""Lookup of PyTorch's operators by the names that graphs use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from tensoropt.errors import TensorOptError

FUNCTIONS = "tensoropt_functions"
"""The namespace of operators made of a model's own ``torch.autograd.Function`` classes."""
_REGISTERED_BY = {"transformers": "transformers.integrations.moe"}
"""Operator namespace -> the module that defines it on import, for processes without the model."""


class OwnFunctionError(TensorOptError, AttributeError):
    """Raised for an operator that nothing in this process defines, such as one of a model not loaded here."""


@cache
def resolve_overload(name: str) -> Callable[..., Any]:
    """Return the PyTorch operator with a name such as ``aten.linear.default``.

    Raises:
        AttributeError: the operator has no such overload.
        OwnFunctionError: no library or model in this process defines the operator.
    """
    namespace, packet, overload = name.split(".")
    packets = getattr(torch.ops, namespace)
    if not hasattr(packets, packet) and namespace in _REGISTERED_BY:
        # Only when it is needed, because importing `transformers` takes seconds.
        importlib.import_module(_REGISTERED_BY[namespace])
    if not hasattr(packets, packet):
        own = f"{packet.rpartition('_')[0]} is the model's own torch.autograd.Function"
        what = (
            own
            if namespace == FUNCTIONS
            else f"{namespace}.{packet} is an operator that no library in this process defines"
        )
        raise OwnFunctionError(
            f"{what}; a saved graph names it but does not contain its code; load the model first, or run "
            "explore on the model itself"
        )
    return getattr(getattr(packets, packet), overload)


def packet_of(target: str) -> str:
    """Return an operator's name without namespace and overload: ``linear`` for ``aten.linear.default``."""
    return target.split(".")[1]


def returns_one_tensor(target: str) -> bool:
    """Return whether an operator returns a single tensor.

    An output's name (``dropout.0``) does not show this, because capture drops a result of ``native_dropout``.
    """
    returns = resolve_overload(target)._schema.returns  # type: ignore[attr-defined]
    return len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)
