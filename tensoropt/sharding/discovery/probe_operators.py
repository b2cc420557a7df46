"""Probe operators: an operator without a rule on small random tensors, to be run whole and in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from tensoropt.graph import FLOATING, Operator, OperatorGraph, Tensor
from tensoropt.ops.calls import LocalCall
from tensoropt.ops.registry import bind
from tensoropt.sharding.discovery.samples import sample_inputs

PROBE_SIZES = (6, 8, 10, 12, 14, 18, 20)
"""The sizes that replace those of an operator, smallest first: all even, so that they can be cut in two, and
all different, so that a mix-up of dims shows."""
LARGEST_PROBE = 1 << 17
"""The most elements of an operand for which the operator is run at its own sizes, to limit the time; the
number is an assumption."""


@dataclass(frozen=True)
class ProbeOperator:
    """The operator on small tensors: a separate graph with one operator."""

    op: Operator
    graph: OperatorGraph

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The distinct operands, in order of first use."""
        return tuple(self.graph.tensors[n] for n in dict.fromkeys(self.op.inputs()))

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The operator's results."""
        return tuple(self.graph.tensors[n] for n in self.op.outputs)

    def values(self, seed: int) -> dict[str, torch.Tensor]:
        """Random operands by name, in their own precision; the same for the same seed."""
        values = sample_inputs(self.op, self.graph, torch.Generator().manual_seed(seed), exact=False)
        return {name: value.to(_dtype(self.graph.tensors[name])) for name, value in values.items()}

    def run(self, values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that the operator returns for such operands, without gradients."""
        return _call(self.op, values)


def _dtype(tensor: Tensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype


def _call(op: Operator, values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    call = LocalCall(op.target, op.args, op.kwargs, op.name)
    args, kwargs = call.arguments(values.__getitem__)
    with torch.no_grad():
        result = bind(call, None)(*args, **kwargs)  # type: ignore[arg-type]  # no kernel, no context
    parts = [result] if isinstance(result, torch.Tensor) else list(result)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def probes_of(op: Operator, graph: OperatorGraph) -> Iterator[ProbeOperator]:
    """The operator at two sets of small sizes and, if its tensors are small, at its own sizes."""
    names = tuple(dict.fromkeys(op.inputs()))
    tensors = [graph.tensors[n] for n in names]
    if not tensors:
        return
    sizes = sorted({size for t in tensors for size in t.shape if size > 1})
    # Indices and masks fit only the sizes that they were made for.
    bound = any(value_matters(t, graph.constants.get(t.name)) for t in tensors)
    maps: list[dict[int, int]] = []
    # One size less than there are, because the second set starts one further on. Two sets, so that a
    # coincidence at one set of sizes is not kept.
    if not bound and len(sizes) < len(PROBE_SIZES):
        maps = [dict(zip(sizes, PROBE_SIZES[start:], strict=False)) for start in (0, 1)]
    if all(t.elements <= LARGEST_PROBE for t in tensors):
        maps.append({})
    for sized in maps:
        with suppress(Exception):  # sizes that depend on each other do not fit any others
            yield _probe(op, graph, tensors, sized)


def _probe(
    op: Operator, graph: OperatorGraph, tensors: Sequence[Tensor], sized: Mapping[int, int]
) -> ProbeOperator:
    small = {
        t.name: replace(t, shape=tuple(sized.get(s, s) for s in t.shape), kind="input", key=None)
        for t in tensors
    }
    # A constant's values have its own shape; at other sizes random ones replace them.
    constants = {n: graph.constants[n] for n in small if n in graph.constants and not sized}
    draft = OperatorGraph(small, (), tuple(small), (), constants=constants)
    made = ProbeOperator(op, draft).run(ProbeOperator(op, draft).values(0))
    assert len(made) == len(op.outputs), f"{op.target} gives {len(made)} tensors"
    results = {
        name: replace(graph.tensors[name], shape=tuple(value.shape))
        for name, value in zip(op.outputs, made, strict=True)
    }
    if not sized:
        assert all(results[n].shape == graph.tensors[n].shape for n in op.outputs)
    alone = replace(draft, tensors={**small, **results}, operators=(op,), outputs=tuple(op.outputs))
    return ProbeOperator(op, alone)


def value_matters(tensor: Tensor, value: Any) -> bool:
    """Whether a constant's values determine what the operator does, as those of indices and masks do."""
    return value is not None and not value.is_meta and tensor.dtype not in FLOATING
