"""ONNX files as model sources: what a plan keeps is enough to open the file alike."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch

from tensoropt.capture import capture
from tensoropt.capture.onnx import OnnxError
from tensoropt.plan.plan import OnnxInfo
from tensoropt.question.model_source import ModelSourceError, OnnxOptions, load_model
from tests.capture.onnx.models import perceptron


@pytest.fixture
def file(tmp_path: Path) -> str:
    onnx.save(perceptron(), tmp_path / "net.onnx")
    return str(tmp_path / "net.onnx")


def test_the_same_graph_from_what_a_plan_keeps(file: str) -> None:
    options = OnnxOptions.of({"batch": 8}, (), "auto")
    info = OnnxInfo(dims=dict(options.dims), outputs=options.outputs, loss=options.loss)
    again = OnnxInfo.model_validate_json(info.model_dump_json()).options()
    assert again == options
    first, second = (load_model(file, seed=3, onnx=o) for o in (options, again))
    assert all(torch.equal(a, b) for a, b in zip(first.args, second.args, strict=True))
    graphs = [capture(m.model, m.args).graph for m in (first, second)]
    assert graphs[0].fingerprint == graphs[1].fingerprint


def test_open_dims_and_misplaced_options_are_refused(file: str) -> None:
    with pytest.raises(OnnxError, match="--dim batch=8"):
        load_model(file)
    with pytest.raises(ModelSourceError, match="are for ONNX files"):
        load_model("zoo:mlp", onnx=OnnxOptions.of({"batch": 8}))
