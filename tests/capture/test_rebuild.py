"""The way back: a captured graph rebuilt as a module computes what its model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tensoropt import zoo
from tensoropt.capture import capture, find_loss, rebuild
from tensoropt.capture.onnx import import_onnx
from tensoropt.errors import CaptureError
from tests.capture.onnx.models import LIGHT, perceptron

MODELS = [
    "bert-tiny",  # masks and position ids folded to constants
    "gpt2-tiny",  # tied weights
    "llama-tiny",
    "mixtral-tiny",  # top-k, index_put
    "resnet-tiny",  # batch norm: buffers that are written
    "unet-tiny",
]


def loss_of(model: nn.Module, args: Any, kwargs: Any) -> torch.Tensor:
    return find_loss(model(*args, **kwargs))[1]


@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_and_buffers(name: str) -> None:
    built = zoo.build(name, seed=0)
    original = zoo.build(name, seed=0).model.train()
    captured = capture(built.model, built.args, built.kwargs)
    module = rebuild(captured.graph, built.model)
    aliases = captured.graph.aliases
    assert aliases or name != "gpt2-tiny"
    assert all(module.get_parameter(name) is module.get_parameter(kept) for name, kept in aliases.items())
    inputs = [leaf for leaf in captured.example if isinstance(leaf, torch.Tensor)]
    expected, found = loss_of(original, built.args, built.kwargs), module(*inputs)
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    rebuilt = dict(module.named_parameters(remove_duplicate=False))
    for key, parameter in original.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            torch.testing.assert_close(rebuilt[key].grad, parameter.grad, rtol=1e-4, atol=1e-5)
    for key, buffer in module.named_buffers():
        if not key.startswith("constant_"):
            torch.testing.assert_close(buffer, original.get_buffer(key))


class Everything(nn.Module):
    """In-place updates, a counted buffer, several outputs, a constant that is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        y = self.linear(x)
        y[:, 1:] *= 2
        mask = torch.tril(torch.ones(6, 6)) + torch.zeros(4, 6, 6)
        return {"y": y.relu_(), "z": mask @ y.unsqueeze(-1) * self.calls}


def test_inference_with_several_outputs() -> None:
    model, x = Everything().eval(), torch.randn(4, 6)
    captured = capture(model, (x,), mode="inference")
    module = rebuild(captured.graph, model)
    found = module(x)
    model.calls.zero_()
    expected = model(x)
    torch.testing.assert_close(found, tuple(expected.values()))
    assert float(module.calls) == 1.0


def test_an_imported_file_can_be_rebuilt() -> None:
    imported = import_onnx(perceptron(), {"batch": 4}, loss="auto")
    args = imported.example()
    captured = capture(imported.module, args)
    torch.testing.assert_close(rebuild(captured.graph, imported.module)(*args), imported.module(*args))


def test_a_real_network_there_and_back() -> None:
    imported = import_onnx(LIGHT / "light_shufflenet.onnx")
    args = imported.example()
    captured = capture(imported.module, args, mode="inference")
    torch.testing.assert_close(rebuild(captured.graph, imported.module)(*args), imported.module(*args))


def test_a_model_without_data_cannot_be_rebuilt() -> None:
    with torch.device("meta"):
        model = Everything().eval()
        captured = capture(model, (torch.randn(4, 6),), mode="inference")
    captured.graph.constants.clear()  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match="meta device"):
        rebuild(captured.graph, model)
