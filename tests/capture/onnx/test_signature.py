"""ONNX's own shape inference as a second opinion on what a file's nodes make."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

from tensoropt.capture.onnx import OnnxError, import_onnx
from tensoropt.capture.onnx.importer import _CONVERTERS
from tensoropt.capture.onnx.signature import bind_inputs, infer
from tests.capture.onnx.models import model, node, perceptron


def test_sizes_follow_from_the_bound_inputs() -> None:
    file = perceptron()
    inputs, _ = bind_inputs(file.graph, {"batch": 3})
    found = infer(file, inputs)
    assert found.shapes["h"] == (3, 16)
    assert found.shapes["logits"] == (3, 8)
    assert found.types["logits"] == onnx.TensorProto.FLOAT


def test_shape_arithmetic_is_understood() -> None:
    nodes = [node("Shape", "x", "s"), node("Gather", "s first", "n"), node("Concat", "n rest", "t", axis=0),
             node("Reshape", "x t", "y")]  # fmt: skip
    file = model(nodes, {"x": ["batch", 4, 6]}, ["y"], {"first": np.array([0]), "rest": np.array([24])})
    inputs, _ = bind_inputs(file.graph, {"batch": 5})
    assert infer(file, inputs).shapes["y"] == (5, 24)


def test_a_converter_that_makes_another_shape_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_CONVERTERS, ("", "Relu"), [(1, lambda call: torch.sum(call[0], 0))])
    with pytest.raises(OnnxError, match=r"'a' has the shape \[16\], but by ONNX's .* it has \[2, 16\]"):
        import_onnx(perceptron(), {"batch": 2}, outputs=["a"])


def test_large_constants_are_not_copied() -> None:
    table = np.zeros((1024, 1024), np.float32)
    file = model([node("MatMul", "x w", "y")], {"x": [4, 1024]}, ["y"], {"w": table})
    file.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    inputs, _ = bind_inputs(file.graph, {})
    assert infer(file, inputs).shapes["y"] == (4, 1024)
