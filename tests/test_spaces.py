"""Spaces searched, also under caps, and judged."""

from __future__ import annotations

import pytest

from tensoropt.api import explore
from tensoropt.costs.store import ProfileStore
from tensoropt.costs.working import WorkingSets
from tensoropt.execute.models import ModelSpec


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with ProfileStore(tmp_path_factory.mktemp("store") / "profiles.sqlite") as opened:
        yield opened


def test_caps_find_leaner_plans_and_lose_none(store, monkeypatch):
    """A wide MLP: small parameters, large activations, so that working memory is much of the peak."""
    model = ModelSpec("zoo:mlp", 0, settings=(("batch", 4096),)).build()

    def found():
        return explore(*model, cluster="dgx-h100", micro_batches=[1], measure="never", store=store)

    capped = found()
    monkeypatch.setattr(WorkingSets, "caps", lambda *_: [])
    plain = found()
    assert any("caps on what an operator needs" in note for space in capped.spaces for note in space.notes)
    assert not any("caps" in note for space in plain.spaces for note in space.notes)
    assert capped.points[0].memory_bytes < 0.95 * plain.points[0].memory_bytes
    for point in plain.points:
        assert any(
            p.memory_bytes <= point.memory_bytes and p.time_s <= point.time_s * (1 + 1e-12)
            for p in capped.points
        )
