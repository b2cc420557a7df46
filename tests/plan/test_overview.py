"""What Python and notebooks show of an exploration and its parts: tables that a person reads."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tensoropt
from tensoropt.plan import Exploration
from tensoropt.plan.overview import ROWS
from tests.plan.explorations import MIB, point, small_exploration

READY_MADE = sorted((Path(__file__).parents[2] / "app" / "data").iterdir())


def long_exploration(count: int = 5000) -> Exploration:
    points = tuple(point((10 + i) * MIB, 1.0 / (1 + i) ** 0.5, i % 2) for i in range(count))
    return replace(small_exploration(), points=points)


def table_of(text: str) -> list[str]:
    """The numbers of the points in a printed table."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("point "))
    numbers = (line.split()[0] for line in lines[start + 1 :])
    return [number for number in numbers if number.isdecimal() and int(number) <= 5000][:ROWS]


@pytest.mark.parametrize("folder", READY_MADE, ids=lambda folder: folder.name)
def test_a_ready_made_exploration_is_a_screenful(folder: Path) -> None:
    found = tensoropt.load(folder)
    shown = repr(found)
    assert len(shown.splitlines()) <= 25
    assert max(map(len, shown.splitlines())) <= 120
    assert shown.startswith("Exploration of a training step of zoo:gpt2 on dgx-h100")
    assert f"12 of {len(found.points)} points shown" in shown
    for word in ("leanest", "knee", "fastest", "memory/GiB", "time/ms"):
        assert word in shown
    assert len(repr(found.frontier).splitlines()) == 1 + 12 + 1
    assert len(found._repr_html_()) < 50_000


def test_of_many_points_the_ends_and_the_knee_are_shown() -> None:
    found = long_exploration()
    numbers = table_of(repr(found))
    assert len(numbers) == ROWS
    assert {"1", str(found.knee + 1), "5000"} <= set(numbers)
    assert "12 of 5,000 points shown" in repr(found)


def test_a_few_points_are_all_shown() -> None:
    shown = repr(small_exploration())
    assert table_of(shown)[:4] == ["1", "2", "3", "4"]
    assert "4 points" in shown
    assert "shown" not in shown


def test_a_notebook_shows_the_picture_and_the_table() -> None:
    for found in (small_exploration(), long_exploration()):
        root = ElementTree.fromstring(found._repr_html_())
        circles = root.findall(".//{http://www.w3.org/2000/svg}circle")
        assert 4 + 3 <= len(circles) <= 400 + 3
        assert len(root.findall(".//tbody/tr")) == min(len(found.points), ROWS)
    assert len(long_exploration()._repr_html_()) < 100_000


def test_no_points_are_no_error() -> None:
    found = replace(small_exploration(), points=())
    assert "no points" in repr(found)
    ElementTree.fromstring(found._repr_html_())
    assert repr(found.frontier) == "no points"


def test_what_other_planners_found_is_counted() -> None:
    found = replace(small_exploration(), others=(point(9 * MIB, 0.5, 0, planner="megatron"),))
    assert "1 point of other planners: megatron" in repr(found)


def test_a_frontier_is_still_a_tuple_of_points() -> None:
    found = small_exploration()
    assert found.frontier == found.points
    assert found.frontier[1] is found.points[1]
    assert pickle.loads(pickle.dumps(found.frontier)) == found.points
    assert found.frontier[1:] == found.points[1:]


def test_points_spaces_and_plans_are_short() -> None:
    found = small_exploration()
    (space, *_), (first, *_), plan = found.spaces, found.points, found.plan(0)
    figures = "10 MiB per device, 400 ms per step: compute 300 ms, communication 100 ms"
    assert repr(first) == f"Point({figures}; space 0, by frontier)"
    assert repr(space) == (
        "Space(mesh 2, 4 micro-batches: 2 groups, 1 tensor with several readers, 1 tied parameter)"
    )
    lines = repr(plan).splitlines()
    assert str(plan) == repr(plan)
    assert lines[0] == "Plan of zoo:toy by frontier"
    assert len(lines) <= 12
    assert any("memory per device" in line and "10 MiB" in line for line in lines)
    for shown in (first, space, plan):
        root = ElementTree.fromstring(shown._repr_html_())
        assert len(root.findall(".//tr")) >= 5


def test_words_of_a_model_do_not_become_markup() -> None:
    found = small_exploration()
    found = replace(found, model=found.model.model_copy(update={"source": "<b>&.py:f"}))
    for html in (found._repr_html_(), found.plan(0)._repr_html_()):
        assert "<b>&" not in html
        ElementTree.fromstring(html)
