"""A file is compared with what was imported of it: what is wrong shows; else it is said why not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from tensoropt.capture.onnx.importer import _CONVERTERS
from tensoropt.engine.models import ModelSpec
from tensoropt.question.model_source import OnnxOptions
from tensoropt.verify.onnx_file import verify_file

OPEN = OnnxOptions.of({"batch": 4}, loss="mean")


def saved(path: Path, middle: str, **attributes: object) -> ModelSpec:
    """A file of a product and one operator more, and the spec that opens it."""
    weight = numpy_helper.from_array(np.linspace(-1, 1, 48, dtype=np.float32).reshape(8, 6), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node(middle, ["h"], ["y"], **attributes),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 6])
    graph = helper.make_graph(nodes, "file", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    onnx.save(model, path / "model.onnx")
    return ModelSpec(str(path / "model.onnx"), onnx=OPEN)


def test_an_import_that_is_right_differs_by_rounding(tmp_path):
    torch.set_num_threads(2)
    torch.ones(1 << 22).tanh()  # starts a thread, which the process that compares does not have
    large = OnnxOptions.of({"batch": 1 << 16}, loss="mean")
    found = verify_file(replace(saved(tmp_path, "Tanh"), onnx=large))
    torch.set_num_threads(1)
    assert found.ok
    assert found.difference < 1e-5


def test_an_import_that_is_wrong_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(_CONVERTERS, "Tanh", lambda call: torch.sigmoid(call[0]))
    found = verify_file(saved(tmp_path, "Tanh"))
    assert not found.ok
    assert found.difference > 0.1


@pytest.mark.parametrize(
    ("middle", "attributes", "why"),
    [("RandomUniformLike", {}, "draws other numbers"), ("RandomNormalLike", {}, "draws other numbers")],
)
def test_what_cannot_be_compared_is_said(tmp_path, middle, attributes, why):
    found = verify_file(saved(tmp_path, middle, **attributes))
    assert found.difference is None
    assert why in found.why


def test_only_files_are_compared(tmp_path):
    spec = saved(tmp_path, "Tanh")
    assert verify_file(replace(spec, source="zoo:mlp")) is None
