"""Replacement of each quantised linear layer (:class:`~tensoropt.ops.quantised.QuantisedLinear`) with one
operator."""

from __future__ import annotations

from dataclasses import replace

from tensoropt.graph import OperatorGraph
from tensoropt.ops.families.quantised import QUANTISED_LINEAR
from tensoropt.ops.quantised import OPERATOR, Scheme


def with_quantised_linear(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with one operator for each linear layer whose weights are quantised."""
    return replace(
        graph,
        operators=tuple(
            replace(op, target=QUANTISED_LINEAR) if op.target == OPERATOR else op for op in graph.operators
        ),
    )


def weights_in_bytes(graph: OperatorGraph) -> tuple[set[str], int]:
    """Return (schemes of the quantised weights, number of weights minus number of elements that store them).
    A stored byte may hold several weights."""
    schemes, counted = set(), dict[str, int]()
    for op in graph.operators:
        if op.target == QUANTISED_LINEAR:
            codes, *beside = (ref.name for ref in op.args[1:5] if ref is not None)
            schemes.add(op.args[6])
            tensors = graph.tensors
            counted[codes] = tensors[codes].elements * (Scheme.of(op.args[6]).per_byte - 1)
            counted |= {n: -tensors[n].elements for n in beside if tensors[n].kind == "parameter"}
    return schemes, sum(counted.values())
