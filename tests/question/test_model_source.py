"""ONNX files as model sources: what a plan keeps is enough to open the file alike."""

import onnx
import pytest
import torch

from tensoropt.capture import capture
from tensoropt.capture.onnx import OnnxError
from tensoropt.engine.models import ModelSpec
from tensoropt.errors import TensorOptError
from tensoropt.plan.plan import OnnxInfo
from tensoropt.question.model_source import (
    ModelSourceError,
    OnnxOptions,
    default_batch,
    load_model,
    with_sequence,
)
from tests.capture.onnx.models import perceptron


@pytest.fixture
def file(tmp_path):
    onnx.save(perceptron(), tmp_path / "net.onnx")
    return str(tmp_path / "net.onnx")


def test_the_same_graph_from_what_a_plan_keeps(file):
    options = OnnxOptions.of({"batch": 8}, (), "auto")
    info = OnnxInfo(dims=dict(options.dims), outputs=options.outputs, loss=options.loss)
    again = OnnxInfo.model_validate_json(info.model_dump_json()).options()
    assert again == options
    first, second = (load_model(file, seed=3, onnx=o) for o in (options, again))
    assert all(torch.equal(a, b) for a, b in zip(first.args, second.args, strict=True))
    graphs = [capture(m.model, m.args).graph for m in (first, second)]
    assert graphs[0].fingerprint == graphs[1].fingerprint


def test_open_dims_and_misplaced_options_are_refused(file):
    with pytest.raises(OnnxError, match="--dim batch=8"):
        load_model(file)
    with pytest.raises(ModelSourceError, match="are for ONNX files"):
        load_model("zoo:mlp", onnx=OnnxOptions.of({"batch": 8}))


def test_options_of_a_zoo_model_are_kept_with_its_name():
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


FUNCTIONS = """
import torch
from torch import nn

def decoder(batch: int = 6, sequence: int = 5, bias: bool = True):
    return nn.Linear(4, 4, bias=bias), (torch.zeros(batch, sequence, 4),)

def fixed():
    return nn.Linear(4, 4), (torch.zeros(2, 4),)
"""


@pytest.fixture
def functions(tmp_path):
    (tmp_path / "net.py").write_text(FUNCTIONS)
    return str(tmp_path / "net.py")


def test_numbers_and_switches_of_a_function_are_its_options(functions):
    loaded = load_model(with_sequence(f"{functions}:decoder?bias=false", 7), batch=3)
    assert loaded.source == f"{functions}:decoder?bias=false&sequence=7"
    assert loaded.args[0].shape == (3, 7, 4)
    assert loaded.model.bias is None
    # As a plan's ranks build it.
    _, args, _ = ModelSpec(loaded.source, settings=(("batch", 3),)).build()
    assert args[0].shape == (3, 7, 4)


def test_the_sequence_of_a_model_is_the_option_that_it_has():
    assert with_sequence("zoo:gpt-mini?layers=1", 8) == "zoo:gpt-mini?layers=1&sequence=8"
    assert with_sequence("zoo:rnnlm", 8) == "zoo:rnnlm?steps=8"


def test_a_batch_has_a_default_where_it_is_a_choice(functions):
    assert default_batch("zoo:gpt-mini?layers=1") == 4
    assert default_batch(f"{functions}:decoder?sequence=7") == 6


@pytest.mark.parametrize(("source", "batch", "message"), [
    ("{}:fixed", 4, "--batch 4 is for .* with a parameter 'batch'"),
    ("{}:decoder", 0, "is below 1; leave it out for the default 6"),
    ("{}:decoder?sequense=3", None, "no option 'sequense'; did you mean 'sequence'"),
    ("{}:decoder?batch=3", None, "give it by --batch"),
    ("{}:decoder?sequence", None, "is no OPTION=VALUE"),
    ("net.onnx", 4, "give them by --dim, as in --dim batch=8"),
])  # fmt: skip
def test_a_batch_or_an_option_that_a_source_does_not_have_is_refused(functions, source, batch, message):
    with pytest.raises(ModelSourceError, match=message):
        load_model(source.format(functions), batch=batch)


@pytest.mark.parametrize(("source", "length", "message"), [
    ("zoo:vgg16", 8, "models that read one sequence; .* 'zoo:vgg16\\?depth=...'"),
    ("zoo:transformer-tiny", 8, "that read one sequence; .* source=24, target=16"),
    ("zoo:gpt-mini?sequence=8", 8, "sets a sequence, and so does --sequence 8"),
    ("zoo:gpt-mini", 0, "sequence length 0 is below 1"),
    ("net.onnx", 8, "give them by --dim"),
    ("{}:fixed", 8, "functions with a parameter 'sequence'; .* has no options"),
    ("net", 8, "is not a model source"),
])  # fmt: skip
def test_a_sequence_that_cannot_be_set_is_refused(functions, source, length, message):
    with pytest.raises(TensorOptError, match=message):
        with_sequence(source.format(functions), length)


@pytest.mark.parametrize("source", ["", "net.onnx", "{}:fixed"])
def test_a_model_with_inputs_of_its_own_has_no_batch_to_choose(functions, source):
    with pytest.raises(TensorOptError, match="a parameter 'batch'"):
        default_batch(source.format(functions))
