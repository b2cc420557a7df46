"""The same exploration again is free, and only the same."""

from __future__ import annotations

import json

import pytest

from tensoropt.api import explore, explore_graph
from tensoropt.cluster import load_cluster
from tensoropt.engine.models import ModelSpec
from tensoropt.errors import InfeasibleError
from tensoropt.plan.settings import Settings
from tensoropt.profiling.store import ProfileStore
from tensoropt.session import kept

ASKED = {"cluster": "dgx-h100[2]", "measure": "never", "micro_batches": [1], "keep": True}


@pytest.fixture
def store(tmp_path):
    with ProfileStore(tmp_path / "profiles.sqlite") as opened:
        yield opened


@pytest.fixture(scope="module")
def model():
    return ModelSpec("zoo:mlp", 0).build()


@pytest.fixture
def searches(monkeypatch):
    """How often something was searched."""
    import tensoropt.api as api

    count, real = [], api.search
    monkeypatch.setattr(api, "search", lambda *args: count.append(1) or real(*args))
    return count


def points(found):
    return [(p.memory_bytes, p.time_s, p.choice) for p in found.points]


def test_the_same_again_is_not_searched(model, store, searches):
    first, again = (explore(*model, store=store, **ASKED) for _ in range(2))
    assert len(searches) == 1
    assert points(again) == points(first)
    assert again.captured is not None
    assert "kept from" in again.report["notes"][-1]
    assert "kept" not in first.report
    assert again.plan(0).to_json() == first.plan(0).to_json()


@pytest.mark.parametrize(
    "other", [{"epsilon": 0.0001}, {"optimizer": "sgd"}, {"cluster": "dgx-h100[4]"}, {"seed": 1}]
)
def test_another_question_is_searched(model, store, searches, other):
    explore(*model, store=store, **ASKED)
    explore(*model, store=store, **{**ASKED, **other})
    assert len(searches) == 2


def test_what_was_searched_with_a_smaller_gap_is_good_enough(model, store, searches):
    close, _ = (explore(*model, store=store, epsilon=gap, **ASKED) for gap in (0.0005, 0.0002))
    wider = explore(*model, store=store, epsilon=0.01, **ASKED)
    assert len(searches) == 2
    # Of several that which was searched with the widest gap.
    assert points(wider) == points(close)
    assert wider.settings["epsilon"] == 0.01
    assert "searched with the smaller gap 0.0005;" in wider.report["notes"][-1]
    assert "smaller gap" not in explore(*model, store=store, epsilon=0.0002, **ASKED).report["notes"][-1]
    assert len(searches) == 2


def test_an_exact_list_answers_no_other_question(model, store, searches):
    explore(*model, store=store, epsilon=0, **ASKED)
    explore(*model, store=store, epsilon=0.01, **ASKED)
    explore(*model, store=store, epsilon=0.0, **ASKED)
    assert len(searches) == 2


def test_what_the_store_learns_is_seen(model, store, searches):
    explore(*model, store=store, **ASKED)
    store.put("somewhere/else", {"forward_s": 1.0})
    explore(*model, store=store, **ASKED)
    assert len(searches) == 2
    store.put("facts-6/of/a/workload", {"kept_bytes": 1}, kind="saved")
    explore(*model, store=store, **ASKED)
    assert len(searches) == 2


def test_other_code_is_another_question(model, store, searches, monkeypatch):
    explore(*model, store=store, **ASKED)
    monkeypatch.setattr(kept, "code", lambda: "changed")
    explore(*model, store=store, **ASKED)
    assert len(searches) == 2


def test_another_budget_is_free_and_checked(model, store, searches):
    first = explore(*model, store=store, **ASKED)
    fits = explore(*model, store=store, memory_bytes=2.0**40, **ASKED)
    assert points(fits) == points(first)
    assert fits.settings["memory_bytes"] == 2.0**40
    with pytest.raises(InfeasibleError, match="no plan fits 1 KiB"):
        explore(*model, store=store, memory_bytes=1024.0, **ASKED)
    assert len(searches) == 1


def test_a_damaged_one_is_explored_anew(model, store, searches, tmp_path):
    first = explore(*model, store=store, **ASKED)
    (folder,) = [path for path in (tmp_path / "explorations").iterdir() if path.name != "sources"]
    (folder / "exploration.json").write_text("{", encoding="utf-8")
    again = explore(*model, store=store, **ASKED)
    assert points(again) == points(first)
    assert len(searches) == 2
    assert json.loads((folder / "exploration.json").read_text(encoding="utf-8"))["points"]


def test_the_oldest_are_removed(model, store, tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "MOST_KEPT", 2)
    for seed in range(4):
        explore(*model, store=store, seed=seed, **ASKED)
    left = [path for path in (tmp_path / "explorations").iterdir() if path.name != "sources"]
    assert len(left) == 2


def test_only_sources_without_code_have_a_key(tmp_path):
    assert kept.source_key("zoo:mlp", {"batch": None}) != kept.source_key("zoo:mlp", {"batch": 4})
    assert kept.source_key("package.module:function", {}) is None
    assert kept.source_key(str(tmp_path / "missing.onnx"), {}) is None
    file = tmp_path / "model.onnx"
    file.write_bytes(b"a model")
    first = kept.source_key(str(file), {})
    file.write_bytes(b"another")
    assert first != kept.source_key(str(file), {}) is not None
    file.write_bytes(b"weights elsewhere: location")
    assert kept.source_key(str(file), {}) is None


def test_what_cannot_be_kept_is_said(model, store, tmp_path):
    (tmp_path / "explorations").write_text("a file where the folder would be")
    found = explore(*model, store=store, **ASKED)
    assert found.report["notes"][-1].startswith("not kept for the next time it is asked: ")


def test_a_folder_of_somebody_else_is_passed_over(model, store, searches, tmp_path):
    explore(*model, store=store, **ASKED)
    (folder,) = [path for path in (tmp_path / "explorations").iterdir() if path.name != "sources"]
    folder.rename(folder.with_name(folder.name + ".old"))
    explore(*model, store=store, **ASKED)
    assert len(searches) == 2


def test_the_graph_of_a_source_is_kept_for_other_questions(store, tmp_path):
    built = ModelSpec("zoo:mlp", 0).build()
    explorations = kept.KeptExplorations(store)
    assert explorations.capture_of("zoo:mlp") is None
    found = explore(*built, store=store, **ASKED)
    captured = kept.KeptCapture(found.model, found.recorded.graph, ("from a file",))
    explorations.note_source("zoo:mlp", captured)
    again = explorations.capture_of("zoo:mlp")
    assert again.notes == ("from a file",)
    assert again.graph.fingerprint == found.model.fingerprint
    assert explorations.question_from("zoo:mlp") == kept.question_of(again.model)
    other = {**ASKED, "epsilon": 0.01, "cluster": "dgx-h100[4]", "keep": False}
    assert points(explore_graph(again.graph, again.model, store=store, **_without_keep(other))) == points(
        explore(*built, store=store, **other)
    )
    (file,) = (tmp_path / "explorations" / "sources").glob(f"*{kept.GRAPH}")
    file.write_bytes(file.read_bytes()[:100])
    assert explorations.capture_of("zoo:mlp") is None


def _without_keep(asked):
    return {name: value for name, value in asked.items() if name != "keep"}


def test_of_graphs_too_the_oldest_are_removed(model, store, tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "MOST_KEPT", 2)
    found = explore(*model, store=store, **ASKED)
    explorations = kept.KeptExplorations(store)
    for name in "abc":
        explorations.note_source(name, kept.KeptCapture(found.model, found.recorded.graph))
    explorations.keep("question", load_cluster("dgx-h100[2]"), Settings(), found)
    assert len(list((tmp_path / "explorations" / "sources").glob(f"*{kept.GRAPH}"))) == 2
