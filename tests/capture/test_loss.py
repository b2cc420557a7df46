"""Which of a model's outputs is trained, and what is said where that is not clear."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from tensoropt.capture import capture
from tensoropt.capture.loss import WithLoss, find_loss
from tensoropt.errors import CaptureError
from tensoropt.question.model_source import load_model
from tests.models import Call
from tests.situations import gradients

SITUATIONS = "tests/situations/gradients.py"
LOSS, OTHER = (torch.ones((), requires_grad=True) * value for value in (1.0, 2.0))
ACCURACY = torch.tensor(0.5)


@dataclass
class Output:
    """Fields without defaults."""

    logits: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor | None = None


@pytest.mark.parametrize(
    "output",
    [
        (LOSS, ACCURACY),
        {"logits": torch.ones(3), "error": LOSS, "accuracy": ACCURACY},
        {"auxiliary": OTHER, "loss": LOSS},
    ],
)
def test_the_loss_is_found(output):
    assert find_loss(output)[1] is LOSS


@pytest.mark.parametrize(
    ("output", "pattern"),
    [
        ((LOSS, ACCURACY, OTHER), r"2 losses \(out\[0\], out\[2\]\).*out: out\[0\] \+ out\[2\] "),
        ({"a": LOSS, "b": OTHER, "n": None}, r"out\['a'\] \+ out\['b'\].*fourth item.*'loss'"),
        (Output(torch.ones(3), LOSS, OTHER), r"out\.first \+ out\.second"),
        ({"accuracy": ACCURACY}, "depends on no trained parameter"),
        ({"logits": torch.ones(3)}, "returns dict without a scalar"),
        (
            {"losses": {"box": LOSS, "classes": OTHER}},
            r"2 losses .*out: out\['losses'\]\['box'\] \+ out\['losses'\]\['classes'\]",
        ),
        (([{"loss": LOSS}], torch.ones(3)), r"1 loss \(out\[0\]\[0\]\['loss'\]\)"),
    ],
)
def test_what_is_not_clear_is_refused(output, pattern):
    with pytest.raises(CaptureError, match=pattern):
        find_loss(output)


def test_a_model_file_says_how_losses_add_up():
    built = load_model(f"{SITUATIONS}:build_summed_losses")
    graph = capture(built.model, built.args, dict(built.kwargs)).graph
    # Under the names that the model itself has.
    assert {t.key for t in graph.parameters} == {
        f"{layer}.{kind}" for layer in ("body", "one", "two") for kind in ("weight", "bias")
    }


def test_what_else_could_be_trained_is_named():
    notes = capture(*gradients.build_named_loss()).graph.notes
    assert any("only 'loss' is trained; out['auxiliary'] could be trained" in note for note in notes)


@pytest.mark.parametrize(
    ("output", "named"),
    [
        ((LOSS, {"kl": OTHER, "accuracy": ACCURACY}), r"out\[1\]\['kl'\] could"),
        (SimpleNamespace(loss=LOSS, kl=OTHER), r"'loss' is trained; out\.kl could"),
        ((LOSS, [Output(ACCURACY, OTHER)]), r"out\[1\]\[0\]\.first could"),
        ((LOSS, {"total": LOSS, "accuracy": ACCURACY}), None),
    ],
)
def test_what_else_could_be_trained_is_found_inside(output, named):
    model = WithLoss(Call(lambda m: output), None)
    model()
    assert len(model.notes) == (named is not None)
    assert all(re.search(named, note) for note in model.notes)
