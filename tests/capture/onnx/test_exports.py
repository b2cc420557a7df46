"""PyTorch -> ``torch.onnx.export`` -> here: equal outputs and equal gradients.

Exporters rename, transpose, concatenate, split and reorder weights (an LSTM's gates). Every element of every
parameter is therefore given a value of its own, and gradients are compared element by element under these
values, wherever in the file they went. Exporters also multiply a batch norm in evaluation form into the
convolution before it; the original is brought into the same form first, otherwise its parameters are others.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from tensoropt.capture.onnx import ImportedModel, import_onnx

pytest.importorskip("onnxscript")


class Field(nn.Module):
    """The logits of a ``transformers`` model, its inputs by position."""

    def __init__(self, model: nn.Module, *names: str):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, args, strict=True))).logits


IDS = torch.arange(32).reshape(2, 16) * 7 % 96 + 1
"""Without 0, BERT's padding: PyTorch keeps that row of the table from training, a file cannot say so."""
MASK = (torch.arange(16) < torch.tensor([[16], [10]])).long()


def bert() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    return Field(transformers.BertForMaskedLM(config), "input_ids", "attention_mask"), (IDS, MASK)


def gpt2() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=16, n_layer=2, n_head=2, n_positions=32, use_cache=False
    )
    return Field(transformers.GPT2LMHeadModel(config), "input_ids"), (IDS,)


class Recogniser(nn.Module):
    """Reads a line of text: a convolutional net, recurrent layers over its columns (CRNN)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.ConvTranspose2d(8, 8, 2, 2),
            nn.Conv2d(8, 12, 3, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.MaxPool2d((2, 1)),
            nn.AdaptiveAvgPool2d((1, None)),
        )
        self.lstm = nn.LSTM(12, 10, num_layers=2, bidirectional=True)
        self.gru = nn.GRU(20, 8)
        self.letters = nn.Linear(8, 20)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        columns = self.features(image).squeeze(2).permute(2, 0, 1)
        columns, _ = self.lstm(columns)
        columns, _ = self.gru(columns)
        return F.log_softmax(self.letters(columns), 2)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "recogniser": lambda: (Recogniser(), (torch.randn(2, 1, 16, 24),)),
    "bert": bert,
    "gpt2": gpt2,
}


def fold_batch_norms(module: nn.Module) -> None:
    """Multiply each batch norm that follows a convolution into it, as exporters do."""
    children = list(module.named_children())
    for (name, first), (after, second) in itertools.pairwise(children):
        if isinstance(first, nn.Conv2d) and isinstance(second, nn.BatchNorm2d):
            setattr(module, name, fuse_conv_bn_eval(first, second))
            setattr(module, after, nn.Identity())
    for child in module.children():
        fold_batch_norms(child)


def give_values(module: nn.Module) -> None:
    """Distinct, repeatable values to all parameters; statistics that are not the identity."""
    generator = torch.Generator().manual_seed(7)
    parameters = list(module.requires_grad_().parameters())
    total = sum(p.numel() for p in parameters)
    values = (torch.randperm(total, generator=generator) + 0.5) / total - 0.5
    with torch.no_grad():
        for p, part in zip(parameters, values.split([p.numel() for p in parameters]), strict=True):
            p.copy_(part.view_as(p))
        for m in module.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.copy_(torch.randn(m.num_features, generator=generator) / 4)
                m.running_var.copy_(torch.rand(m.num_features, generator=generator) + 0.5)


def exported(module: nn.Module, args: tuple[torch.Tensor, ...], path: Path, dynamo: bool) -> ImportedModel:
    more: dict[str, Any] = {} if dynamo else {"opset_version": 17}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            torch.onnx.export(module, args, path, dynamo=dynamo, verbose=False, **more)
        finally:
            logging.disable(logging.NOTSET)
    return import_onnx(path)


def gradients_by_value(module: nn.Module) -> dict[float, float]:
    """The gradient of each element of each parameter under the element's value."""
    found: dict[float, float] = {}
    for name, p in module.named_parameters():
        assert p.grad is not None, name
        for value, gradient in zip(p.detach().flatten().tolist(), p.grad.flatten().tolist(), strict=True):
            assert value not in found, f"{name} holds {value} a second time"
            found[value] = gradient
    return found


EXPORTS = [(exporter, name) for exporter in ("dynamo", "torchscript") for name in MODELS]
EXPORTS.remove(("torchscript", "gpt2"))
"""It has no ``aten::diff``, which the model's mask needs."""


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize(("exporter", "name"), EXPORTS)
def test_outputs_and_gradients_are_those_of_the_original(exporter: str, name: str, tmp_path: Path) -> None:
    if (exporter, name) == ("torchscript", "bert"):
        pytest.importorskip("transformers", "5.9", "earlier ones index a size that is a scalar while traced")
    torch.manual_seed(0)
    original, args = MODELS[name]()
    original.eval()
    fold_batch_norms(original)
    give_values(original)
    module = exported(original, args, tmp_path / "m.onnx", exporter == "dynamo").module
    expected, got = original(*args), module(*args)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn(expected.shape)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    theirs, ours = gradients_by_value(original), gradients_by_value(module)
    assert not ours.keys() - theirs.keys(), "something that is no weight trains"
    left_out = [theirs[value] for value in theirs.keys() - ours.keys()]
    assert not any(left_out), (
        "a weight with a gradient does not train"
    )  # unused rows of tables may be cut off
    largest = max(map(abs, theirs.values()))
    assert max(abs(theirs[value] - ours[value]) for value in ours) <= 1e-4 * largest
