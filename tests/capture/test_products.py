"""Products with a transposed parameter become ``linear``, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tensoropt.capture import capture
from tests.models import Call

X = torch.randn(4, 6, 8)


def targets(function: Callable[[Call, Tensor], Tensor]) -> list[str]:
    """What a model of two matrices, 8x8 and 5x8, calls; that it computes the same is compared as it is
    captured."""
    graph = capture(Call(function, square=(8, 8), wide=(5, 8), batched=(4, 8, 8)), (X,)).graph
    return [op.target.split(".")[1] for op in graph.operators][:-1]


@pytest.mark.parametrize(
    "transposed",
    [Tensor.t, lambda w: w.T, lambda w: w.permute(1, 0), lambda w: w.transpose(-1, -2)],
    ids=["t", "T", "permute", "transpose"],
)
def test_a_product_with_a_transposed_parameter_is_linear(transposed: Callable[[Tensor], Tensor]) -> None:
    assert targets(lambda m, x: (x @ transposed(m.square)).square().sum()) == ["linear", "square"]
    assert targets(lambda m, x: (x[0] @ transposed(m.wide)).square().sum())[-2:] == ["linear", "square"]


def test_a_transpose_with_another_reader_stays() -> None:
    found = targets(lambda m, x: (x @ m.square.T + m.square.T.sum(0)).square().sum())
    assert found.count("linear") == 1
    assert "permute" in found


def test_other_products_stay() -> None:
    for function in (
        lambda m, x: (x @ m.square).square().sum(),
        lambda m, x: (x @ m.batched.transpose(1, 2)).square().sum(),
        lambda m, x: (x @ x[0].T).square().sum() + F.linear(x, m.wide).sum(),
    ):
        assert "matmul" in targets(function) or "bmm" in targets(function)
