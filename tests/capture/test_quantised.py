"""Linear layers whose weight is bytes become one operator; what is only like one does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensoropt.capture import capture
from tensoropt.capture.quantised import weights_in_bytes
from tensoropt.graph import OperatorGraph
from tensoropt.ops.families.quantised import QUANTISED_LINEAR
from tensoropt.ops.quantised import SCHEMES, QuantisedLinear, quantised

INPUTS, OUTPUTS = 128, 6


class Plain(nn.Module):
    """A layer that dequantises in plain code, behind an adapter that is trained."""

    def __init__(
        self,
        product: Callable[[Plain, torch.Tensor], torch.Tensor],
        *,
        buffers: bool = False,
        trained: bool = False,
    ):
        super().__init__()
        stored = quantised(torch.randn(OUTPUTS, INPUTS), "int8")
        self.before = nn.Linear(INPUTS, INPUTS)
        self.product = product
        for name, value in (("codes", stored.codes), ("scales", stored.scales)):
            if buffers:
                self.register_buffer(name, value)
            else:
                setattr(self, name, nn.Parameter(value, trained and name == "scales"))
        self.bias = nn.Parameter(torch.randn(OUTPUTS), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(self, self.before(x)).square().mean()


def graph_of(model: nn.Module, dtype: str = "float32", device: str = "cpu") -> OperatorGraph:
    x = torch.randn(4, 3, INPUTS, device=device)
    return capture(model.to(device), (x,), dtype=dtype).graph  # and is compared with the model's own step


def whole(graph: OperatorGraph) -> list[str]:
    return [op.name for op in graph.operators if op.target == QUANTISED_LINEAR]


PLAIN = {
    "unsqueezed": lambda m, x: F.linear(x, m.codes.to(x.dtype) * m.scales.unsqueeze(1)),
    "indexed": lambda m, x: F.linear(x, m.codes.float() * m.scales[:, None], m.bias),
    "viewed, scales first": lambda m, x: F.linear(x, m.scales.view(-1, 1) * m.codes.to(x.dtype), m.bias),
}


@pytest.mark.parametrize("buffers", [False, True], ids=["parameters", "buffers"])
@pytest.mark.parametrize("way", PLAIN)
def test_plain_code_is_one_operator(way: str, buffers: bool) -> None:
    graph = graph_of(Plain(PLAIN[way], buffers=buffers))
    (name,) = whole(graph)
    codes = graph.by_name[name].args[1].name
    assert graph.tensors[codes].dtype == "int8"
    assert graph.tensors[codes].kind == ("buffer" if buffers else "parameter")
    assert not any(t.shape == (OUTPUTS, INPUTS) and t.dtype == "float32" for t in graph.tensors.values())
    assert weights_in_bytes(graph) == ({"int8"}, 0 if buffers else -OUTPUTS)


UNLIKE = {
    "a scale of another kind": lambda m, x: F.linear(x, m.codes.to(x.dtype) * m.scales[0]),
    "scaled afterwards": lambda m, x: F.linear(x, m.codes.to(x.dtype)) * m.scales,
    "an addition between": lambda m, x: F.linear(x, (m.codes.to(x.dtype) + 1) * m.scales.unsqueeze(1)),
    "other numbers": lambda m, x: F.linear(x, m.codes.abs().to(x.dtype) * m.scales.unsqueeze(1)),
}


@pytest.mark.parametrize("way", UNLIKE)
def test_what_is_not_exactly_this_stays(way: str) -> None:
    assert whole(graph_of(Plain(UNLIKE[way]))) == []


def test_scales_that_are_trained_stay() -> None:
    assert whole(graph_of(Plain(PLAIN["unsqueezed"], trained=True))) == []


def test_a_weight_with_another_reader_is_made_for_that() -> None:
    def twice(m: Plain, x: torch.Tensor) -> torch.Tensor:
        weight = m.codes.to(x.dtype) * m.scales.unsqueeze(1)
        return F.linear(x, weight) + weight.sum(1)

    graph = graph_of(Plain(twice))
    assert len(whole(graph)) == 1
    assert sum(op.target == "aten.mul.Tensor" for op in graph.operators) == 1


class Layered(nn.Module):
    """Two layers whose weights are bytes."""

    def __init__(self, scheme: str):
        super().__init__()
        self.before = nn.Linear(INPUTS, INPUTS)
        layers = [QuantisedLinear(quantised(torch.randn(INPUTS, INPUTS), scheme), scheme) for _ in range(2)]
        self.layers = nn.Sequential(layers[0], nn.ReLU(), layers[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.before(x)).square().mean()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_is_one_operator(scheme: str) -> None:
    graph = graph_of(Layered(scheme))
    assert len(whole(graph)) == 2
    schemes, more = weights_in_bytes(graph)
    assert schemes == {scheme}
    numbers = sum(t.elements for t in graph.parameters) + more
    assert numbers == 3 * INPUTS**2 + INPUTS


def test_values_are_not_needed() -> None:
    there, missing = (graph_of(Layered("nf4"), device=device) for device in ("cpu", "meta"))
    assert there.fingerprint == missing.fingerprint


def test_bytes_and_scales_stay_as_they_are_in_mixed_precision() -> None:
    graph = graph_of(Layered("nf4"), dtype="bfloat16")
    for name in whole(graph):
        x, codes, scales, *_ = (ref and graph.tensors[ref.name] for ref in graph.by_name[name].args[:6])
        assert (x.dtype, codes.dtype, scales.dtype) == ("bfloat16", "uint8", "float32")
        assert graph.tensors[name].dtype == "bfloat16"
