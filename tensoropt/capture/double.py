"""A graph in double precision, operator for operator, which distinguishes rounding from errors.

Capturing a model converted to float64 gives a different graph: ``x.float()`` does nothing in a float32 model
and is a cast (that rounds) in the other. Widening the captured graph keeps its operators and names, so that a
plan for one is a plan for the other. Under mixed precision its casts remain, from double to double.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tensoropt.graph import OperatorGraph, TorchLiteral

_WIDER = dict.fromkeys(("bfloat16", "float16", "float32"), "float64") | {"complex64": "complex128"}


def in_double(graph: OperatorGraph) -> OperatorGraph:
    """The graph with every tensor, constant and dtype argument of a narrower precision widened to double."""
    return replace(
        graph,
        tensors={
            name: replace(
                tensor,
                dtype=_WIDER.get(tensor.dtype, tensor.dtype),
                master_dtype=tensor.master_dtype and _WIDER[tensor.master_dtype],
            )
            for name, tensor in graph.tensors.items()
        },
        operators=tuple(
            replace(op, args=_argument(op.args), kwargs=_argument(op.kwargs)) for op in graph.operators
        ),
        constants={name: doubled(value) for name, value in graph.constants.items()},
    )


def doubled(value: torch.Tensor) -> torch.Tensor:
    """The tensor in double precision if it is narrower, otherwise the tensor itself."""
    wider = {getattr(torch, narrow): getattr(torch, wide) for narrow, wide in _WIDER.items()}
    return value.to(wider.get(value.dtype, value.dtype))


def _argument(value: Any) -> Any:
    if isinstance(value, TorchLiteral):
        return TorchLiteral(_WIDER.get(value.name, value.name))
    if isinstance(value, Mapping):
        return {key: _argument(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_argument(item) for item in value)
    return value
