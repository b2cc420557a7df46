"""The figures of the fidelity benchmark, worked out by hand."""

from __future__ import annotations

import pytest

from tests.benchmarks.fidelity.bench_fidelity import evenly
from tests.benchmarks.fidelity.report import error, kendall, markdown, picture, spread, summary


def row(predicted: float, first: float, second: float, memory: tuple[float, float] = (99, 100)) -> dict:
    return {
        "point": 0, "mesh": "2", "micro_batches": 1,
        "time_predicted_s": predicted, "time_measured_s": [first, second],
        "network_predicted_s": 0.0, "network_measured_s": [0.0, 0.0],
        "memory_predicted_bytes": memory[0], "memory_measured_bytes": memory[1],
    }  # fmt: skip


def test_plans_are_spaced_evenly_and_both_ends_are_in():
    assert evenly(4, 10) == [0, 1, 2, 3]
    assert evenly(19, 10) == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]
    assert len(evenly(1000, 10)) == 10


def test_errors_are_against_the_mean_of_the_halves():
    assert error(1.1, [0.9, 1.1]) == pytest.approx(0.1)
    assert spread([0.9, 1.1]) == pytest.approx(0.1)
    assert error(0.0, [0.0, 0.0]) == 0.0


def test_tau_leaves_out_pairs_within_the_noise():
    rows = [row(1.0, 1.0, 1.0), row(2.0, 2.0, 2.0), row(1.9, 2.05, 2.05)]
    assert kendall(rows, noise=0.0) == (pytest.approx(1 / 3), 3)
    assert kendall(rows, noise=0.05) == (1.0, 2)
    assert kendall(rows, noise=1.0) == (None, 0)
    assert kendall(rows) == (pytest.approx(1 / 3), 3)


def test_tau_of_all_pairs_counts_what_the_noise_hides_and_ties():
    rows = [row(1.0, 1.0, 1.0), row(2.0, 1.0, 1.0), row(3.0, 3.0, 3.0)]
    assert kendall(rows, noise=0.0) == (1.0, 2)
    assert kendall(rows) == (pytest.approx(2 / 3), 3)
    found = summary([row(2.0, 1.0, 1.2), row(1.0, 1.2, 1.0), row(0.5, 1.3, 1.1)])
    assert (found["tau"], found["tau_pairs"]) == (None, 0)
    assert (found["tau_all"], found["tau_all_pairs"]) == (pytest.approx(-2 / 3), 3)


def test_reports_hold_every_plan_and_say_whose_figures_are_whose():
    rows = [row(1.0, 1.0, 1.1), row(3.0, 2.0, 2.1)]
    taken = {"commit": "c", "processor": "P", "load": 1.0, "stolen": 0.0, "seconds": 9.0}
    one = {"model": "RNN", "source": "zoo:x", "settings": {}, "points": 7, "rows": rows, "taken": taken}
    one |= summary(rows)
    data = {"date": "d", "machine": {"cores": 2}, "cluster": "local:2", "optimizer": "adam", "results": [one]}
    text = markdown(data)
    assert "2 of 7" in text
    assert "7.16 %" in text  # theirs
    assert "cores 2" in text
    assert picture(data).count('r="4"') == 2 + 1  # the plans and their key
