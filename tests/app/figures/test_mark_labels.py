"""Names of planners' marks, of the knee and of bends in the plot."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from samples_app import GIB, exploration, point
from tensoropt_app.figures import mark_labels as labels
from tensoropt_app.figures.frontier import drawn, frontier_figure
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData

from tensoropt.plan.plan_names import PLANNER_TITLES

PLANNERS = [name for name in PLANNER_TITLES if name != "frontier"]
VIEW = View()


def marked(marks: list[tuple[float, float]], view: View) -> tuple[FrontierData, np.ndarray]:
    """A frontier with marks of as many planners, each at (GiB, seconds), and the rows of the marks."""
    others = [
        point(size * GIB, time_s, planner=name)
        for name, (size, time_s) in zip(itertools.cycle(PLANNERS), marks, strict=False)
    ]
    data = drawn(FrontierData.of(exploration(others=others)), view)
    return data, np.flatnonzero(data.by_planners)


def ranges(data: FrontierData, view: View) -> tuple[list[float], list[float]]:
    frame = frontier_figure(data, view, "light")["layout"]
    return frame["xaxis"]["range"], frame["yaxis"]["range"]


def texts(marks: list[tuple[float, float]], *, narrow: bool = False) -> list[str]:
    data, rows = marked(marks, VIEW)
    return labels.Labels(data, VIEW, ranges(data, VIEW), narrow=narrow).of_marks(rows)[0]


@pytest.mark.parametrize("view", [VIEW, View(log_x=True, log_y=True), View(lines=True)])
def test_no_name_is_printed_over_another_or_outside(view: View) -> None:
    data, rows = marked([(30 + 0.9 * i, 0.5 + 0.02 * (i % 3)) for i in range(12)], view)
    ends = ranges(data, view)
    x = labels._pixels(data.axes.x.values, ends[0], labels.WIDE_PX, log=view.log_x)
    y = labels._pixels(data.axes.y.values, ends[1], labels.HIGH_PX, log=view.log_y)
    boxes = [
        labels.box(x[row], y[row], place, text)
        for text, place, row in zip(*labels.Labels(data, view, ends).of_marks(rows), rows, strict=True)
        if text
    ]
    assert boxes
    for (a, b, m), (c, d, n) in itertools.combinations(boxes, 2):
        assert b <= c or d <= a or abs(m - n) >= labels.LINE_PX
    assert all(left >= 0 and right <= labels.WIDE_PX for left, right, _ in boxes)


def test_a_name_for_which_there_is_no_room_is_left_to_the_tooltip() -> None:
    # Just far enough apart not to share a label.
    pile = [(40 + 2.1 * (i % 4), 0.5 + 0.021 * (i // 4)) for i in range(16)]
    assert "" in texts(pile)
    assert any(texts(pile))


def test_marks_at_one_place_share_a_label_that_says_how_many_more() -> None:
    first, *rest = texts([(60.0, 0.6)] * 5)
    assert first.endswith(" and 2 more")
    assert set(rest) == {""}


def test_on_a_phone_fewer_names_find_room() -> None:
    spread = [(25 + 5.0 * i, 0.5 + 0.02 * (i % 3)) for i in range(12)]
    assert 0 < sum(map(bool, texts(spread, narrow=True))) < sum(map(bool, texts(spread)))


PHONE, TABLET, LAPTOP, DESK = 252.0, 630.0, 758.0, 1038.0
"""Widths of the plot on windows of 390, 768, 1280 and 1920 pixels."""
CLOSE = [(70.0, 0.30), (73.0, 0.305), (30.0, 0.5), (31.0, 0.52), (76.0, 0.42), (60.0, 0.31)]


@pytest.mark.parametrize("width", [PHONE, TABLET, LAPTOP, DESK])
@pytest.mark.parametrize("shift", range(6))
def test_a_name_stands_at_its_own_mark_and_at_no_other(width: float, shift: int) -> None:
    """On every window the mark that is nearest to a name is one of those that it names."""
    marks = [(size + 0.7 * shift, time_s) for size, time_s in CLOSE]
    data, rows = marked(marks, VIEW)
    ends = ranges(data, VIEW)
    x = labels._pixels(data.axes.x.values, ends[0], width, log=False)
    y = labels._pixels(data.axes.y.values, ends[1], labels.HIGH_PX, log=False)
    named = 0
    for text, place, row in zip(
        *labels.Labels(data, VIEW, ends, narrow=width < 400).of_marks(rows), rows, strict=True
    ):
        if not text:
            continue
        left, right, middle = labels.box(x[row], y[row], place, text)
        nearest = min(rows, key=lambda one: np.hypot(x[one] - (left + right) / 2, y[one] - middle))
        said = text.partition(" and ")[0].split(", ")
        if " and " in text:  # further planners at this place are counted and not named
            continue
        assert labels.planner_title(data.planner[nearest]) in said
        named += len(said)
    assert named >= 3


def named(data: FrontierData, view: View, *, narrow: bool = False) -> dict[int, tuple[str, str]]:
    """Row -> (text, place) of everything that has a name, placed as the figure does."""
    found = labels.Labels(data, view, ranges(data, view), narrow=narrow)
    marks = np.flatnonzero(data.by_planners)
    texts = {data.special(view)["knee"]: found.of_knee(marks)}
    texts |= dict(zip(marks.tolist(), zip(*found.of_marks(marks), strict=True), strict=True))
    return {**found.of_bends(np.flatnonzero(data.on_frontier), marks), **texts}


SPREAD = [(12 + 4.5 * i, 0.75 - 0.03 * i) for i in range(14)]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("view", [VIEW, View(log_x=True, log_y=True)])
@pytest.mark.parametrize("marks", [[], CLOSE, SPREAD])
def test_names_of_bends_and_marks_are_apart_and_off_other_marks(
    marks: list[tuple[float, float]], view: View, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, _ = marked(marks, view)
    plans = tuple(f"DP {n} · ZeRO-{n % 3 + 1} · {n}/12 blocks recomputed" for n in range(len(data)))
    monkeypatch.setattr(type(data.exploration), "names", plans)
    ends, wide = ranges(data, view), labels._NARROW_PX if narrow else labels.WIDE_PX
    x = labels._pixels(data.axes.x.values, ends[0], wide, log=view.log_x)
    y = labels._pixels(data.axes.y.values, ends[1], labels.HIGH_PX, log=view.log_y)
    texts = {row: said for row, said in named(data, view, narrow=narrow).items() if said[0]}
    boxes = {row: labels.box(x[row], y[row], place, text) for row, (text, place) in texts.items()}
    for (a, b, m), (c, d, n) in itertools.combinations(boxes.values(), 2):
        assert b <= c or d <= a or abs(m - n) >= labels.LINE_PX
    for row, (left, right, middle) in boxes.items():
        if texts[row][0] == "knee":  # which is said even where all is full
            continue
        assert 0 <= left < right <= wide
        assert 0 <= middle <= labels.HIGH_PX
        if not data.by_planners[row]:
            over = [m for m in np.flatnonzero(data.by_planners)
                    if left < x[m] < right and abs(y[m] - middle) < labels.LINE_PX / 2]  # fmt: skip
            assert not over
    assert any("ZeRO" in text for text, _ in texts.values()) or len(marks) > 6


def test_a_name_is_said_once_along_the_line() -> None:
    """All points of this frontier are of plans with one name, which the knee has."""
    data, marks = marked([], VIEW)
    found = labels.Labels(data, VIEW, ranges(data, VIEW))
    assert found.of_knee(marks)[0] == "knee: DP 2×4"
    assert found.of_bends(np.flatnonzero(data.on_frontier), marks) == {}
