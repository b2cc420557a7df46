"""The recommended plan, its need and its verdict are the same wherever a shipped exploration is asked."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest
from tensoropt_app.library import READY_MADE, Library
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.point import point_card
from tensoropt_app.views.result import VERDICTS, answer_line, choices, two_digits

from tensoropt.cli.parser import main
from tests.plan.explorations import csv_of

SHIPPED = sorted(folder.name for folder in READY_MADE.iterdir())
MARKS = {"fits": "fits", "tight": "tight", "does not fit": "over"}


def asked(*words: str) -> Any:
    """What a command says to machines."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*words, "--json"]) == 0
    return json.loads(out.getvalue())


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize("name", SHIPPED)
def test_one_plan_is_recommended_with_one_need_and_one_verdict(name, tmp_path):
    found = Library().load(name)
    data = FrontierData.of(found)
    chosen = asked("choose", str(READY_MADE / name))
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
        chosen = asked("choose", str(READY_MADE / name), "--time", repr(float(time_s)))
        assert data.chosen(View(name, time_s=float(time_s))) == chosen["point"] - 1
    low = float(data.needs.min()) * 1.05
    chosen = asked("choose", str(READY_MADE / name), "--memory", f"{low:.0f}")
    assert data.chosen(View(name, budget_bytes=float(f"{low:.0f}"))) == chosen["point"] - 1
