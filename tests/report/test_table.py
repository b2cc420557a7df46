"""What a person reads of an exploration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tensoropt import Exploration, load_cluster
from tensoropt.cluster import job_spread
from tensoropt.exploration.facts import facts
from tensoropt.exploration.figure_rows import FigureRow
from tensoropt.exploration.frontier_table import frontier_text
from tensoropt.exploration.time_range import UNLIKE, range_of
from tensoropt.ops.registry import is_dense_transformer
from tensoropt.plan.graph_facts import GraphFacts
from tensoropt.plan.plan import ModelInfo
from tensoropt.report.table import point_lines, summary_lines, timing_words
from tests.plan.explorations import MIB, point, small_exploration


def test_the_table_marks_ends_and_knee():
    lines = frontier_text(small_exploration()).splitlines()
    assert "needs/MiB" in lines[0]
    assert "time/ms" in lines[0]
    assert lines[1].endswith("leanest")
    assert lines[2].endswith("knee")
    assert lines[4].endswith("fastest, recommended")
    assert "within 1 %" in lines[3]
    assert "measured 75 %, data sheet 25 %" in lines[1]
    assert len({line.index("measured") for line in lines[1:]}) == 1


def test_many_points_are_thinned():
    found = small_exploration()
    many = tuple(point((10 + i) * MIB, 1.0 / (1 + i) ** 2, 0) for i in range(300))
    found = replace(found, points=many)
    assert "30 of 300 points; all: tensoropt export DIR --csv FILE" in frontier_text(found)


def test_the_summary_names_what_has_no_rule():
    text = "\n".join(summary_lines(small_exploration()))
    assert "aten.odd" in text
    assert "note: a note" not in text
    assert "nothing was timed" in text


@pytest.mark.parametrize(("report", "measure", "said"), [
    ({}, "all", "nothing was timed: T4 is not here; figures come from data sheets"),
    ({}, "never", "nothing was timed: timing was refused (--measure never); figures come from data sheets"),
    ({"workloads_measured": 3, "timed_now": False, "fit": [{"cls": "norm"}]}, "never",
     "nothing was timed: timing was refused (--measure never); figures come from the profile store, "
     "with timings of 3 distinct workloads and a fit to the profile store's timings"),
    ({"fit": [{"cls": "norm"}]}, "all", "nothing was timed: T4 is not here; figures come from a fit"),
    ({"workloads_measured": 3, "median_spread": 0.041, "failed_measurements": 1}, "all",
     "timed: 3 distinct workloads, median spread 4 %, 1 failed, see the notes"),
])  # fmt: skip
def test_where_nothing_was_timed_the_true_reason_is_said(report, measure, said):
    found = small_exploration()
    found = replace(
        found,
        report={**found.report, "device": "T4", **report},
        settings={**found.settings, "measure": measure},
    )
    assert timing_words(found).startswith(said)


def test_a_point_in_words():
    text = "\n".join(point_lines(FigureRow.of(small_exploration(), 1)))
    assert "12 MiB per device, 200 ms per step" in text
    assert "parameters 6 MiB" in text


def like_published_jobs(**changes: Any) -> Exploration:
    """An exploration of a dense transformer in 16 bits on GPUs, or of something else."""
    targets = changes.pop("targets", ("aten.linear.default", "aten.scaled_dot_product_attention.default"))
    small = small_exploration()
    settings = {**small.settings, "dtype": "bfloat16"}
    found = replace(small, cluster=load_cluster("dgx-a100[2]").to_dict(), settings=settings)
    found = replace(found, **changes)
    dense = targets is not None and is_dense_transformer(targets)
    found.__dict__["graph_facts"] = GraphFacts(dense_transformer=dense)
    return found


def test_a_time_from_data_sheets_of_gpus_has_the_range_of_jobs_like_it():
    found = like_published_jobs()
    (line, *_) = point_lines(FigureRow.of(found, 1))
    assert "200 ms per step (" in line
    assert line.endswith(" for 80 % of published jobs)")
    spread, told = job_spread(), range_of(found, 1)
    # A quarter of its seconds are from data sheets.
    assert told.low_s == pytest.approx(0.2 * (1 + (spread.well_tuned - 1) / 4))
    assert told.high_s == pytest.approx(0.2 * (1 + (spread.slow - 1) / 4))
    assert line.endswith(f"({told.words})")
    assert facts(FigureRow.of(found, 1))["range"].words.startswith(told.words)


UNPUBLISHED: dict[str, dict[str, Any]] = {
    "convolutions": {"targets": ("aten.conv2d.default", "aten.scaled_dot_product_attention.default")},
    "experts": {"targets": ("expert_kernels.experts", "aten.scaled_dot_product_attention.default")},
    "no attention": {"targets": ("aten.linear.default",)},
    "unknown": {"targets": None},
    "float32": {"settings": {"optimizer": "adam", "mode": "train", "dtype": "float32"}},
    "inference": {
        "model": ModelInfo(source="zoo:toy", fingerprint="f" * 64, parameters=100, mode="inference")
    },
    "host-bound": {"points": (point(9 * MIB, 0.2, 1, host_s=0.21, idle_s=0.1),) * 2},
    "measured": {"points": (point(9 * MIB, 0.2, 1, sources={"measured": 1.0}),) * 2},
    "no GPUs": {"cluster": {"name": "toy"}},
}


@pytest.mark.parametrize("changes", UNPUBLISHED.values(), ids=UNPUBLISHED.keys())
def test_a_time_that_no_published_job_is_like_has_none(changes):
    found = like_published_jobs(**changes)
    assert range_of(found, 1) is None
    predicted = "cluster" not in changes and found.points[1].sources.get("data sheet", 0.0) > 0
    assert point_lines(FigureRow.of(found, 1))[0].endswith(f" ({UNLIKE})" if predicted else " per step")
    assert "range" not in facts(FigureRow.of(found, 1))
