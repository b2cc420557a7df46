"""Random inputs on which an operator is well defined: indices in range, masks that hide no whole row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tensoropt.graph import FLOATING, Operator, OperatorGraph, Ref, iter_refs

_POSITIVE = frozenset(
    (
        *("log", "log2", "log1p", "log10", "sqrt", "rsqrt", "pow", "acos", "atanh", "logit", "reciprocal"),
        *("bernoulli", "div", "addcdiv", "remainder", "fmod", "floor_divide", "prod", "binary_cross_entropy"),
        *("batch_norm", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
    )
)
"""Operators with operands that must lie in (0, 1) to be well defined and smooth."""
_ALONG_A_DIM = frozenset(
    (
        *("gather", "index_select", "scatter", "scatter_add", "scatter_reduce"),
        *("index_add", "index_copy", "index_fill"),
    )
)
"""Operators that read or write at indices: (tensor, dim, index, ...)."""


def sample_inputs(
    op: Operator, graph: OperatorGraph, generator: torch.Generator, *, exact: bool = True
) -> dict[str, torch.Tensor]:
    """A value for every tensor the operator reads; constants keep theirs.

    Args:
        exact: floating values in float64 instead of the graph's own precision.
    """
    limits = dict(_index_limits(op, graph))
    packet = op.target.split(".")[1]
    values: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(op.inputs()):
        tensor = graph.tensors[name]
        dtype = getattr(torch, tensor.dtype)
        constant = graph.constants.get(name)
        if constant is not None and not constant.is_meta:
            value = constant.expand(tensor.shape).clone()
        elif tensor.dtype == "bool":
            value = torch.rand(tensor.shape, generator=generator) < 0.7
            if tensor.shape:
                value[..., 0] = True
        elif tensor.dtype in FLOATING:
            value = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
            value = value * 0.8 + 0.1 if packet in _POSITIVE else _normal(tensor.shape, generator)
        elif tensor.dtype.startswith("complex"):
            value = torch.complex(_normal(tensor.shape, generator), _normal(tensor.shape, generator))
        else:
            value = torch.randint(*limits.get(name, (1, 5)), tensor.shape, generator=generator, dtype=dtype)
        values[name] = value.to(torch.float64 if exact else dtype) if tensor.dtype in FLOATING else value
    _ignore_some(op, graph, values, generator)
    _end_groups(op, graph, values, generator)
    return values


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _index_limits(op: Operator, graph: OperatorGraph) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name, valid range) of the operands that hold indices."""

    def shape(value: Any) -> tuple[int, ...]:
        return graph.tensors[value.name].shape

    packet, args = op.target.split(".")[1], op.args
    if packet in ("embedding", "embedding_bag"):
        yield args[1].name, (0, shape(args[0])[0])
        if packet == "embedding_bag":
            yield args[2].name, (0, 1)  # offsets must rise; those of one bag do
    elif packet in _ALONG_A_DIM:
        size = shape(args[0])
        yield args[2].name, (0, size[args[1] % len(size)] if size else 1)
    elif packet in ("cross_entropy_loss", "nll_loss", "nll_loss_nd"):
        yield args[1].name, (0, shape(args[0])[1 if len(shape(args[0])) > 1 else 0])
    elif packet in ("index", "index_put"):
        for dim, index in enumerate(args[1]):
            if isinstance(index, Ref):
                yield index.name, (0, shape(args[0])[dim])
    elif packet == "one_hot":
        yield args[0].name, (0, args[1])


def _ignore_some(
    op: Operator, graph: OperatorGraph, values: dict[str, torch.Tensor], generator: torch.Generator
) -> None:
    """Some targets of a loss are ignored, unequally over the rows: a local mean must show."""
    packet = op.target.split(".")[1]
    if packet not in ("cross_entropy_loss", "nll_loss", "nll_loss_nd"):
        return
    (name,) = iter_refs(op.args[1])
    if graph.tensors[name].dtype in FLOATING:
        return
    ignored = op.args[4] if len(op.args) > 4 else op.kwargs.get("ignore_index", -100)
    target = values[name]
    ramp = torch.linspace(0.0, 0.7, max(target.numel(), 1)).view(target.shape)
    values[name] = target.masked_fill(torch.rand(target.shape, generator=generator) < ramp, ignored)


def _end_groups(
    op: Operator, graph: OperatorGraph, values: dict[str, torch.Tensor], generator: torch.Generator
) -> None:
    """Where each expert's rows end: unequal groups, one of them empty, all rows used."""
    if "grouped_mm" not in op.target:
        return
    rows, name = graph.tensors[op.inputs()[0]].shape[0], op.inputs()[2]
    ends = torch.randint(0, rows + 1, values[name].shape, generator=generator).sort().values
    ends[-1] = rows
    if len(ends) > 2:
        ends[1] = ends[0]
    values[name] = ends.to(values[name].dtype)
