"""The constants of a file that are weights, and therefore trainable parameters.

Files of PyTorch's newer exporter declare this for constants that they copied unchanged. For all others, the
use of a float constant with more than one element decides. A constant is a weight if it is in a position that
holds a weight by the operator's meaning (a convolution's kernel, a matrix, an embedding's table, a norm's
scale), or if it is added to, multiplied with or concatenated with something. Statistics of a batch norm,
masks, positions, sizes, clipping bounds, and constants that are subtracted or divided by (image
normalisation) do not train and become buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import onnx
import torch

from tensoropt.capture.onnx.reader import subgraphs

_WEIGHT_INPUTS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2),
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
    "PRelu": (1,),
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3),
    "SimplifiedLayerNormalization": (1,),
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
_COMBINED = frozenset({"Add", "Concat", "Mul", "Sum"})
"""Calls whose operands may be a weight, but may also be a mask or a grid of positions: their values
decide."""
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
"""Calls through which a weight stays a weight: files transpose and reshape their weights before use."""
_GENERATED = "ConstantOfShape"
INSPECTED_ELEMENTS = 2**22
"""A constant with more elements is a weight whatever its values, so they need not be read."""
MASK_VALUE = -50.0
"""A constant whose values are all 0 or below this is an attention mask."""


DECLARED = "pkg.torch.export.graph_signature.InputSpec.kind"
"""The key under which PyTorch's exporter records whether a tensor was a parameter, a buffer or a constant."""


@dataclass(frozen=True)
class _TrainedConstants:
    """The constants of a graph that may train, by name.

    Attributes:
        declared: constants that the exporter calls parameters.
        placed: constants used in a position where an operator takes a weight.
        combined: constants that are only added, multiplied or concatenated.
        says: whether the file calls any constant a parameter. Constants that it does not were computed by the
            exporter.
    """

    declared: frozenset[str]
    placed: frozenset[str]
    combined: frozenset[str]
    says: bool

    def __contains__(self, name: object) -> bool:
        return name in self.declared or name in self.placed or name in self.combined

    def holds(self, name: str, data: torch.Tensor) -> bool:
        """Whether a constant with these values is a weight."""
        if not data.is_floating_point():
            return False
        if name in self.declared:
            return True
        if name not in self or data.numel() <= 1:
            return False
        if data.is_meta or data.numel() > INSPECTED_ELEMENTS:
            return True
        # No weight is infinite or NaN, but a mask with -inf is.
        if not torch.isfinite(data).all() or _is_mask(data):
            return False
        return name in self.placed or not self._is_computed(data)

    def once(self, name: str, data: torch.Tensor) -> torch.Tensor:
        """A weight without its repetitions: size 1 along each dim in which all slices are equal. A single
        value everywhere is a fresh weight rather than a repetition, and what the exporter calls a parameter
        is one.
        """
        fresh = data.is_meta or data.numel() > INSPECTED_ELEMENTS or data.dim() < 2
        if fresh or name in self.declared or bool((data == data.flatten()[0]).all()):
            return data
        for dim in range(data.dim()):
            first = data.narrow(dim, 0, 1)
            if torch.equal(first.expand_as(data), data):
                data = first.clone()
        return data

    def _is_computed(self, data: torch.Tensor) -> bool:
        """Whether a constant was computed: whole numbers beyond 0 and 1 are positions, and in a file that
        names its parameters so are 0 and 1. The ones of a fresh norm and the zeros of a fresh bias are
        weights.
        """
        if not torch.equal(data, data.round()):
            return False
        return self.says or (bool((data.abs() > 1).any()) and data.unique().numel() > 2)


def find_weights(graph: onnx.GraphProto) -> _TrainedConstants:
    """The float initializers, and constants made by nodes, that are used as weights.

    Sizes and values are examined later, by :meth:`_TrainedConstants.holds`.
    """
    uses: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in _all_nodes(graph):
        for position, name in enumerate(node.input):
            if name:
                uses.setdefault(name, []).append((node, position))
    kinds = {
        value.name: entry.value
        for value in graph.value_info
        for entry in value.metadata_props
        if entry.key == DECLARED
    }
    declared = frozenset(name for name, kind in kinds.items() if kind == "PARAMETER")
    found: dict[bool | None, set[str]] = {True: set(), False: set(), None: set()}
    for name in _leaves(graph):
        # What the file declares needs no guess.
        if name not in kinds:
            found[_use(name, uses)].add(name)
    return _TrainedConstants(declared, frozenset(found[True]), frozenset(found[False]), says=bool(declared))


def _is_mask(data: torch.Tensor) -> bool:
    low = data <= MASK_VALUE
    return bool(((data == 0) | low).all() and low.any())


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


def _use(name: str, uses: Mapping[str, list[tuple[onnx.NodeProto, int]]]) -> bool | None:
    """Whether a constant is used where an operator takes a weight; False if only combined, None if neither.

    The use is followed through the calls that pass the constant on.
    """
    todo, seen, combined = [name], {name}, False
    while todo:
        for node, position in uses.get(todo.pop(), ()):
            if position in _WEIGHT_INPUTS.get(node.op_type, ()):
                return True
            combined = combined or node.op_type in _COMBINED
            # Operand 0 is the one that is passed on; the others are shapes and axes.
            if node.op_type in _PASSED_ON and position == 0:
                todo += [out for out in node.output if out not in seen]
                seen.update(node.output)
    return False if combined else None
