"""Planners beside a saved exploration: what is run, and what is shown afterwards."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tensoropt_app.jobs.beside import (
    SAME,
    Beside,
    beside_of,
    only_planners_differ,
    run_planners,
    shown_instead,
)
from tensoropt_app.library import Library
from tensoropt_app.views.export import command_folder
from tensoropt_app.views.runs import choices

import tensoropt
from tensoropt.exploration.exploration import load_exploration
from tensoropt.plan.point import FRONTIER
from tests.app.support.samples_app import exploration
from tests.costs.models import two_layers
from tests.plan.explorations import small_exploration


def words(folder: Path, out: Path, *planners: str) -> list[str]:
    return Beside(folder, "mine.onnx on local:2", planners, local=True).arguments(out)


def beside(folder: Path, out: Path, *, same: bool = True) -> list[str]:
    """What a job was asked that has left its result in ``out``."""
    row = {"planner": "zero"}
    replace(exploration(), comparison=(row,)).noted([], **{SAME: same}).save(out)
    return words(folder, out, "zero")


def test_no_model_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSOROPT_CACHE", str(tmp_path / "cache"))
    model, args, kwargs = two_layers()
    explored = {"cluster": "dgx-h100[2]", "micro_batches": (1,), "measure": "never", "keep": True}
    tensoropt.explore(model, args, kwargs, **explored).save(tmp_path / "a")
    wanted = Beside(tmp_path / "a", "mine.onnx on local:2", ("zero",), local=True, there=("megatron", "zero"))
    text = run_planners(wanted.arguments(tmp_path / "b"), None)
    assert "megatron" in text
    ran = [row["planner"] for row in load_exploration(tmp_path / "b").comparison]
    assert set(ran) - {FRONTIER} == {"megatron", "zero"}
    assert shown_instead([(wanted.arguments(tmp_path / "b"), tmp_path / "b")]) == {
        tmp_path / "a": tmp_path / "b"
    }
    assert wanted.measures
    assert "zero" in wanted.title
    assert "megatron" not in wanted.title
    assert beside_of(wanted.arguments(tmp_path / "b")) == tmp_path / "a"


def test_other_jobs_are_none_of_these() -> None:
    assert beside_of(["recost", "a", "--out", "b"]) is None
    assert beside_of(["explore", "zoo:mlp", "--only-beside"]) is None
    assert beside_of(["recost"]) is None


def test_what_differs_in_more_than_planners_is_not_shown_instead(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    exploration().save(one)
    asked = beside(one, two)
    assert shown_instead([(asked, two)]) == {one: two}
    beside(one, two, same=False)
    assert shown_instead([(asked, two)]) == {}
    exploration().save(two)
    assert shown_instead([(asked, two)]) == {}
    (two / "exploration.json").write_text("no JSON")
    assert shown_instead([(asked, two)]) == {}


def test_planners_alone_differ_where_the_search_found_the_same() -> None:
    found = small_exploration()
    assert only_planners_differ(found, found)
    last = found.points[-1]
    # A planner's plan that beats a point takes its place.
    better = last.changed(planner="zero", time_s=last.time_s * 0.9)
    beside = replace(found, points=(*found.points[:-1], better), others=(better,))
    assert only_planners_differ(found, beside)
    assert only_planners_differ(beside, found)
    # The costs of another day.
    slower = replace(found, points=(*found.points[:-1], last.changed(time_s=last.time_s * 1.01)))
    assert not only_planners_differ(found, slower)
    assert not only_planners_differ(slower, found)
    assert not only_planners_differ(found, replace(found, points=found.points[:-1]))


def test_what_was_explored_again_since_is_shown_itself(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    exploration().save(one)
    asked = beside(one, two)
    later = (two / "exploration.json").stat().st_mtime + 10
    os.utime(one / "exploration.json", (later, later))
    assert shown_instead([(asked, two)]) == {}


def test_one_entry_shows_both(tmp_path: Path) -> None:
    opened, jobs = tmp_path / "opened" / "a", tmp_path / "jobs"
    exploration().save(opened)
    done = [(beside(opened, jobs / "1"), jobs / "1")]
    library = Library(
        opened.parent,
        lambda: [(f"job-{out.name}", out) for _, out in done if out.exists()],
        ready_made=tmp_path / "none",
        beside=lambda: shown_instead(pair for pair in done if pair[1].exists()),
    )
    (entry,) = library.entries()
    assert (entry.key, entry.folder, entry.shown) == ("opened-a", opened, jobs / "1")
    assert entry.identity == str(opened.resolve())
    assert command_folder(entry) == str(jobs / "1")
    assert [row["planner"] for row in library.load("opened-a").comparison] == ["zero"]
    assert library.entry("job-1").key == "opened-a"
    (group,) = choices(library)
    assert [item["value"] for item in group["items"]] == ["opened-a"]
    # The next planners run beside what is shown, and stand in its place.
    done.insert(0, (beside(entry.shown, jobs / "2"), jobs / "2"))
    (entry,) = library.entries()
    assert entry.shown == jobs / "2"
    assert entry.also == ("job-1", "job-2")
    assert library.entry("job-2") == library.entry("job-1") == entry
    # A job that is forgotten takes what it found with it.
    (jobs / "2").rename(tmp_path / "gone")
    assert library.entries()[0].shown == jobs / "1"
    (jobs / "1").rename(tmp_path / "gone-too")
    assert library.entries()[0].shown == opened


def test_without_the_first_one_the_result_is_an_entry_of_its_own(tmp_path: Path) -> None:
    opened, job = tmp_path / "opened" / "a", tmp_path / "jobs" / "1"
    exploration().save(opened)
    asked = beside(opened, job)
    library = Library(
        None,
        lambda: [("job-1", job)],
        ready_made=tmp_path / "none",
        beside=lambda: shown_instead([(asked, job)]),
    )
    assert [entry.key for entry in library.entries()] == ["job-1"]


@pytest.mark.parametrize("spelled", ["relative", "linked"])
def test_however_the_folder_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelled: str) -> None:
    opened, job = tmp_path / "opened" / "a", tmp_path / "jobs" / "1"
    exploration().save(opened)
    asked = beside(opened.resolve(), job)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linked").symlink_to(tmp_path / "opened")
    library = Library(
        Path("opened" if spelled == "relative" else "linked"),
        ready_made=tmp_path / "none",
        beside=lambda: shown_instead([(asked, job)]),
    )
    assert library.entries()[0].shown == job
