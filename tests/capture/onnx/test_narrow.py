"""Element types of a few bits, wherever a file may hold them, against the package's own evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tensoropt.capture.onnx import import_onnx
from tests.capture.onnx.models import ran

TYPES = [
    name
    for name in (
        *("INT4", "UINT4", "INT2", "UINT2", "FLOAT4E2M1"),
        *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"),
    )
    if hasattr(TensorProto, name)
]
OPSET = min(25, onnx.defs.onnx_opset_version())
SHAPE = (3, 7)
"""An odd number of elements: the last byte is half filled."""


def numbers(name: str, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Whole numbers over all of a type's range, negative ones among them."""
    low = {"U": 0}.get(name[0], {"2": -2}.get(name[-1], -4))
    high = {"INT2": 1, "UINT2": 3, "UINT4": 15, "INT4": 7}.get(name, 4)
    low = -8 if name == "INT4" else low
    return np.random.default_rng(0).integers(low, high + 1, shape).astype(np.float32)


def stored(name: str, array: np.ndarray, way: str) -> TensorProto:
    """The values as typed data (``int32_data``) or as raw bytes."""
    kind = TensorProto.DataType.Value(name)
    typed = helper.make_tensor("w", kind, array.shape, array.flatten().tolist())
    if way == "typed":
        assert len(typed.int32_data) > 0
        return typed
    raw = numpy_helper.from_array(numpy_helper.to_array(typed), "w")
    assert len(raw.raw_data) > 0
    return raw


def model(nodes: list[Any], held: list[TensorProto], inputs: list[Any]) -> onnx.ModelProto:
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "narrow", inputs, [output], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])


def check(made: onnx.ModelProto, **values: np.ndarray) -> None:
    (wanted,) = ReferenceEvaluator(made).run(None, values)
    found = ran(import_onnx(made).module, *map(torch.from_numpy, values.values()))[0]
    np.testing.assert_allclose(found.numpy(), np.asarray(wanted, dtype=np.float32), rtol=1e-6)


X = np.random.default_rng(1).standard_normal((2, 3)).astype(np.float32)


@pytest.mark.parametrize("way", ["typed", "raw"])
@pytest.mark.parametrize("place", ["initializer", "constant"])
@pytest.mark.parametrize("scaling", ["whole", "axis", "blocks", "cast"])
@pytest.mark.parametrize("name", TYPES)
def test_constants_are_read_as_the_standard_says(name: str, scaling: str, place: str, way: str) -> None:
    shape = (3, 8) if scaling == "blocks" else SHAPE
    w = stored(name, numbers(name, shape), way)
    held, nodes = [w], []
    if place == "constant":
        held, nodes = [], [helper.make_node("Constant", [], ["w"], value=w)]
    if scaling == "cast":
        nodes.append(helper.make_node("Cast", ["w"], ["d"], to=TensorProto.FLOAT))
    else:
        scale = {"whole": np.float32(0.5), "axis": np.float32([0.5, 2, 3])}.get(
            scaling, np.arange(1, 7, dtype=np.float32).reshape(3, 2)
        )
        more = {"whole": {}, "axis": {"axis": 0}}.get(scaling, {"axis": 1, "block_size": 4})
        held.append(numpy_helper.from_array(np.asarray(scale), "s"))
        nodes.append(helper.make_node("DequantizeLinear", ["w", "s"], ["d"], **more))
    nodes.append(helper.make_node("MatMul", ["x", "d"], ["y"]))
    check(model(nodes, held, [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 3))]), x=X)


@pytest.mark.parametrize("name", ["INT4", "UINT4"])
def test_zero_points_are_of_the_same_type(name: str) -> None:
    w = stored(name, numbers(name), "typed")
    zero = helper.make_tensor("z", w.data_type, (3,), [1, 3, 7] if name[0] == "U" else [-8, -1, 3])
    held = [w, zero, numpy_helper.from_array(np.float32([0.5, 2, 3]), "s")]
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], axis=0),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    check(model(nodes, held, [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 3))]), x=X)


@pytest.mark.parametrize("operator", ["cast", "quantise"])
@pytest.mark.parametrize("name", TYPES)
def test_values_are_rounded_as_the_type_rounds(name: str, operator: str) -> None:
    low = 0.0 if name[0] == "U" else -1.0
    values = (
        np.linspace(low * 3, 3.0, 61, dtype=np.float32)
        if "INT" in name
        else np.float32(
            [-500.0, -6.1, -2.5, -0.75, -0.25, 0.0, 0.25, 0.3, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 460.0]
        )
    )
    kind = TensorProto.DataType.Value(name)
    if operator == "cast":
        values = np.clip(np.trunc(values), -2, 1) if "INT2" in name and low else np.trunc(values)
        nodes = [helper.make_node("Cast", ["x"], ["q"], to=kind)]
        held = []
    else:
        nodes = [helper.make_node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=kind)]
        held = [numpy_helper.from_array(np.float32(1.0), "s")]
    nodes.append(helper.make_node("Cast", ["q"], ["y"], to=TensorProto.FLOAT))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, values.shape)]
    check(model(nodes, held, inputs), x=values)
