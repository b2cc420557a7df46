"""Weights in bytes: what they stand for, what is lost, and what a product with them keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensoropt.errors import TensorOptError
from tensoropt.ops.families.quantised import quantised_linear
from tensoropt.ops.kernels import SingleDevice
from tensoropt.ops.quantised import SCHEMES, QuantisedLinear, WeightBytes, _dequantised, quantised
from tests import naive

ROWS, COLUMNS = 6, 384  # six blocks in three groups of two


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, COLUMNS) * torch.rand(ROWS, 1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_stand_for_what_they_say(weight: torch.Tensor, scheme: str) -> None:
    stored = quantised(weight, scheme)
    wanted = torch.tensor(naive.dequantised(stored, scheme), dtype=torch.float64)
    torch.testing.assert_close(_dequantised(stored, scheme, torch.float64), wanted, atol=0, rtol=1e-6)
    narrow = _dequantised(stored, scheme, torch.float32)
    torch.testing.assert_close(narrow.double(), wanted, atol=0, rtol=1e-6)
    assert torch.equal(_dequantised(stored, scheme, torch.bfloat16), narrow.bfloat16())  # rounded once


@pytest.mark.parametrize(("scheme", "lost"), [("int8", 0.5 / 127), ("nf4", 0.16), ("fp4", 0.17)])
def test_each_number_is_the_nearest(weight: torch.Tensor, scheme: str, lost: float) -> None:
    """Off by at most half of the widest gap between the numbers that there are."""
    stored = quantised(weight, scheme)
    within = weight if scheme == "int8" else weight.view(ROWS, -1, 64)
    largest = within.abs().amax(-1, keepdim=True)
    off = (_dequantised(stored, scheme, torch.float32) - weight).view(within.shape).abs() / largest
    assert float(off.max()) < lost
    once = _dequantised(stored, scheme, torch.float32)
    torch.testing.assert_close(_dequantised(quantised(once, scheme), scheme, torch.float32), once)


def test_nested_scales_are_nearly_the_scales(weight: torch.Tensor) -> None:
    plain, nested = (_dequantised(quantised(weight, s), s, torch.float32) for s in ("nf4", "nf4-double"))
    assert float((plain - nested).abs().max()) < 0.02 * float(weight.abs().max())


@pytest.mark.parametrize(
    ("scheme", "each"),
    [("int8", 1 + 4 / 4096), ("nf4", 0.5 + 4 / 64), ("nf4-double", 0.5 + 1 / 64 + 4 / 4096)],
)
def test_a_large_weight_takes_so_many_bytes_a_number(scheme: str, each: float) -> None:
    """QLoRA, section 3: 0.5 bits for scales, or 0.127; without values, too."""
    stored = quantised(torch.empty(4096, 4096, device="meta"), scheme)
    size = sum(part.nbytes for part in stored if part is not None)
    assert size / 4096**2 == pytest.approx(each, abs=1e-6)


def test_blocks_that_are_not_whole_and_unknown_schemes_are_refused(weight: torch.Tensor) -> None:
    with pytest.raises(TensorOptError, match=r"per 64 inputs .* 100 inputs do not divide .* take int8"):
        quantised(torch.randn(4, 100), "nf4")
    with pytest.raises(TensorOptError, match=r"'nf8' is not a scheme for storing .* did you mean 'nf4'"):
        quantised(weight, "nf8")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_with_the_weight_and_keeps_only_bytes(
    weight: torch.Tensor, scheme: str, dtype: torch.dtype
) -> None:
    stored = quantised(weight, scheme)
    x = torch.randn(2, 3, COLUMNS, dtype=dtype, requires_grad=True)
    bias = torch.randn(ROWS, requires_grad=True)
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        made = quantised_linear(SingleDevice(), "", x, *stored, bias, scheme)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in stored if t is not None}
    wanted = F.linear(x, _dequantised(stored, scheme, dtype), bias.to(dtype))
    assert torch.equal(made, wanted)
    grads = [torch.autograd.grad(y, (x, bias), torch.ones_like(y)) for y in (made, wanted)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)


def test_parts_of_rows_and_blocks_are_parts_of_the_weight(weight: torch.Tensor) -> None:
    stored = quantised(weight, "nf4-double")
    whole = _dequantised(stored, "nf4-double", torch.float32)
    first = stored.codes.view(ROWS, 3, 2, 32)[2:4, :, :1].flatten(1)  # the first block of each group
    part = WeightBytes(
        first,
        stored.scales.view(ROWS, 3, 2)[2:4, :, 0],
        stored.nested[2:4],
        stored.offset,  # type: ignore[index]
    )
    wanted = whole.view(ROWS, 3, 2, 64)[2:4, :, 0].flatten(1)
    assert torch.equal(_dequantised(part, "nf4-double", torch.float32), wanted)


def test_rows_are_made_some_at_a_time(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = quantised(weight, "nf4")
    whole = _dequantised(stored, "nf4", torch.float32)
    monkeypatch.setattr("tensoropt.ops.quantised._MOST_AT_ONCE", 4 * COLUMNS)
    assert torch.equal(_dequantised(stored, "nf4", torch.float32), whole)


def test_a_layer_is_trained_through(weight: torch.Tensor) -> None:
    layer = QuantisedLinear(quantised(weight, "nf4"), "nf4", nn.Parameter(torch.randn(ROWS)))
    assert str(layer) == f"QuantisedLinear({COLUMNS}, {ROWS}, scheme=nf4)"
    assert {name for name, p in layer.named_parameters() if p.requires_grad} == {"bias"}
    x = torch.randn(5, COLUMNS, requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad is not None
    assert layer.bias.grad is not None
    again = QuantisedLinear(
        quantised(torch.zeros(ROWS, COLUMNS), "nf4"), "nf4", nn.Parameter(torch.zeros(ROWS))
    )
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))
