"""Explorations as rows of a table and curves of a plot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples_app import GIB, exploration, of_model, point, space
from tensoropt_app.library import Library
from tensoropt_app.views.runs import (
    AxisOptions,
    Run,
    common_units,
    drawn,
    known_to_the_browser,
    most_of_each,
    plot_notes,
    runs_of,
    shown_keys,
    table_rows,
)

from tensoropt.exploration.exploration_files import Costs


@pytest.fixture
def library(tmp_path: Path) -> Library:
    """One in float32 with batch 32, one for inference without a batch, one that is damaged."""
    first = exploration()
    of_model(first, batch=32).save(tmp_path / "a")
    replace(first, settings={"mode": "infer", "optimizer": "adam", "dtype": "bfloat16"}).save(tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "exploration.json").write_text("{")
    return Library(tmp_path, ready_made=tmp_path / "none")


def test_rows_say_what_each_is_of(library: Library) -> None:
    library.labels.rename(library.entry("opened-a").identity, "mine")
    found = runs_of(library)
    first, second, broken = table_rows(found, common_units(found))
    assert {
        "id": "opened-a", "name": "mine", "style": 0, "model": "gpt2-tiny",
        "cluster": "dgx-h100", "devices": 8, "dtype": "float32", "batch": 32,
         "mode": "train", "optimizer": "adam", "points": 8,
        "memory": 10.0, "time": 100.0, "origin": "opened", "fault": "",
    }.items() <= first.items()  # fmt: skip
    assert (second["mode"], second["optimizer"], second["dtype"], second["batch"]) == (
        "infer",
        "",
        "bfloat16",
        None,
    )
    assert broken["fault"]
    assert (broken["style"], broken["memory"], broken["points"], broken["name"]) == (
        None, None, 0, "c (cannot be read)",
    )  # fmt: skip
    assert len(first["made"]) == len("2026-01-01 00:00")


def test_the_plot_starts_with_what_can_be_read(library: Library) -> None:
    found = runs_of(library)
    known = known_to_the_browser(found, common_units(found))
    assert known["usual"] == ["opened-a", "opened-b"]
    assert shown_keys(None, known) == {"opened-a", "opened-b"}
    assert shown_keys({"shown": "all"}, known) == set(known["order"])
    assert shown_keys({"shown": ["opened-b", "gone"]}, known) == {"opened-b"}
    assert shown_keys({"shown": 3}, {}) == set()
    assert known["facts"]["opened-a"]["most"] == 80
    assert known["facts"]["opened-a"]["kind"] == "H100-80GB"


def run(memory: Any, time: Any, devices: Any, **more: Any) -> Run:
    return replace(more.pop("of"), curve=Costs(*map(np.array, (memory, time, devices))))


def test_axes_are_what_they_say(library: Library) -> None:
    one, other, broken = runs_of(library)
    assert drawn(one, AxisOptions()).x.tolist() == [(i + 1) * 10 * GIB for i in range(8)]
    total = drawn(one, AxisOptions(total=True, per_sample=True))
    assert total.x.tolist() == [(i + 1) * 80 * GIB for i in range(8)]
    assert total.y == pytest.approx([(0.8 - 0.1 * i) / 32 for i in range(8)])
    assert total.number.tolist() == list(range(1, 9))
    rate = drawn(one, AxisOptions(per_second=True))
    assert rate.y == pytest.approx([32 / (0.8 - 0.1 * i) for i in range(8)])
    assert len(drawn(other, AxisOptions(per_second=True)).x) == 0
    assert AxisOptions.from_data({"rate": True}) == AxisOptions(per_second=True)
    assert AxisOptions.from_data({"logx": False}) == AxisOptions(log_x=False)
    assert AxisOptions.from_data("nothing") == AxisOptions()
    assert len(drawn(other, AxisOptions(per_sample=True)).x) == len(drawn(broken, AxisOptions()).x) == 0
    assert any("cannot be read" in line for line in plot_notes([broken]))
    assert plot_notes([one, other]) == []


def test_points_that_others_beat_on_these_axes_are_left_out(library: Library) -> None:
    one = runs_of(library)[0]
    mixed = run([10.0, 20.0, 30.0], [3.0, 2.0, 1.0], [8, 2, 8], of=one)
    assert drawn(mixed, AxisOptions()).number.tolist() == [1, 2, 3]
    total = drawn(mixed, AxisOptions(total=True))
    assert (total.x.tolist(), total.y.tolist(), total.number.tolist()) == ([40, 240], [2, 1], [2, 3])


def test_many_points_are_thinned_and_that_is_said(library: Library) -> None:
    one = runs_of(library)[0]
    count = 30_000
    long = run(np.linspace(1, 80, count) * GIB, 1 / np.linspace(1, 80, count), np.full(count, 8), of=one)
    most = most_of_each([long, one])
    found = drawn(long, AxisOptions(), most)
    assert most // 2 < len(found.x) <= most
    assert (found.number[0], found.number[-1]) == (1, count)
    assert (np.diff(found.x) > 0).all()
    assert (np.diff(found.y) < 0).all()
    assert plot_notes([long, one]) == [
        f"{one.label}: drawn with 5,000 of its points each; the frontier page has all."
    ]


def test_the_batch_of_a_call_counts_where_none_was_asked_for(tmp_path: Path) -> None:
    found = exploration([point(GIB, 0.1)], [space()])
    call = {"args": [], "kwargs": {"input_ids": {"tensor": [48, 16], "dtype": "int64"}}}
    of_model(found, call=call).save(tmp_path / "a")
    assert runs_of(Library(tmp_path, ready_made=tmp_path / "none"))[0].head.batch == 48
