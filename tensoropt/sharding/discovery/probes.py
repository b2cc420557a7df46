"""Probes: small copies of an operator to run on random tensors, forward and backward; splits of its loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tensoropt.graph import FLOATING, Operator, OperatorGraph, Tensor
from tensoropt.ops.calls import LocalCall, in_domain
from tensoropt.ops.registry import bind, samples_of

SUM, WHOLE, MEAN = -1, -2, -3
"""How outputs of parts recombine if they lack the split loop: as a sum, as equal copies, as a mean."""


@dataclass(frozen=True, slots=True)
class Split:
    """How operands and outputs are cut if one loop of an operator is split.

    Attributes:
        reads: for each operand the dim that is cut, or None.
        writes: for each output the dim that is cut, or ``SUM``, ``WHOLE`` or ``MEAN``: how parts recombine.
    """

    reads: tuple[int | None, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class Probe:
    """An operator on tensors of small sizes, as a graph of this operator only."""

    op: Operator
    graph: OperatorGraph

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return tuple(self.graph.tensors[n] for n in dict.fromkeys(self.op.inputs()))

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return tuple(self.graph.tensors[n] for n in self.op.outputs)

    def values(self, seed: int) -> dict[str, torch.Tensor]:
        values = sample_inputs(self.op, self.graph, torch.Generator().manual_seed(seed), exact=False)
        return {name: value.to(dtype_of(self.graph.tensors[name])) for name, value in values.items()}

    @torch.no_grad()
    def run(self, values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return call(self.op, values)

    def size(self, split: Split) -> int:
        operand, dim = next((i, d) for i, d in enumerate(split.reads) if d is not None)
        return self.operands[operand].shape[dim]


def dtype_of(tensor: Tensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype


def call(op: Operator, values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    call = LocalCall(op.target, op.args, op.kwargs, op.name)
    args, kwargs = call.arguments(values.__getitem__)
    result = bind(call, None)(*args, **kwargs)  # type: ignore[arg-type]  # no kernel, no context
    parts = [result] if isinstance(result, torch.Tensor) else list(result)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def backward(
    probe: Probe, values: Mapping[str, torch.Tensor], given: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return an operator's outputs, and the gradients of those operands that require one, for the gradients
    ``given`` of outputs."""
    tensors = probe.graph.tensors
    leaves = {n: v.detach().requires_grad_(tensors[n].requires_grad) for n, v in values.items()}
    made = call(probe.op, leaves)
    pairs = [
        (m, g)
        for t, m, g in zip(probe.outputs, made, given, strict=True)
        if m.requires_grad and t.requires_grad
    ]
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    grads: Sequence[torch.Tensor | None] = [None] * len(wanted)
    if pairs and wanted:
        assert all(m.shape == g.shape for m, g in pairs)
        grads = torch.autograd.grad([m for m, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    return [m.detach() for m in made], [
        torch.zeros_like(w) if g is None else g for g, w in zip(grads, wanted, strict=True)
    ]


def is_pytorchs(op: Operator) -> bool:
    return op.target.startswith("aten.")


def sample_inputs(
    op: Operator, graph: OperatorGraph, generator: torch.Generator, *, exact: bool = True
) -> dict[str, torch.Tensor]:
    """Return a random value for each operand, in float64 if ``exact``; known constants keep their values."""
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
    inputs = list(op.inputs())
    for position, domain in samples.domains.items():
        if position < len(inputs) and inputs[position] not in graph.constants:
            values[inputs[position]] = in_domain(values[inputs[position]], domain)
    if samples.adjust is not None:
        samples.adjust(op, graph, values, generator)
    if samples.row_ends is not None:
        ends, rows = (op.inputs()[position] for position in samples.row_ends)
        values[ends] = _row_ends(values[ends], graph.tensors[rows].shape[0], generator)
    return values


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _row_ends(like: torch.Tensor, rows: int, generator: torch.Generator) -> torch.Tensor:
    ends = torch.randint(0, rows + 1, like.shape, generator=generator).sort().values
    ends[-1] = rows  # operators leave rows after the last group undefined
    if len(ends) > 2:
        ends[1] = ends[0]
    return ends.to(like.dtype)
