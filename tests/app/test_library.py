"""Explorations by key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from samples_app import exploration
from tensoropt_app.library import READY_MADE, Library, UnknownExplorationError
from tensoropt_app.state import View
from tensoropt_app.views.detail import detail_of
from tensoropt_app.views.library import choices, title_of
from tensoropt_app.views.plan import TOTAL, beside_rows
from tensoropt_app.views.profile import devices_by_memory

from tensoropt.errors import TensorOptError
from tensoropt.plan import Exploration, Point


def test_the_ready_made_exploration_is_there_and_can_be_read() -> None:
    library = Library()
    assert library.entries()
    for entry in library.entries():
        found = library.load(entry.key)
        assert found.plan(0).operators
    assert sum(f.stat().st_size for f in READY_MADE.rglob("*") if f.is_file()) < 6 * 2**20


def test_the_first_screen_shows_everything() -> None:
    """Files made by an older version open, but their plans could not be explained: `make ready-made`."""
    library = Library()
    first, *others = (library.load(entry.key) for entry in library.entries())
    assert {"data_parallel", "zero", "megatron"} <= {point.planner for point in first.others}
    for found in (first, *others):
        for point in range(0, len(found.all_points), 10):
            assert detail_of(found, point).timeline
    assert devices_by_memory(library, View(exploration=library.entries()[0].key)) is not None


@pytest.mark.slow
def test_the_details_of_every_shipped_point_have_its_figures() -> None:
    """Data older than the code contradict themselves: `make ready-made`."""
    library = Library()
    for entry in library.entries():
        found = library.load(entry.key)
        for row, one in enumerate(found.all_points):
            _same_figures(found, row, one)


def test_the_details_of_some_shipped_points_have_their_figures() -> None:
    library = Library()
    for entry in library.entries():
        found = library.load(entry.key)
        for row in {0, found.knee, len(found.points) // 2, len(found.all_points) - 1}:
            _same_figures(found, row, found.all_points[row])


def _same_figures(found: Exploration, row: int, one: Point) -> None:
    told = detail_of(found, row)
    assert told.step.total_s == pytest.approx(one.time_s, rel=1e-9)
    assert told.step.compute_s == pytest.approx(one.compute_s, rel=1e-9)
    assert told.peak.total == pytest.approx(sum(one.memory), rel=1e-9)
    total = beside_rows(found, row, told)[-1]
    assert total.title == TOTAL
    assert total.compute_s == pytest.approx(one.compute_s, rel=1e-9)
    assert total.communication_s == pytest.approx(one.communication_s, rel=1e-9)
    assert total.memory_bytes == pytest.approx(one.memory_bytes, rel=1e-9)


def test_a_folder_of_several_explorations_is_opened(tmp_path: Path) -> None:
    for name in ("a", "b"):
        exploration().save(tmp_path / name)
    (tmp_path / "c").mkdir()
    keys = [e.key for e in Library(tmp_path).entries() if e.origin == "opened"]
    assert keys == ["opened-a", "opened-b"]
    assert Library(tmp_path / "a").entries()[0].key == "opened-a"


def test_a_folder_without_one_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(TensorOptError, match=r"holds no exploration.*tensoropt explore"):
        Library(tmp_path)


@pytest.mark.parametrize("key", ["../../etc", "/etc/passwd", "opened-..", "", "a" * 5000])
def test_a_key_is_looked_up_and_never_a_path(key: str) -> None:
    with pytest.raises(UnknownExplorationError):
        Library().load(key)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    exploration().save(tmp_path / "a")
    library = Library(tmp_path)
    first = library.load("opened-a")
    assert library.load("opened-a") is first
    exploration(first.points[:2]).save(tmp_path / "a")
    assert len(library.load("opened-a").points) == 2


def test_equal_titles_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        exploration().save(tmp_path / name)
    labels = [item["label"] for group in choices(Library(tmp_path)) for item in group["items"]]
    assert "gpt2-tiny on dgx-h100 (a)" in labels
    assert len(set(labels)) == len(labels)


def test_an_upload_is_called_by_its_own_name(tmp_path: Path) -> None:
    found = exploration()
    source = str(tmp_path / "uploads" / "upload-1.onnx")
    replace(found, model=found.model.model_copy(update={"source": source})).save(tmp_path / "a")
    library = Library(tmp_path, names=lambda: {source: "mine.onnx"})
    assert title_of(library, library.entry("opened-a")) == "mine.onnx on dgx-h100"
    assert Library(tmp_path).model_name(source) == "upload-1.onnx"
