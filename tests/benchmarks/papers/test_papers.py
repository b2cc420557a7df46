"""Tables beside papers': every row is shown, and pictures have the figures of their files."""

from __future__ import annotations

import csv

from tests.benchmarks.charts import Chart, figure
from tests.benchmarks.machine import RESULTS
from tests.benchmarks.papers import placing
from tests.benchmarks.papers.authors import ITERATIONS, SEARCHES
from tests.benchmarks.papers.figure6 import MODELS, parts


def test_a_quick_comparison_with_fastt_has_all_its_tables() -> None:
    rows = [*placing.scaling(quick=True)]
    text = placing.markdown({"rows": rows, "date": "d", "machine": {}})
    strong, weak = rows
    assert (strong["batch"], weak["batch"]) == (32, 32 * strong["devices"])
    for row in (strong, weak):
        assert f"| lenet | {row['scaling']} | 2 | {row['batch']} |" in text


def test_dotted_lines_are_the_parts_of_the_kept_steps() -> None:
    newest = max((RESULTS / "papers").glob("*-figure6-VGG16.csv"))
    with newest.open(encoding="utf-8", newline="") as file:
        points = list(csv.DictReader(file))
    found = parts(newest)
    assert {name: len(line) for name, line in found.items()} == {
        "computing": len(points),
        "collectives": len(points),
    }
    assert found["computing"][-1][1] == 1e3 * float(points[-1]["compute_s"])


def test_dotted_lines_are_drawn() -> None:
    line = [(1.0, 2.0), (2.0, 1.0)]
    plain, dotted = (figure([Chart("a", "x", "y", {"line": line}, dotted=d)]) for d in ({}, {"part": line}))
    assert "stroke-dasharray" not in plain
    assert dotted.count('stroke-dasharray="2 3"') == 2  # the line and its key


def test_papers_figures_are_of_the_models_that_are_measured() -> None:
    assert set(SEARCHES) <= set(MODELS)
    assert all(steps.plan < steps.data_parallel for steps in ITERATIONS.values())
