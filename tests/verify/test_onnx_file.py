"""A file is compared with what was imported of it: what is wrong shows; else it is said why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tensoropt.capture.onnx import weights
from tensoropt.engine.models import ModelSpec
from tensoropt.question.model_source import OnnxOptions
from tensoropt.verify.onnx_file import verify_file

OPEN = OnnxOptions.of({"batch": 4}, loss="mean")


def saved(path: Path, middle: str, **attributes: object) -> ModelSpec:
    """A file of a dequantised INT4 product and one operator more, and the spec that opens it."""
    weight = helper.make_tensor("w", TensorProto.INT4, [8, 6], [i % 16 - 8 for i in range(48)])
    scale = numpy_helper.from_array(np.linspace(0.1, 1.0, 8, dtype=np.float32), "s")
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=0),
        helper.make_node("MatMul", ["x", "d"], ["h"]),
        helper.make_node(middle, ["h"], ["y"], **attributes),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 6])
    graph = helper.make_graph(nodes, "file", [x], [y], [weight, scale])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    onnx.save(model, path / "model.onnx")
    return ModelSpec(str(path / "model.onnx"), onnx=OPEN)


def test_an_import_that_is_right_differs_by_rounding(tmp_path):
    found = verify_file(saved(tmp_path, "Tanh"))
    assert found.ok
    assert found.difference < 1e-5


def test_an_import_that_is_wrong_is_seen(tmp_path, monkeypatch):
    read = weights._narrow
    monkeypatch.setattr(weights, "_narrow", lambda *args: read(*args).remainder(16))
    found = verify_file(saved(tmp_path, "Tanh"))
    assert not found.ok
    assert found.difference > 0.1


@pytest.mark.parametrize(
    ("middle", "attributes", "why"),
    [("RandomUniformLike", {}, "draws other numbers"), ("Bernoulli", {}, "draws other numbers")],
)
def test_what_cannot_be_compared_is_said(tmp_path, middle, attributes, why):
    found = verify_file(saved(tmp_path, middle, **attributes))
    assert found.difference is None
    assert why in found.why


def test_only_files_are_compared(tmp_path):
    spec = saved(tmp_path, "Tanh")
    assert verify_file(replace(spec, source="zoo:mlp")) is None
