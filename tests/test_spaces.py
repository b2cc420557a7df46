"""Spaces searched, also under caps, and judged."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tensoropt.api import explore
from tensoropt.cluster import Mesh
from tensoropt.costs.source import silent
from tensoropt.costs.store import ProfileStore
from tensoropt.costs.working import WorkingSets
from tensoropt.errors import InfeasibleError
from tensoropt.execute.models import ModelSpec
from tensoropt.plan.problem import Settings
from tensoropt.search import NoStrategyError, TrackedFrontier
from tensoropt.spaces import SearchedSpace, search_all


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


def test_what_was_heuristic_under_a_cap_is_said():
    def frontier(*notes: str) -> TrackedFrontier:
        return TrackedFrontier(np.zeros(1), np.zeros(1), not notes, notes, lambda i: None, lambda m: m)

    space = SearchedSpace(None, None, frontier(), None, ((2.0**20, frontier("fixed")), (2.0**21, frontier())))
    first, caps = space.notes
    assert first == "fixed"
    assert "1 MiB, 2 MiB" in caps
    assert SearchedSpace(None, None, frontier("fixed"), None).notes == ("fixed",)


def test_a_cap_that_no_strategy_keeps_to_is_said(store, monkeypatch):
    model = ModelSpec("zoo:mlp", 0).build()
    monkeypatch.setattr(WorkingSets, "caps", lambda *_: [1.0, 2.0**40])
    found = explore(*model, cluster="dgx-h100[2]", micro_batches=[1], measure="never", store=store)
    for space in found.spaces:
        assert "no strategy keeps to a cap on what an operator needs of 1 B" in space.notes
        assert any("caps on what an operator needs: 1 TiB" in note for note in space.notes)
    assert found.points


def test_nothing_that_runs_is_an_error_with_a_remedy(monkeypatch):
    def refuse(*_, **__):
        raise NoStrategyError("no strategy is possible: operator 'fatal'")

    monkeypatch.setattr("tensoropt.spaces.track_frontier", refuse)
    tables = SimpleNamespace(mesh=(1, 2), variables=(), edges=())
    with pytest.raises(InfeasibleError, match=r"mesh 2: nothing runs .*operator 'fatal'.*--measure never"):
        search_all([(Mesh(shape=(2,)), tables, None)], Settings(), silent)
