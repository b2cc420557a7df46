"""Linear layers whose weight is bytes, as one operator each.

A model says them as a :class:`~tensoropt.ops.quantised.QuantisedLinear`, or in plain code: a matrix of int8
that is cast, multiplied with a frozen scale per row, and read by ``linear`` as its weight. Left as three
operators, the matrix of floating-point numbers would be kept for backward, four times as large as its bytes
in float32. Only what is exactly this becomes the operator: another order of products rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tensoropt.graph import Operator, OperatorGraph, Ref
from tensoropt.ops.families.quantised import QUANTISED_LINEAR
from tensoropt.ops.quantised import OPERATOR, Scheme

_PLAIN = "int8"
_LINEAR, _CAST, _SCALED = "aten.linear.default", "aten._to_copy.default", "aten.mul.Tensor"
_AS_COLUMN = ("aten.unsqueeze.default", "aten.view.default")


def with_quantised_linear(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with each linear layer whose weight is bytes as one operator."""
    operators = [_as_one(graph, op) for op in graph.operators]
    if all(one is op for one, op in zip(operators, graph.operators, strict=True)):
        return graph
    # What made a weight, unless something else reads that.
    read = {*graph.outputs, *graph.mutations.values()}
    made_weights = _weights_made(graph)
    kept: list[Operator] = []
    for op in reversed(operators):
        if op.name in made_weights and read.isdisjoint(op.outputs):
            continue
        read.update(op.inputs())
        kept.append(op)
    gone = {name for op in graph.operators for name in op.outputs}
    gone -= {name for op in kept for name in op.outputs}
    tensors = {name: tensor for name, tensor in graph.tensors.items() if name not in gone}
    return replace(graph, operators=tuple(reversed(kept)), tensors=tensors)


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


def _as_one(graph: OperatorGraph, op: Operator) -> Operator:
    if op.target == OPERATOR:
        return replace(op, target=QUANTISED_LINEAR)
    if op.target != _LINEAR or not (stored := _bytes_of(graph, op.args[1])):
        return op
    bias = op.args[2] if len(op.args) > 2 else op.kwargs.get("bias")
    codes, scales, *_ = stored
    return replace(
        op, target=QUANTISED_LINEAR, args=(op.args[0], codes, scales, None, None, bias, _PLAIN), kwargs={}
    )


def _weights_made(graph: OperatorGraph) -> set[str]:
    return {
        name for op in graph.operators if op.target == _LINEAR for name in _bytes_of(graph, op.args[1])[2:]
    }


def _bytes_of(graph: OperatorGraph, weight: Any) -> Sequence[Any]:
    """Return (codes, scales, names of the operators between them and a weight); nothing for another one."""
    scaled = _producer(graph, weight)
    if scaled is None or scaled.target != _SCALED or scaled.kwargs or len(scaled.args) != 2:
        return ()
    for matrix, factor in (scaled.args, scaled.args[::-1]):
        cast = _producer(graph, matrix)
        if cast is None or cast.target != _CAST or not isinstance(factor, Ref):
            continue
        codes, tensors = cast.args[0], graph.tensors
        column = _producer(graph, factor)
        scales = factor if column is None else column.args[0]
        through = [scaled.name, cast.name, *([] if column is None else [column.name])]
        rows = tensors[codes.name].shape[0] if tensors[codes.name].shape else 0
        if (
            all(_is_stored(graph, name) for name in (codes.name, scales.name))
            and tensors[codes.name].dtype == _PLAIN
            and len(tensors[codes.name].shape) == 2
            and tensors[factor.name].shape == (rows, 1)
            and (column is None or column.target in _AS_COLUMN)
            and tensors[scales.name].shape in ((rows,), (rows, 1))
            and len({tensors[name].dtype for name in (matrix.name, factor.name, weight.name)}) == 1
        ):
            return codes, scales, *through
    return ()


def _producer(graph: OperatorGraph, value: Any) -> Operator | None:
    return graph.producer.get(value.name) if isinstance(value, Ref) else None


def _is_stored(graph: OperatorGraph, name: str) -> bool:
    """Return whether a tensor is there before the step, and no gradient or assignment changes it."""
    tensor = graph.tensors[name]
    return tensor.kind in ("parameter", "buffer", "constant") and not (
        tensor.requires_grad or name in graph.mutations
    )
