"""Saved explorations: whole, comparable, and every point can still become a plan.

What Python and notebooks show of an exploration and its parts: tables that a person reads.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest

import tensoropt
from tensoropt.errors import MissingExtraError, TensorOptError
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.exploration.frontier_table import frontier_text, table_rows
from tensoropt.exploration.rates import RatesOf
from tensoropt.units import format_number, share_words
from tests.plan.explorations import MIB, point, small_exploration

READY_MADE = sorted((Path(__file__).parents[2] / "app" / "data").iterdir())


ROWS = 8
"""The most points of a table in a notebook."""


def long_exploration(count: int = 5000) -> Exploration:
    points = tuple(point((10 + i) * MIB, 1.0 / (1 + i) ** 0.5, i % 2) for i in range(count))
    return replace(small_exploration(), points=points)


def test_throughput_and_mfu_stand_beside_the_time_where_they_are_known():
    (gpus,) = (folder for folder in READY_MADE if folder.name == "gpt2-dgx-h100")
    found = tensoropt.load(gpus)
    header, first, *_ = table_rows(found, [0])
    at = header.index("tokens/s")
    assert header[at - 1 : at + 2] == ["time/ms", "tokens/s", "MFU"]
    rates = RatesOf(found).of(0)
    assert first[at : at + 2] == [format_number(rates.tokens_per_s), share_words(rates.mfu)]
    for shown in (repr(found), frontier_text(found), found._repr_html_()):
        assert {"tokens/s", "MFU"} <= set(re.split(r"[\s<>]+", shown))
    assert not {"tokens/s", "samples/s", "MFU"} & set(table_rows(small_exploration(), [0])[0])


def test_without_plotly_what_to_install_is_said(monkeypatch):
    for package in ("plotly.graph_objects", "tensoropt_app.standalone"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"plot\(\) needs .*pip install 'tensoropt\[app\]'"):
        small_exploration().plot()


def table_of(text: str) -> list[str]:
    """The numbers of the points in a printed table."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("point "))
    numbers = (line.split()[0] for line in lines[start + 1 :])
    return [number for number in numbers if number.isdecimal() and int(number) <= 5000][:ROWS]


@pytest.mark.slow
@pytest.mark.parametrize("folder", READY_MADE, ids=lambda folder: folder.name)
def test_a_ready_made_exploration_is_a_screenful(folder):
    found = tensoropt.load(folder)
    shown = repr(found)
    assert len(shown.splitlines()) <= 25
    assert max(map(len, shown.splitlines())) <= 145
    of = f"{found.model.source} on {found.cluster['name']}"
    assert shown.startswith(f"Exploration of a training step of {of}")
    assert f"{len(table_of(shown))} of {len(found.points)} points shown" in shown
    for word in ("leanest", "knee", "fastest", "needs/GiB", "time/"):
        assert word in shown


def test_of_many_points_the_ends_and_the_knee_are_shown():
    found = long_exploration()
    numbers = table_of(repr(found))
    assert len(numbers) == ROWS
    assert {"1", str(found.knee + 1), "5000"} <= set(numbers)
    assert f"{ROWS} of 5,000 points shown" in repr(found)


def test_a_few_points_are_all_shown():
    shown = repr(small_exploration())
    assert table_of(shown)[:4] == ["1", "2", "3", "4"]
    assert "4 points" in shown
    assert "shown" not in shown


def test_a_notebook_shows_the_table():
    for found in (small_exploration(), long_exploration()):
        shown = re.sub(r"<script.*?</script>", "", found._repr_html_(), flags=re.DOTALL)
        assert len(ElementTree.fromstring(shown).findall(".//tbody/tr")) == min(len(found.points), ROWS)


def test_no_points_are_no_error():
    found = replace(small_exploration(), points=())
    assert "no points" in repr(found)
    ElementTree.fromstring(found._repr_html_())


def test_points_and_plans_are_short():
    found = small_exploration()
    first, plan = found.points[0], found.plan(0)
    figures = "10 MiB per device, 400 ms per step: compute 300 ms, communication 100 ms"
    assert repr(first) == f"Point({figures}; space 0, by frontier)"
    lines = repr(plan).splitlines()
    assert str(plan) == repr(plan)
    assert (lines[0], len(lines)) == ("Plan of zoo:toy by frontier", 3)
    assert "10 MiB per device" in lines[2]


def test_words_of_a_model_do_not_become_markup():
    found = small_exploration()
    found = replace(found, model=found.model.model_copy(update={"source": "<b>&.py:f"}))
    html = found._repr_html_()
    assert "<b>&" not in html
    ElementTree.fromstring(html)


@pytest.fixture
def found():
    return small_exploration()


def test_saving_twice_gives_the_same_bytes(found, tmp_path):
    for name in ("a", "b"):
        found.save(tmp_path / name)
    for name in ("exploration.json", "strategies.json.gz", "frontier.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_an_interrupted_write_leaves_nothing_behind(found, tmp_path, monkeypatch):
    found.plan(0).save(tmp_path / "plan.json")
    before = (tmp_path / "plan.json").read_bytes()

    monkeypatch.setattr("os.fsync", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        found.plan(1).save(tmp_path / "plan.json")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_bytes() == before


@pytest.mark.parametrize(("damage", "message"), [
    (lambda d: (d / "exploration.json").unlink(), "holds no exploration"),
    (lambda d: (d / "exploration.json").write_text("{"), "is damaged"),
    (lambda d: (d / "points.npz").unlink(), "is damaged"),
    (lambda d: (d / "points.npz").write_bytes(b"no archive"), "is damaged"),
    (lambda d: (d / "strategies.json.gz").unlink(), "is damaged"),
    (lambda d: (d / "strategies.json.gz").write_bytes(b"no archive"), "is damaged"),
    (lambda d: (d / "exploration.json").write_text('{"schema": "other"}'),
     r"schema 'other', not '.*/4'; explore again"),
])  # fmt: skip
def test_damaged_folders_are_refused(found, tmp_path, damage, message):
    found.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(TensorOptError, match=message):
        load_exploration(tmp_path)
