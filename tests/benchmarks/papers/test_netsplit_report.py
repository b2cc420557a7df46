"""Ours over the best baseline, beside the thesis."""

from __future__ import annotations

from tests.benchmarks.papers.netsplit_report import BASELINES, CASES, markdown, ratios


def rows(model: str, ours_s: float, baseline_s: float, bound_s: float) -> dict:
    """Steps of one model: a baseline that refuses, others of which the last is the best, and ours."""
    about = {"section": "steps", "model": model, "batch": CASES[model].batch, "bound_s": bound_s}
    found = [{**about, "key": "0", "planner": BASELINES[0], "refused": "too large"}]
    for number, name in enumerate(BASELINES[1:]):
        took = {"time_s": baseline_s + 2 - number, "search_s": 1.0, "notes": ()}
        found.append({**about, "key": name, "planner": name, **took})
    found.append(
        {**about, "key": "own", "planner": "netsplit", "time_s": ours_s, "search_s": 1.0, "notes": ()}
    )
    return {"rows": found, "date": "2026-01-01", "machine": {"cores": 2}}


def test_the_thesis_ratios_are_those_of_its_table():
    assert {title: [row[7:9] for row in ratios(rows(title, 1.0, 2.0, 0.5), "steps")] for title in CASES} == {
        "AmoebaNet-D": [["1.147", "0.886"]],
        "Wide ResNet-152": [["1.064", "0.962"]],
        "U-Net": [["1.044", "0.940"]],
        "DeepLab-V3": [["1.137", "0.939"]],
    }


def test_a_cell_is_reached_from_the_thesis_ratio_on():
    """U-Net: 1.044 in samples, 0.940 in seconds, which is 1.064."""
    for ratio, reached in ((1.04, "no"), (1.05, "samples/s"), (1.07, "samples/s and seconds")):
        [row] = ratios(rows("U-Net", 1.0, ratio, 0.9), "steps")
        assert row[1] == "m-SCT"
        assert row[2] == f"{ratio:.3f}"
        assert row[4] == f"{ratio / 0.9:.3f}"
        assert row[-1] == reached


def test_a_part_of_the_table_can_be_written():
    data = rows("U-Net", 1.0, 2.0, 0.5)
    data["rows"] = data["rows"][:1]
    assert not list(ratios(data, "steps"))
    assert "| U-Net | 128 | 24 GiB | here | refuses |" in markdown(data)
