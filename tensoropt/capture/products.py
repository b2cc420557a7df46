"""Replacement of products with a transposed parameter, written as ``x @ weight.T``, with ``linear``.

A view of a parameter would be a separate tensor in all later stages. Saved for backward, the view would keep
the parameter's gathered copy in memory, and backward would compute a gradient of the view before the
parameter's. ``linear`` reads the parameter itself, and is split along heads and features like other layers.
"""

from __future__ import annotations

from dataclasses import replace

from tensoropt.graph import Operator, OperatorGraph, Ref

_PRODUCTS = frozenset({"aten.matmul.default", "aten.mm.default"})
_TRANSPOSES = frozenset(
    {"aten.permute.default", "aten.t.default", "aten.transpose.int", "aten.numpy_T.default"}
)


def with_linear_products(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with ``linear`` in place of products with a transposed matrix that is a parameter."""
    operators = tuple(_as_linear(graph, op) for op in graph.operators)
    read = {*graph.outputs, *graph.mutations.values(), *(name for op in operators for name in op.inputs())}
    # A transpose that nobody else reads.
    gone = {op.name for op in operators if _of_parameter(graph, op) and read.isdisjoint(op.outputs)}
    lost = {name for op in operators if op.name in gone for name in op.outputs}
    return replace(
        graph,
        operators=tuple(op for op in operators if op.name not in gone),
        tensors={name: tensor for name, tensor in graph.tensors.items() if name not in lost},
    )


def _as_linear(graph: OperatorGraph, op: Operator) -> Operator:
    if op.target not in _PRODUCTS or op.kwargs or not all(isinstance(arg, Ref) for arg in op.args):
        return op
    rows, matrix = op.args
    transpose = graph.producer.get(matrix.name)
    if transpose is None or not _of_parameter(graph, transpose) or len(graph.tensors[rows.name].shape) < 2:
        return op
    return replace(op, target="aten.linear.default", args=(rows, transpose.args[0]))


def _of_parameter(graph: OperatorGraph, op: Operator) -> bool:
    if op.target not in _TRANSPOSES or not isinstance(op.args[0], Ref):
        return False
    source = graph.tensors[op.args[0].name]
    return source.kind == "parameter" and len(source.shape) == 2 and _swaps(op)


def _swaps(op: Operator) -> bool:
    if op.target == "aten.permute.default":
        return [dim % 2 for dim in op.args[1]] == [1, 0]
    return op.target != "aten.transpose.int" or {dim % 2 for dim in op.args[1:]} == {0, 1}
