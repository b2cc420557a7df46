"""Tables beside papers': every row is shown, and is of a model that is measured."""

from __future__ import annotations

from tests.benchmarks.papers import placing
from tests.benchmarks.papers.authors import ITERATIONS, SEARCHES
from tests.benchmarks.papers.figure6 import MODELS


def test_a_quick_comparison_with_fastt_has_all_its_tables() -> None:
    rows = [*placing.scaling(quick=True)]
    text = placing.markdown({"rows": rows, "date": "d", "machine": {}})
    strong, weak = rows
    assert (strong["batch"], weak["batch"]) == (32, 32 * strong["devices"])
    for row in (strong, weak):
        assert f"| lenet | {row['scaling']} | 2 | {row['batch']} |" in text


def test_papers_figures_are_of_the_models_that_are_measured() -> None:
    assert set(SEARCHES) <= set(MODELS)
    assert all(steps.plan < steps.data_parallel for steps in ITERATIONS.values())
