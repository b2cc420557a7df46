"""The recommended plan, its need and its verdict are the same wherever a shipped exploration is asked."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from tensoropt_app.library import READY_MADE, Library
from tensoropt_app.state import View, opened
from tensoropt_app.views.answer import answer_words
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.point import point_card
from tensoropt_app.views.points_table import table_columns

from tensoropt.cli.parser import main
from tensoropt.exploration.export import write_frontier_csv
from tensoropt.units import parse_bytes

SHIPPED = sorted(folder.name for folder in READY_MADE.iterdir())
VERBS = {"fits": "Fits ", "tight": "Just fits ", "does not fit": "Does not fit "}


def asked(*words: str) -> Any:
    """What a command says to machines."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*words, "--json"]) == 0
    return json.loads(out.getvalue())


@pytest.mark.parametrize("name", SHIPPED)
def test_one_plan_is_recommended_with_one_need_and_one_verdict(name: str, tmp_path: Path) -> None:
    library = Library()
    found = library.load(name)
    data = FrontierData.of(found)
    chosen = asked("choose", str(READY_MADE / name))
    row = chosen["point"] - 1
    # The page as a link with nothing but the exploration opens it: the headline, the card.
    view = opened(View(exploration=name), data)
    words, card = answer_words(data, view), point_card(data, view, row)
    needs = data.units.memory.text(chosen["fit"]["needed_bytes"])
    assert view.point == row == chosen["answer"]["point"] - 1
    assert words.plan == chosen["name"]
    tight = " (tight)" if chosen["fit"]["verdict"] == "tight" else ""
    assert words.costs.startswith(f"{data.units.time.text(chosen['time_s'])} a step, {needs}{tight}, ")
    assert (card.memory, card.name) == (needs, chosen["name"])
    assert card.verdict.startswith(VERBS[chosen["fit"]["verdict"]])
    assert chosen["fit"]["needed_bytes"] == chosen["needs_bytes"] == found.needs[row]
    # In the CSV, which has every point of the frontier, ascending in memory.
    write_frontier_csv(found, tmp_path / "frontier.csv")
    with open(tmp_path / "frontier.csv", encoding="utf-8", newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(found.points)
    sizes = [int(line["memory_bytes"]) for line in written]
    assert sizes == sorted(sizes)
    greyed = table_columns(data, View())["fits"]
    for index, line in enumerate(written):
        fit = found.fit(index)
        assert int(line["needs_bytes"]) == fit.needed_bytes
        assert line["fits"] == {"fits": "yes", "tight": "tight", "does not fit": "no"}[fit.verdict]
        assert (
            (line["fits"] != "no") == bool(greyed[index]) == (point_card(data, View(), index).mark != "over")
        )
    # What fits the device is within it, and what is chosen fits.
    assert chosen["fit"]["needed_bytes"] <= found.limit_bytes <= found.device_bytes
    assert chosen["fit"]["verdict"] != "does not fit"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "memory"), [("llama3-8b-8x24gib", "24GiB"), ("llama3-70b-two-nodes", "80GiB")]
)
def test_a_budget_is_never_exceeded(name: str, memory: str) -> None:
    for more in ((), ("--fastest",)):
        chosen = asked("choose", str(READY_MADE / name), "--memory", memory, *more)
        assert chosen["needs_bytes"] <= parse_bytes(memory)
