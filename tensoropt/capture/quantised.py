"""Linear layers whose weight is bytes (:class:`~tensoropt.ops.quantised.QuantisedLinear`), as one operator
each."""

from __future__ import annotations

from dataclasses import replace

from tensoropt.graph import OperatorGraph
from tensoropt.ops.families.quantised import QUANTISED_LINEAR
from tensoropt.ops.quantised import OPERATOR, Scheme


def with_quantised_linear(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with each linear layer whose weight is bytes as one operator."""
    return replace(
        graph,
        operators=tuple(
            replace(op, target=QUANTISED_LINEAR) if op.target == OPERATOR else op for op in graph.operators
        ),
    )


def weights_in_bytes(graph: OperatorGraph) -> tuple[set[str], int]:
    """Return the schemes of the weights that are bytes, and how many more numbers these stand for than their
    parameters have elements."""
    schemes, counted = set(), dict[str, int]()
    for op in graph.operators:
        if op.target == QUANTISED_LINEAR:
            codes, *beside = (ref.name for ref in op.args[1:5] if ref is not None)
            schemes.add(op.args[6])
            tensors = graph.tensors
            counted[codes] = tensors[codes].elements * (Scheme.of(op.args[6]).per_byte - 1)
            counted |= {n: -tensors[n].elements for n in beside if tensors[n].kind == "parameter"}
    return schemes, sum(counted.values())
