"""What calls are priced by has a reason where it is unlike what they move; a price pass by pass is found."""

from __future__ import annotations

import pytest

from tensoropt.engine.models import ModelSpec, load_model
from tests.sweep import prices


@pytest.mark.parametrize("name", ["zoo:unet-tiny", pytest.param("all", marks=pytest.mark.slow)])
def test_unlike_prices_have_reasons(name: str) -> None:
    seen: set[str] = set()
    for model, graph in prices.graphs(() if name == "all" else (name,)):
        odd = list(prices.odd_calls(model, graph, seen))
        assert not [one for one in odd if one.call not in prices.WHY]


@pytest.mark.parametrize("factor", [4.0, 0.2])
def test_a_price_pass_by_pass_is_found(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a batch norm split along the batch was, in the operators it consists of."""
    own = prices.moved_bytes
    monkeypatch.setattr(prices, "moved_bytes", lambda cls, of: factor * own(cls, of))
    graph = load_model(ModelSpec("zoo:unet-tiny")).graph
    found = {one.call for one in prices.odd_calls("unet", graph)}
    assert {"kernels.sync_batch_norm", "aten.conv2d.default"} <= found
