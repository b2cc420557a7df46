"""Whose a saved point's memory is at a moment of its step, for every kind of plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import load_exploration
from tensoropt.plan.kinds import PIPELINED, PLACED
from tensoropt.report.detail import detail
from tensoropt.report.owners import PointOwners, _until_words, point_owners
from tensoropt.units import format_bytes, format_seconds

SHIPPED = Path(__file__).parents[2] / "app" / "data" / "gpt2-dgx-h100"


@pytest.fixture(scope="module")
def shipped():
    return load_exploration(SHIPPED)


@pytest.fixture(scope="module")
def of_shipped(shipped):
    return point_owners(shipped, 0)


def check(told: PointOwners, step: int = 1) -> None:
    """At every moment the owners are the height of the curve, kind by kind."""
    for number in {*range(0, len(told.curve), step), told.peak}:
        at = told.at(number)
        assert sum(row.bytes for row in at.rows) == at.at.total
        for kind in ("parameters", "gradients", "optimizer", "kept", "transient"):
            found = sum(row.bytes for row in at.rows if row.kind == kind)
            assert found == getattr(at.at, kind), (number, kind)


def test_of_a_sharded_plan_they_add_up_to_the_curve_of_its_detail(shipped, of_shipped):
    assert of_shipped.curve == detail(shipped, 0).memory_curve
    check(of_shipped, 211)
    assert not of_shipped.note


def test_at_the_peak_by_default(shipped, of_shipped):
    at = of_shipped.at()
    assert (at.at, at.at.total) == (detail(shipped, 0).peak, shipped.points[0].tensor_bytes)
    assert at.rows[0].operator == "cross_entropy_loss"


def test_of_a_placed_plan_too(staged):
    placed = staged[PLACED.name]
    carrying = [i for i, point in enumerate(placed.all_points) if point.kind is PLACED]
    told = point_owners(placed, carrying[0])
    assert told.curve == detail(placed, carrying[0]).memory_curve
    check(told)
    whats = {row.what for number in range(len(told.curve)) for row in told.at(number).rows}
    assert {"parameter", "gradient", "activation"} <= whats
    assert {"workspace of backward", "saved inside for backward"} <= whats


def test_of_a_pipeline_by_stage_and_micro_batch(staged):
    pipelines = staged[PIPELINED.name]
    index = max(range(len(pipelines.points)), key=lambda i: pipelines.plan(i).micro_batches)
    told = point_owners(pipelines, index)
    check(told)
    assert told.note == PIPELINED.owners
    rows = [row for number in range(len(told.curve)) for row in told.at(number).rows]
    # The largest tensors of every micro-batch by name.
    assert {"micro-batch 0", "micro-batch 3"} <= {row.tensor.rpartition(", ")[2] for row in rows}
    assert {"saved inside for backward", "workspace"} <= {row.what for row in rows}
    assert all(row.operator.startswith("stage ") or row.tensor == "messages" for row in rows)


def test_no_such_point_or_moment(shipped, of_shipped):
    count = len(shipped.all_points)
    with pytest.raises(TensorOptError, match=f"there is no point 1000; there are points 1 to {count}"):
        point_owners(shipped, 999)
    with pytest.raises(TensorOptError, match="there is no moment -1; the memory curve has moments 0 to"):
        of_shipped.at(-1)


def test_lines_for_a_terminal_list_the_largest_and_sum_the_rest(of_shipped):
    at = of_shipped.at()
    lines = at.lines(3)
    peak = of_shipped.curve[of_shipped.peak]
    head = f"memory at {format_seconds(peak.time_s)}: {format_bytes(peak.total)}"
    assert lines[0].startswith(head)
    assert len(lines) == 6
    assert lines[2].split()[:4] == ["785", "MiB", "transient", "cross_entropy_loss"]
    assert f"{len(at.rows) - 3} more" in lines[-1]
    assert _until_words(at.rows[2]) == "stays"
    assert at.to_dict()["total_bytes"] == at.at.total
