"""Random inputs for which an operator is well defined: indices in range, masks that hide no whole row."""

from __future__ import annotations

import torch

from tensoropt.graph import FLOATING, Operator, OperatorGraph
from tensoropt.ops.registry import samples_of


def sample_inputs(
    op: Operator, graph: OperatorGraph, generator: torch.Generator, *, exact: bool = True
) -> dict[str, torch.Tensor]:
    """A value for every tensor that the operator reads; constants keep theirs.

    Args:
        exact: use float64 for floating-point values instead of the graph's own precision.
    """
    samples = samples_of(op.target)
    limits: dict[str, tuple[int, int]] = {}
    if samples.limits is not None:
        limits = dict(samples.limits(op.args, lambda ref: graph.tensors[ref.name].shape))
    values: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(op.inputs()):
        tensor = graph.tensors[name]
        dtype = getattr(torch, tensor.dtype)
        constant = graph.constants.get(name)
        if constant is not None and not constant.is_meta:
            value = constant.expand(tensor.shape).clone()
        elif tensor.dtype == "bool":
            # Masks contain both values; that most are True is an assumption based on attention masks.
            value = torch.rand(tensor.shape, generator=generator) < 0.7
            if tensor.shape:
                value[..., 0] = True  # a row that a mask hides completely gives NaN
        elif tensor.dtype in FLOATING:
            value = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
            # Away from both ends of (0, 1), where logarithms and quotients are steep.
            value = value * 0.8 + 0.1 if samples.positive else _normal(tensor.shape, generator)
        elif tensor.dtype.startswith("complex"):
            value = torch.complex(_normal(tensor.shape, generator), _normal(tensor.shape, generator))
        else:
            value = torch.randint(*limits.get(name, (1, 5)), tensor.shape, generator=generator, dtype=dtype)
        values[name] = value.to(torch.float64 if exact else dtype) if tensor.dtype in FLOATING else value
    if samples.adjust is not None:
        samples.adjust(op, graph, values, generator)
    if samples.row_ends is not None:
        ends, rows = (op.inputs()[position] for position in samples.row_ends)
        values[ends] = _row_ends(values[ends], graph.tensors[rows].shape[0], generator)
    return values


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _row_ends(like: torch.Tensor, rows: int, generator: torch.Generator) -> torch.Tensor:
    """The end of each group's rows: unequal groups, one of them empty, with all rows used."""
    ends = torch.randint(0, rows + 1, like.shape, generator=generator).sort().values
    ends[-1] = rows  # operators leave rows after the last group undefined
    if len(ends) > 2:
        ends[1] = ends[0]
    return ends.to(like.dtype)
