"""Linear layers whose weight is bytes become one operator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.capture.quantised import weights_in_bytes
from tensoropt.graph import OperatorGraph
from tensoropt.ops.families.quantised import QUANTISED_LINEAR
from tensoropt.ops.quantised import SCHEMES, QuantisedLinear, quantised
from tests.models import Call

INPUTS, OUTPUTS = 128, 6


def graph_of(model: nn.Module, dtype: str = "float32", device: str = "cpu") -> OperatorGraph:
    x = torch.randn(4, 3, INPUTS, device=device)
    return capture(model.to(device), (x,), dtype=dtype).graph  # and is compared with the model's own step


def whole(graph: OperatorGraph) -> list[str]:
    return [op.name for op in graph.operators if op.target == QUANTISED_LINEAR]


def layered(scheme: str) -> nn.Module:
    """Two layers whose weights are bytes."""
    layers = [QuantisedLinear(quantised(torch.randn(INPUTS, INPUTS), scheme), scheme) for _ in range(2)]
    held = {"before": nn.Linear(INPUTS, INPUTS), "layers": nn.Sequential(layers[0], nn.ReLU(), layers[1])}
    return Call(lambda m, x: m.layers(m.before(x)).square().mean(), **held)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_is_one_operator(scheme: str) -> None:
    graph = graph_of(layered(scheme))
    assert len(whole(graph)) == 2
    schemes, more = weights_in_bytes(graph)
    assert schemes == {scheme}
    numbers = sum(t.elements for t in graph.parameters) + more
    assert numbers == 3 * INPUTS**2 + INPUTS


def test_values_are_not_needed() -> None:
    there, missing = (graph_of(layered("nf4"), device=device) for device in ("cpu", "meta"))
    assert there.fingerprint == missing.fingerprint


def test_bytes_and_scales_stay_as_they_are_in_mixed_precision() -> None:
    graph = graph_of(layered("nf4"), dtype="bfloat16")
    for name in whole(graph):
        x, codes, scales, *_ = (ref and graph.tensors[ref.name] for ref in graph.by_name[name].args[:6])
        assert (x.dtype, codes.dtype, scales.dtype) == ("bfloat16", "uint8", "float32")
        assert graph.tensors[name].dtype == "bfloat16"
