"""Which constants of a file are weights, and therefore parameters that train.

A file does not say. What does: where a float constant of more than one element is used. Positions that hold a
weight by the operator's meaning (a convolution's kernel, a matrix, an embedding's table, a norm's scale) make
it one, as does being added to or multiplied with something. Statistics of a batch norm, masks, sizes,
clipping bounds, and what is subtracted or divided by (image normalisation) do not train and become buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx
import torch

from tensoropt.capture.onnx.reader import subgraphs

_WEIGHT_INPUTS: dict[str, tuple[int, ...]] = {
    "Add": (0, 1),
    "BatchNormalization": (1, 2),
    "Concat": tuple(range(64)),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
    "Einsum": tuple(range(64)),
    "GRU": (1, 2, 3),
    "Gather": (0,),
    "Gemm": (0, 1, 2),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3, 7),
    "LayerNormalization": (1, 2),
    "MatMul": (0, 1),
    "Mul": (0, 1),
    "PRelu": (1,),
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3),
    "SimplifiedLayerNormalization": (1,),
    "Sum": tuple(range(64)),
    # com.microsoft
    "Attention": (1, 2),
    "BiasGelu": (1,),
    "EmbedLayerNormalization": (2, 3, 4, 5, 6),
    "FastGelu": (1,),
    "FusedConv": (1, 2),
    "FusedGemm": (0, 1, 2),
    "FusedMatMul": (0, 1),
    "SkipLayerNormalization": (2, 3, 4),
    "SkipSimplifiedLayerNormalization": (2, 3),
}
_PASSED_ON = frozenset(
    {
        "Cast",
        "CastLike",
        "Expand",
        "Flatten",
        "Identity",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    }
)
"""Calls through which a weight stays one: files transpose and reshape their weights before use."""
_GENERATED = "ConstantOfShape"
JUDGED_ELEMENTS = 2**22
"""A constant of more elements is a weight whatever its values: they need not be read."""
MASK_VALUE = -50.0
"""A constant that is 0 or below this everywhere is an attention mask."""


def weight_names(graph: onnx.GraphProto) -> set[str]:
    """Names of the float initializers, and of constants made by nodes, that are used as weights.

    Sizes and values are judged later, by :func:`is_weight`.
    """
    uses: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in _all_nodes(graph):
        for position, name in enumerate(node.input):
            if name:
                uses.setdefault(name, []).append((node, position))
    known: dict[str, bool] = {}
    return {name for name in _leaves(graph) if _used_as_weight(name, uses, known)}


def is_weight(data: torch.Tensor) -> bool:
    """Whether values can be a weight's: float, more than one element, and no mask."""
    if not data.is_floating_point() or data.numel() <= 1:
        return False
    if data.is_meta or data.numel() > JUDGED_ELEMENTS:
        return True
    return not bool(((data == 0) | (data <= MASK_VALUE)).all() and (data <= MASK_VALUE).any()) and bool(
        torch.isfinite(data).all()
    )


def _leaves(graph: onnx.GraphProto) -> Iterator[str]:
    for tensor in graph.initializer:
        yield tensor.name
    made: Mapping[str, str] = {n.output[0]: n.op_type for n in _all_nodes(graph) if n.output}
    yield from (name for name, op in made.items() if op in ("Constant", _GENERATED, "DequantizeLinear"))


def _all_nodes(graph: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from _all_nodes(inner)


def _used_as_weight(
    name: str, uses: Mapping[str, list[tuple[onnx.NodeProto, int]]], known: dict[str, bool]
) -> bool:
    """Follow a constant through the calls that pass it on, without recursion."""
    todo, seen = [name], {name}
    while todo:
        current = todo.pop()
        if known.get(current):
            known[name] = True
            return True
        for node, position in uses.get(current, ()):
            if position in _WEIGHT_INPUTS.get(node.op_type, ()):
                known[name] = True
                return True
            if node.op_type in _PASSED_ON and position == 0:
                todo += [out for out in node.output if out not in seen]
                seen.update(node.output)
    return False
