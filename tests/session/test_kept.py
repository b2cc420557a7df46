"""The same exploration again is free, and only the same."""

import numpy as np
import pytest

from tensoropt import InfeasibleError, Settings, load_cluster
from tensoropt.api import explore, explore_captured
from tensoropt.profiling.store import _CACHED
from tensoropt.session import kept
from tests.profiling.test_store import cached

ASKED = {
    "cluster": "dgx-h100[2]", "measure": "never", "micro_batches": [1], "pipelines": "never", "keep": True,
}  # fmt: skip


@pytest.fixture
def searches(monkeypatch):
    """How often something was searched, but for the first exploration."""
    import tensoropt.api as api

    count, real = [], api.search
    monkeypatch.setattr(api, "search", lambda *args: count.append(1) or real(*args))
    return count


def points(found):
    return [(p.memory_bytes, p.time_s, p.choice) for p in found.points]


def test_the_same_again_is_not_searched(model, found, kept_store, searches):
    again = explore(*model, store=kept_store, **ASKED)
    assert not searches
    assert points(again) == points(found)
    assert "kept from" in again.report["notes"][-1]
    assert "kept" not in found.report
    assert again.plan(0).to_json() == found.plan(0).to_json()


def test_nothing_is_kept_unasked(model, empty_store):
    explore(*model, store=empty_store, **{**ASKED, "keep": False})
    assert [cached(empty_store, kind, "") for kind in _CACHED] == [[]] * len(_CACHED)


def test_another_question_is_searched(model, kept_store, searches):
    others = {"epsilon": 0.0001, "optimizer": "sgd", "cluster": "dgx-h100[4]", "seed": 1, "method": "ldp"}
    for asked, (name, other) in enumerate(others.items(), 1):
        explore(*model, store=kept_store, **{**ASKED, name: other})
        assert len(searches) == asked, name


def test_what_the_store_learns_is_seen(model, kept_store, searches):
    kept_store.put("somewhere/else", {"forward_s": 1.0})
    explore(*model, store=kept_store, **ASKED)
    assert len(searches) == 1
    kept_store.put("facts-6/of/a/workload", {"kept_bytes": 1}, kind="saved")
    explore(*model, store=kept_store, **ASKED)
    assert len(searches) == 1


def test_other_code_is_another_question(model, kept_store, searches, monkeypatch):
    monkeypatch.setattr(kept, "code", lambda: "changed")
    explore(*model, store=kept_store, **ASKED)
    assert len(searches) == 1


def test_another_budget_is_free_and_checked(model, found, kept_store, searches):
    fits = explore(*model, store=kept_store, memory_bytes=2.0**40, **ASKED)
    assert points(fits) == points(found)
    assert fits.settings["memory_bytes"] == 2.0**40
    with pytest.raises(InfeasibleError, match="no plan fits 1 KiB"):
        explore(*model, store=kept_store, memory_bytes=1024.0, **ASKED)
    assert not searches


def change(store, change):
    """Replace what is kept of the only exploration."""
    (key,) = cached(store, "explorations", "")
    data = store.get(key, "explorations")
    change(data)
    store.put(key, data, "explorations")


@pytest.mark.parametrize("damage", [
    lambda data: data["files"].update({"exploration.json": np.frombuffer(b"{", np.uint8)}),
    lambda data: data["files"].pop("points.npz"),
    lambda data: data.clear(),
])  # fmt: skip
def test_a_damaged_one_is_explored_anew(model, found, kept_store, searches, damage):
    change(kept_store, damage)
    for _ in range(2):
        assert points(explore(*model, store=kept_store, **ASKED)) == points(found)
        assert len(searches) == 1


def test_no_other_file_is_written(model, found, kept_store, searches, tmp_path):
    """A store that somebody else wrote may name any path."""
    change(kept_store, lambda data: data["files"].update({str(tmp_path / "run"): np.zeros(1, np.uint8)}))
    assert points(explore(*model, store=kept_store, **ASKED)) == points(found)
    assert not searches
    assert not (tmp_path / "run").exists()


def test_only_sources_without_code_have_a_key(tmp_path):
    assert kept.source_key("zoo:mlp", {"batch": None}) != kept.source_key("zoo:mlp", {"batch": 4})
    assert kept.source_key("zoo:mlp", {}) != kept.source_key("zoo:mlp?layers=2", {})
    assert kept.source_key("package.module:function", {}) is None
    assert kept.source_key(str(tmp_path / "missing.onnx"), {}) is None
    file = tmp_path / "model.onnx"
    file.write_bytes(b"a model")
    first = kept.source_key(str(file), {})
    file.write_bytes(b"another")
    assert first != kept.source_key(str(file), {}) is not None
    file.write_bytes(b"weights elsewhere: location")
    assert kept.source_key(str(file), {}) is None


def test_what_cannot_be_kept_is_said(found, empty_store):
    store = empty_store
    store._connection.execute("PRAGMA max_page_count = 1")  # no more than there are
    said = kept.KeptExplorations(store).keep("question", load_cluster("dgx-h100[2]"), Settings(), found)
    assert said.startswith("the result was not kept for reuse: ")
    assert "disk is full" in said
    assert store.persistent


def test_the_graph_of_a_source_is_kept_for_other_questions(model, found, kept_store):
    explorations = kept.KeptExplorations(kept_store)
    assert explorations.capture_of("zoo:mlp") is None
    captured = kept.KeptCapture(found.model, found.recorded.graph, ("from a file",))
    explorations.keep_capture("zoo:mlp", captured)
    again = explorations.capture_of("zoo:mlp")
    assert again.notes == ("from a file",)
    assert again.graph.fingerprint == found.model.fingerprint
    assert kept.question_of(again.model) == kept.question_of(found.model)
    other = {**ASKED, "epsilon": 0.01, "cluster": "dgx-h100[4]", "keep": False}
    anew = explore(*model, store=kept_store, **other)
    assert points(explore_captured(again, store=kept_store, **other)) == points(anew)
    kept_store._connection.execute("UPDATE cache SET value = substr(value, 1, 100) WHERE kind = 'captures'")
    assert explorations.capture_of("zoo:mlp") is None
