"""Explorations by key."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from samples_app import exploration, of_model, space
from tensoropt_app.library import READY_MADE, Library, _costs
from tensoropt_app.views.explorations import choices, title_of
from tensoropt_app.views.operators import TOTAL, beside_rows

from tensoropt import Exploration, TensorOptError, files
from tensoropt.exploration.answer import answer
from tensoropt.exploration.exploration import load_exploration as load
from tensoropt.plan.kinds import SHARDED
from tensoropt.report.detail import detail, recorded_of
from tensoropt.report.rebuilt import rebuilt


def test_the_ready_made_exploration_is_there_and_can_be_read():
    library = Library()
    assert library.entries()
    for entry in library.entries():
        assert library.load(entry.key).plan(0).operators
    assert sum(f.stat().st_size for f in READY_MADE.rglob("*") if f.is_file()) < 6 * 2**20


def test_the_first_screen_shows_a_model_that_needs_the_tool():
    """Files made by an older version open, but their plans could not be explained: `make ready-made`."""
    library = Library()
    first = library.load(library.entries()[0].key)
    found = answer(first)
    assert found.limit_bytes == first.settings["memory_bytes"]
    assert found.row is not None
    fitting = {base.title: base.fits for base in found.baselines}
    assert not fitting["DDP"]
    assert {"FSDP (ZeRO-3)", "TP (Megatron)"} <= set(fitting)


def test_the_shipped_ones_show_what_more_devices_would_gain():
    assert [entry.key for entry in Library().alike("gpt2-dgx-h100")] == ["gpt2-dgx-h100-half"]


SHIPPED = [path.name for path in sorted(READY_MADE.iterdir())]


@pytest.mark.sweep
@pytest.mark.parametrize("name", SHIPPED)
def test_the_details_of_shipped_points_have_their_figures(name):
    """Data older than the code contradict themselves: `make ready-made`."""
    found = load(READY_MADE / name)
    for row in {0, found.knee, len(found.points) // 2, len(found.all_points) - 1}:
        _check_figures(found, row)


def _check_figures(found: Exploration, row: int) -> None:
    one, told = found.all_points[row], detail(found, row)
    assert max(event.start_s + event.duration_s for event in told.timeline) <= one.time_s * (1 + 1e-9)
    if one.kind is SHARDED:  # made again from the costs that were saved; of others the detail itself is kept
        plan = rebuilt(found, row, recorded_of(found))
        metrics = plan.plan.evaluated(plan.costs()).metrics
        assert metrics.time_s[0] == pytest.approx(one.time_s, rel=1e-9)
        assert metrics.compute_s[0] == pytest.approx(one.compute_s, rel=1e-9)
        assert metrics.exposed_s[0] == pytest.approx(one.exposed_s, rel=1e-9, abs=1e-15)
    # When buffers are replaced follows from all strategies of a space, and here from one alone.
    assert told.peak.total == pytest.approx(sum(one.memory), rel=1e-3)
    total = beside_rows(found, row, told)[-1]
    assert total.title == TOTAL or one.kind is not SHARDED  # of several devices, each figure has its own
    assert total.compute_s == pytest.approx(one.compute_s, rel=1e-9)
    assert total.communication_s == pytest.approx(one.communication_s, rel=1e-9)
    assert total.memory_bytes == pytest.approx(one.memory_bytes, rel=1e-3)


def test_a_folder_of_several_explorations_is_opened(tmp_path):
    for name in ("a", "b"):
        exploration().save(tmp_path / name)
    (tmp_path / "c").mkdir()
    keys = [e.key for e in Library(tmp_path).entries() if e.origin == "opened"]
    assert keys == ["opened-a", "opened-b"]
    assert Library(tmp_path / "a").entries()[0].key == "opened-a"


def test_a_folder_without_one_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(TensorOptError, match=r"holds no exploration.*tensoropt explore"):
        Library(tmp_path)


@pytest.mark.parametrize("key", ["../../etc", "/etc/passwd", "opened-..", "", "a" * 5000])
def test_a_key_is_looked_up_and_never_a_path(key):
    with pytest.raises(TensorOptError, match="there is no exploration named"):
        Library().load(key)


def test_a_changed_file_is_read_again(tmp_path):
    exploration().save(tmp_path / "a")
    library = Library(tmp_path)
    first = library.load("opened-a")
    assert library.load("opened-a") is first
    exploration(first.points[:2]).save(tmp_path / "a")
    assert len(library.load("opened-a").points) == 2


def labels_of(folder: Path, *found: Exploration) -> list[str]:
    for name, one in zip("abc", found, strict=False):
        one.save(folder / name)
    return [item["label"] for group in choices(Library(folder)) for item in group["items"]]


def test_equal_titles_are_told_apart(tmp_path):
    labels = labels_of(tmp_path, exploration(), exploration())
    assert "gpt2-tiny on 8 × H100-80GB (a)" in labels
    assert len(set(labels)) == len(labels)


def test_equal_titles_say_what_differs(tmp_path):
    found = exploration()
    others = {"dtype": "bfloat16"}, {"dtype": "bfloat16", "epsilon": 0.1}
    alike = (replace(found, settings={**found.settings, **changes}) for changes in others)
    assert labels_of(tmp_path, found, *alike)[:3] == [
        "gpt2-tiny on 8 × H100-80GB · epsilon 0.001 · dtype float32",
        "gpt2-tiny on 8 × H100-80GB · epsilon 0.001 · dtype bfloat16",
        "gpt2-tiny on 8 × H100-80GB · epsilon 0.1 · dtype bfloat16",
    ]


def test_planners_beside_tell_an_exploration_from_the_one_without(tmp_path):
    rows = ({"planner": "frontier"}, {"planner": "zero"}, {"planner": "megatron"})
    labels = labels_of(tmp_path, exploration(), replace(exploration(), comparison=rows))
    assert labels[1] == "gpt2-tiny on 8 × H100-80GB · beside zero, megatron"


def test_an_upload_is_called_by_its_own_name(tmp_path):
    source = str(tmp_path / "uploads" / "upload-1.onnx")
    of_model(exploration(), source=source).save(tmp_path / "a")
    library = Library(tmp_path, names=lambda: {source: "mine.onnx"})
    assert title_of(library, library.entry("opened-a")) == "mine.onnx on 8 × H100-80GB"
    assert Library(tmp_path).model_name(source) == "upload-1.onnx"


def _nested(folder: Path) -> None:
    (folder / "exploration.json").write_text("[" * 200_000)


def _changed(folder: Path, **changes: Any) -> None:
    data = json.loads((folder / "exploration.json").read_text())
    (folder / "exploration.json").write_text(json.dumps({**data, **changes}))


MOST_BYTES = 2**20


def _bomb(folder: Path) -> None:
    _changed(folder, recorded=True)
    with gzip.open(folder / "recorded.json.gz", "wb") as file:
        file.write(bytes(MOST_BYTES + 1))


_of_other_types = partial(_changed, settings=[1], points={"a": 1})
DAMAGES = _nested, _bomb, partial(_changed, cluster={}), _of_other_types


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_cannot_be_read_stays_alone(tmp_path, damage, monkeypatch):
    """It is named in the list, refused in words when chosen, and others show what they showed."""
    for name, devices in (("good", 2), ("better", 4), ("bad", 8)):
        exploration(spaces=[space((devices,))]).save(tmp_path / name)
    damage(tmp_path / "bad")
    monkeypatch.setattr(files, "_MOST_BYTES", MOST_BYTES)
    library = Library(tmp_path)
    labels = [item["label"] for group in choices(library) for item in group["items"]]
    assert "gpt2-tiny on 8 × H100-80GB (good)" in labels
    if damage is not _bomb:  # whose list entry reads nothing of it
        assert "bad (cannot be read)" in labels
    with pytest.raises(TensorOptError, match=rf"bad.*{'more than' if damage is _bomb else 'damaged'}"):
        _ = library.load("opened-bad").recorded
    assert "opened-better" in [entry.key for entry in library.alike("opened-good")]


def test_lists_open_no_exploration(tmp_path, monkeypatch):
    """With more of them than are kept open, every toggle would read them all again."""
    for number in range(12):
        exploration(spaces=[space((number + 1,))]).save(tmp_path / f"run{number:02d}")
    opened, read = Mock(wraps=load), Mock(wraps=_costs)
    monkeypatch.setattr("tensoropt_app.library.load_exploration", opened)
    monkeypatch.setattr("tensoropt_app.library._costs", read)
    library = Library(tmp_path)
    for _ in range(3):
        choices(library)
        for entry in library.entries():
            library.costs_of(entry)
    assert not opened.called
    assert read.call_count == len(library.entries())
    assert len(library.alike("opened-run00")) == 11


def test_the_index_knows_what_the_files_say(tmp_path):
    """Also where somebody wrote one anew."""
    found = exploration(spaces=[space((2, 4)), space((3,))])
    found.save(tmp_path / "a")
    found.save(tmp_path / "b")
    file = tmp_path / "b" / "exploration.json"
    file.write_text(json.dumps(dict(reversed(json.loads(file.read_text()).items())), indent=1))
    library = Library(tmp_path)
    first, second, *_ = library.entries()
    assert library.head_of(first) == library.head_of(second)
    assert library.head_of(first).kind == "H100-80GB"
    for entry in (first, second):
        wanted = found.needs.round().tolist(), found.all_points.time.tolist()
        assert library.costs_of(entry) == wanted
