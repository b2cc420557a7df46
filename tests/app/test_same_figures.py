"""The page, ``choose``, the CSV, the plan and Python recommend the same plan, and say the same of a point."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from pathlib import Path
from typing import Any

import pytest
from onnx_app import model_file
from tensoropt_app.library import READY_MADE, Library
from tensoropt_app.pages.result import points_table
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.operators import beside_rows, operator_rows
from tensoropt_app.views.plan import step_bar, step_rows
from tensoropt_app.views.point import point_card
from tensoropt_app.views.result import VERDICTS, answer_line, choices, two_digits

import tensoropt
from tensoropt.cli.parser import main
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.exploration.figure_rows import FigureRow, points_data
from tensoropt.plan.kinds import PLACED
from tensoropt.plan.plan import load_plan
from tensoropt.question.model_source import OnnxOptions
from tensoropt.report.detail import detail
from tensoropt.report.explain import _parts_table
from tensoropt.report.step_parts import Detail
from tensoropt.report.table import point_lines
from tensoropt.units import format_bytes
from tests.plan.explorations import csv_of

Found = tuple[Exploration, Path]


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """An ONNX file on two cards, with placed plans and ZeRO's beside the frontier."""
    folder = tmp_path_factory.mktemp("beside")
    model_file(folder / "net.onnx")
    net = tensoropt.load_model(str(folder / "net.onnx"), onnx=OnnxOptions.of({"batch": 64}, loss="auto"))
    found = tensoropt.compare(net, cluster="rtx-4090[2]", planners=["zero", "m_etf"], measure="never")
    found.save(folder / "out")
    return folder / "out"


@pytest.fixture(params=["gpt2-dgx-h100", "beside"])
def found(request):
    folder = request.getfixturevalue("beside") if request.param == "beside" else READY_MADE / request.param
    return loaded(folder), folder


@functools.cache
def loaded(folder: Path) -> Exploration:
    return load_exploration(folder)


@functools.cache
def detail_of(folder: Path, index: int) -> Detail:
    return detail(loaded(folder), index)


@functools.cache
def answer(*words: str) -> Any:
    """Return what a command says to machines."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*words, "--json"]) == 0
    return json.loads(out.getvalue())


def some(found: Exploration) -> list[int]:
    """A point between, and the last plan of another planner."""
    return [len(found.points) // 2, len(found.all_points) - 1]


def test_figures_per_operator_are_the_same(found):
    exploration, folder = found
    data = FrontierData.of(exploration)
    for index in some(exploration):
        told = detail_of(folder, index)
        page = operator_rows(exploration, index, data.units, told)
        shown = told.to_dict()["operators"]
        assert [row["group"] for row in page] == [row["group"] for row in shown]
        for mine, theirs in zip(page, shown, strict=True):
            seconds = {name: theirs[f"{name}_s"] for name in ("copies", "communication")}
            seconds["compute"] = theirs["forward_s"] + theirs["backward_s"]
            for name, of in seconds.items():
                assert mine[name] == pytest.approx(data.units.time.of(of), rel=6e-3, abs=1e-12)
        # They add up to the headline's, and every device's to its own.
        assert beside_rows(exploration, index, told)[-1].compute_s == pytest.approx(told.step.compute_s)


def test_figures_of_a_point_are_the_same(found, tmp_path):
    exploration, folder = found
    data, view = FrontierData.of(exploration), View()
    rows = csv_of(exploration, tmp_path)
    table = points_table(data, view)[0].rowData
    assert len(rows) == len(exploration.points)
    for index in some(exploration):
        point, number = exploration.all_points[index], ["--point", str(index + 1)]
        chosen = answer("choose", str(folder), *number, "--out", str(tmp_path / "plan.json"))
        plan = load_plan(tmp_path / "plan.json")
        card = point_card(data, view, index)
        shown = detail_of(folder, index).to_dict()["step"]
        assert shown["total_s"] == pytest.approx(point.time_s)
        assert chosen["time_s"] == plan.predicted.time_s == point.time_s
        assert chosen["memory_bytes"] == round(point.memory_bytes)
        assert plan.predicted.memory_bytes == point.memory_bytes
        wanted = (data.units.memory.text(exploration.needs[index]), data.units.time.text(point.time_s))
        assert (card.memory, card.time) == wanted
        shown_row = table[index]
        assert shown_row["needs"] == float(f"{data.units.memory.of(exploration.needs[index]):.4g}")
        assert shown_row["time"] == float(f"{data.units.time.of(point.time_s):.4g}")
        assert (shown_row["plan"], shown_row["fits"]) == (chosen["name"], chosen["fit"]["verdict"])
        if index < len(rows):
            row = rows[index]
            assert float(row["time_s"]) == point.time_s
            assert int(row["memory_bytes"]) == chosen["memory_bytes"]
            assert float(row["compute_s"]) == chosen["compute_s"] == pytest.approx(shown["compute_s"])
            assert row["name"] == chosen["name"] == card.name


def test_what_takes_the_time_is_the_same(found):
    exploration, folder = found
    data = FrontierData.of(exploration)
    for index in some(exploration):
        told = detail_of(folder, index)
        parts, page = told.parts, step_rows(told)
        assert sum(part.seconds for part in parts) == pytest.approx(exploration.all_points[index].time_s)
        assert (page[0][0], page[0][1]) == (parts[0].title, two_digits(parts[0].seconds))
        text = _parts_table(told.parts)
        assert all(title.strip() in text for title, _, _ in page)
        # The bar above has the same sums.
        bar = {segment.title: segment.share for segment in step_bar(data, index).segments}
        computing = sum(part.share for part in parts if part.key == "computation")
        assert bar["compute"] == pytest.approx(computing, abs=1e-6)


def test_what_a_rank_sends_is_said_everywhere(beside, tmp_path):
    """On two cards half of what is gathered or scattered leaves each, and all of a sum or message."""
    exploration = load_exploration(beside)
    written = csv_of(exploration, tmp_path)
    data, view = FrontierData.of(exploration), View()
    for row, point in enumerate(exploration.all_points):
        own = [(kind, size * count) for kind, _, size, count in point.collectives]
        if point.kind is not PLACED:
            whole = "all_reduce", "send", "broadcast"
            assert point.sent_bytes == sum(size * (1.0 if kind in whole else 0.5) for kind, size in own)
        words = format_bytes(point.sent_bytes)
        assert points_data(exploration, [row])[0]["sent_bytes"] == round(point.sent_bytes)
        assert f"  sent: {words}" in point_lines(FigureRow.of(exploration, row))
        assert ("sent", words) in [(f.name, f.words) for f in point_card(data, view, row).facts]
        assert row >= len(written) or int(written[row]["sent_bytes"]) == round(point.sent_bytes)
    assert max(point.sent_bytes for point in exploration.all_points) > 0


SHIPPED = sorted(folder.name for folder in READY_MADE.iterdir())
MARKS = {"fits": "fits", "tight": "tight", "does not fit": "over"}


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize("name", SHIPPED)
def test_one_plan_is_recommended_with_one_need_and_one_verdict(name, tmp_path):
    found = Library().load(name)
    data = FrontierData.of(found)
    chosen = answer("choose", str(READY_MADE / name))
    row = chosen["point"] - 1
    # The page as a link with nothing but the exploration opens it: the answer, the choices, the details.
    view = View(exploration=name)
    budgeted = data.answer(view)
    line, card = answer_line(data, view, budgeted, row), point_card(data, view, row)
    first = choices(data, view, budgeted, row)[0]
    needs, mark = data.units.memory.text(chosen["fit"]["needed_bytes"]), MARKS[chosen["fit"]["verdict"]]
    assert data.chosen(view) == row == chosen["answer"]["point"] - 1
    assert line.name == card.name == chosen["name"]
    assert line.mark == card.mark == first.mark == mark
    assert (line.verdict, line.needs.split(" of ")[0]) == (VERDICTS[mark], needs.split()[0])
    assert card.memory == first.needs == needs
    assert first.time == two_digits(chosen["time_s"])
    assert line.time.startswith(f"{first.time} a step")
    assert first.chosen
    assert "recommended" in first.title
    assert chosen["fit"]["needed_bytes"] == chosen["needs_bytes"] == found.needs[row]
    # In the CSV, which has every point of the frontier, ascending in memory.
    written = csv_of(found, tmp_path)
    assert len(written) == len(found.points)
    sizes = [int(line["memory_bytes"]) for line in written]
    assert sizes == sorted(sizes)
    for index, one in enumerate(written):
        fit = found.fit(index)
        assert int(one["needs_bytes"]) == fit.needed_bytes
        assert one["fits"] == {"fits": "yes", "tight": "tight", "does not fit": "no"}[fit.verdict]
    # What fits the device is within it, and what is chosen fits.
    assert chosen["fit"]["needed_bytes"] <= found.limit_bytes <= found.device_bytes
    assert chosen["fit"]["verdict"] != "does not fit"


@pytest.mark.parametrize("name", ["llama3-8b-8x24gib", "gpt2-dgx-h100"])
def test_a_longest_step_and_a_budget_choose_what_the_command_line_does(name):
    data = FrontierData.of(Library().load(name))
    times = sorted(data.time[data.line])
    for time_s in (times[len(times) // 2], times[-1] * 1.01):
        chosen = answer("choose", str(READY_MADE / name), "--time", repr(float(time_s)))
        assert data.chosen(View(name, time_s=float(time_s))) == chosen["point"] - 1
    low = float(data.needs.min()) * 1.05
    chosen = answer("choose", str(READY_MADE / name), "--memory", f"{low:.0f}")
    assert data.chosen(View(name, budget_bytes=float(f"{low:.0f}"))) == chosen["point"] - 1
