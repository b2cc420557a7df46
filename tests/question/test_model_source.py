"""ONNX files as model sources: what a plan keeps is enough to open the file alike."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch

from tensoropt.capture import capture
from tensoropt.capture.onnx import OnnxError
from tensoropt.engine.models import ModelSpec
from tensoropt.errors import TensorOptError
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


def test_options_of_a_zoo_model_are_kept_with_its_name() -> None:
    loaded = load_model("zoo:gpt-mini?sequence=16&layers=1", batch=3, seed=2)
    assert loaded.source == "zoo:gpt-mini?sequence=16&layers=1"
    assert loaded.args[0].shape == (3, 16)
    # As a plan's ranks build it.
    model, args, _ = ModelSpec(loaded.source, loaded.seed, settings=(("batch", loaded.batch),)).build()
    assert torch.equal(args[0], loaded.args[0])
    pairs = zip(model.state_dict().items(), loaded.model.state_dict().items(), strict=True)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)
    with pytest.raises(TensorOptError, match="'gpt-mini' has no option 'seqence'; did you mean 'sequence'"):
        load_model("zoo:gpt-mini?seqence=16")
