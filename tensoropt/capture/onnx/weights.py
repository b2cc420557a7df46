"""Reading of an ONNX file's constants, and the decision which of them are trained weights.

PyTorch's newer exporter marks weights in the file. In other files, the position of a constant among an
operator's inputs decides, or the constant's values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx.external_data_helper
import torch

from tensoropt.capture.onnx.reader import every_node
from tensoropt.capture.onnx.values import OnnxError

_T = onnx.TensorProto
_DTYPES: dict[Any, torch.dtype] = {
    _T.FLOAT: torch.float32,
    _T.DOUBLE: torch.float64,
    _T.FLOAT16: torch.float16,
    _T.BFLOAT16: torch.bfloat16,
    _T.INT8: torch.int8,
    _T.INT16: torch.int16,
    _T.INT32: torch.int32,
    _T.INT64: torch.int64,
    _T.UINT8: torch.uint8,
    _T.BOOL: torch.bool,
}


def torch_dtype(code: int, label: str) -> torch.dtype:
    """Return the PyTorch dtype of an ONNX element type.

    Raises:
        OnnxError: PyTorch has no such dtype (text), or cannot compute in it (complex, wide unsigned, 4 bits).
    """
    dtype = _DTYPES.get(code)
    if dtype is None:
        in_standard = code in _T.DataType.values()
        name = _T.DataType.Name(code) if in_standard else f"number {code}"  # type: ignore[arg-type]
        raise OnnxError(f"{label} has the element type {name}, which cannot be imported")
    return dtype


def shape_and_dtype(tensor: onnx.TensorProto) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and dtype of a tensor, without reading its data."""
    shape = tuple(int(d) for d in tensor.dims)
    if any(d < 0 for d in shape):
        raise OnnxError(f"tensor '{tensor.name}' has the shape {list(shape)}; sizes cannot be negative")
    return shape, torch_dtype(tensor.data_type, f"tensor '{tensor.name}'")


def read_tensor(tensor: onnx.TensorProto, folder: Path | None) -> torch.Tensor:
    """Return the tensor's data.

    Args:
        folder: the model file's folder, the only source of external data; None for models in memory.

    Raises:
        OnnxError: the tensor's data does not fit its shape, has an unknown dtype, or lies outside of the
            model's folder (which onnx checks).
    """
    shape, dtype = shape_and_dtype(tensor)
    try:
        if tensor.data_location == _T.EXTERNAL:
            if folder is None:
                raise OnnxError("its data is in a separate file; give the path of the model")
            there = onnx.TensorProto.FromString(tensor.SerializeToString())
            onnx.external_data_helper.load_external_data_for_tensor(there, str(folder))
            data = there.raw_data
        elif tensor.HasField("raw_data"):
            data = tensor.raw_data
        else:
            data = onnx.numpy_helper.to_array(tensor).tobytes()
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=dtype)
        # A copy, because the file's bytes are read-only.
        owned = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return (owned.bool() if dtype == torch.bool else owned.view(dtype)).reshape(shape)
    except Exception as error:  # whatever a file may hold
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OnnxError(
            f"tensor '{tensor.name}' of shape {list(shape)} cannot be read ({reason}): it is corrupt, "
            "truncated, of another model, or not a regular file in the model's folder"
        ) from error


def attribute_value(attribute: onnx.AttributeProto, folder: Path | None) -> Any:
    """Return a node's attribute as a Python value, a ``torch.Tensor``, or an ONNX graph."""
    kind = onnx.AttributeProto.AttributeType.Name(attribute.type)
    if kind not in ("TENSOR", "STRING", "STRINGS", "FLOAT", "FLOATS", "INT", "INTS", "GRAPH"):
        raise OnnxError(f"its attribute '{attribute.name}' has the type {kind}, which cannot be imported")
    value = onnx.helper.get_attribute_value(attribute)
    if kind == "TENSOR":
        return read_tensor(value, folder)
    if kind == "STRINGS":
        return [text.decode("utf-8", errors="replace") for text in value]
    return value.decode("utf-8", errors="replace") if kind == "STRING" else value


_WEIGHT_INPUTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("BatchNormalization", "Conv", "ConvTranspose", "GroupNormalization"), (1, 2)),
    **dict.fromkeys(("InstanceNormalization", "LayerNormalization"), (1, 2)),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), (1, 2, 3)),
    **dict.fromkeys(("PRelu", "RMSNormalization"), (1,)),
    "Einsum": tuple(range(64)),
    "Gather": (0,),
    "Gemm": (0, 1, 2),
    "MatMul": (0, 1),
}
_COMBINED = frozenset({"Add", "Concat", "Mul", "Sum"})
"""Operators whose operands may be weights, masks or grids of positions, which only values can tell apart."""
_PASSED_ON = frozenset({
    "Cast", "CastLike", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile",
    "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators whose result is a weight if operand 0 is one: files transpose and reshape weights before use."""
_GENERATED = "ConstantOfShape"
INSPECTED_ELEMENTS = 2**22
"""The number of elements above which a constant is taken for a weight without reading its values."""
_MASK_VALUE = -50.0
"""A constant that has only zeros and values of at most this number is an attention mask."""


DECLARED = "pkg.torch.export.graph_signature.InputSpec.kind"
"""The metadata key with which PyTorch's exporter marks parameters, buffers and constants."""


@dataclass(frozen=True)
class _TrainedConstants:
    """The constants of a graph that may be trained, by name.

    Attributes:
        declared: names of constants that the exporter marks as parameters. If there are any, constants
            without a mark were computed by the exporter.
        placed: names of constants that an operator reads in the position of a weight.
        combined: names of constants that are only added, multiplied or concatenated.
    """

    declared: frozenset[str]
    placed: frozenset[str]
    combined: frozenset[str]

    def __contains__(self, name: object) -> bool:
        return name in self.declared or name in self.placed or name in self.combined

    def holds(self, name: str, data: torch.Tensor) -> bool:
        """Return whether the constant ``name``, which has the values ``data``, is a trained weight."""
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
        """Return a weight without repetitions, with size 1 along each dim whose slices are all equal. Marked
        parameters, and weights with a single value (freshly initialised ones), are returned unchanged.
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
        """Return whether a constant has integers that an exporter computed, such as positions. If the file
        marks no parameters, integers from -1 to 1, or of at most two values, count as weights instead: those
        of a freshly initialised bias or norm."""
        if not torch.equal(data, data.round()):
            return False
        return bool(self.declared) or (bool((data.abs() > 1).any()) and data.unique().numel() > 2)


def find_weights(graph: onnx.GraphProto) -> _TrainedConstants:
    """Return the constants that the exporter marks as parameters, and unmarked constants that operators read
    in the position of a weight, or only add, multiply or concatenate.

    Dtypes and values are checked later (:meth:`_TrainedConstants.holds`).
    """
    uses: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in every_node(graph):
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
    # Declarations in the file need no guess.
    guessed = {name: _use(name, uses) for name in _leaves(graph) if name not in kinds}
    placed = frozenset(name for name, use in guessed.items() if use)
    combined = frozenset(name for name, use in guessed.items() if use is False)
    return _TrainedConstants(declared, placed, combined)


def _is_mask(data: torch.Tensor) -> bool:
    low = data <= _MASK_VALUE
    return bool(((data == 0) | low).all() and low.any())


def _leaves(graph: onnx.GraphProto) -> Iterator[str]:
    for tensor in graph.initializer:
        yield tensor.name
    made: Mapping[str, str] = {n.output[0]: n.op_type for n in every_node(graph) if n.output}
    yield from (name for name, op in made.items() if op in ("Constant", _GENERATED))


def _use(name: str, uses: Mapping[str, list[tuple[onnx.NodeProto, int]]]) -> bool | None:
    """Return True if an operator reads a constant in the position of a weight, False if the constant is only
    added, multiplied or concatenated, else None. Results of operators in ``_PASSED_ON`` are followed.
    """
    todo, seen, combined = [name], {name}, False
    while todo:
        for node, position in uses.get(todo.pop(), ()):
            if position in _WEIGHT_INPUTS.get(node.op_type, ()):
                return True
            combined = combined or node.op_type in _COMBINED
            # Operand 0 is passed on; the others are shapes and axes.
            if node.op_type in _PASSED_ON and position == 0:
                todo += [out for out in node.output if out not in seen]
                seen.update(node.output)
    return False if combined else None
