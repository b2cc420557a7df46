"""Placed plans without their order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tensoropt.cli.parser import main
from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.placement import Placement, simulate_placement
from tensoropt.plan.kinds import PIPELINED, PLACED
from tensoropt.report.detail import step_of
from tensoropt.report.unordered import point_unordered
from tests.plan.explorations import small_exploration
from tests.planners.placed.placements import random_problem


def placed_points(found: Exploration) -> list[int]:
    return [index for index, point in enumerate(found.all_points) if point.kind is PLACED]


def test_both_steps_are_of_the_same_placement(staged: dict[str, Exploration]) -> None:
    found = staged[PLACED.name]
    for index in placed_points(found):
        unordered, point = point_unordered(found, index), found.all_points[index]
        assert (unordered.enforced_time_s, unordered.enforced_memory_bytes) == (
            point.time_s, point.memory_bytes,
        )  # fmt: skip
        # Every device computes the same; it waits for others longer, or less long.
        busy_s = max(step_of(found, index).evaluated.busy_s)
        assert busy_s * (1 - 1e-9) <= unordered.time_s < 3 * point.time_s
        assert unordered.change == pytest.approx(unordered.time_s / point.time_s - 1)
        assert unordered.fits


@pytest.mark.parametrize(("seed", "slower"), [(5, False), (6, True)])
def test_the_step_without_an_order_is_another_step(
    seed: int, slower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process takes beside tensors is added to both, and no device has more than the planned peak."""
    problem = random_problem(seed)
    in_turn = Placement.in_order([number % 3 for number in range(len(problem.names))], 3)
    most = simulate_placement(problem, in_turn).memory_bytes
    devices = replace(problem.devices, capacity_bytes=np.full(3, most))
    ordered = simulate_placement(replace(problem, devices=devices), in_turn)
    point = SimpleNamespace(kind=PLACED, time_s=ordered.time_s, memory_bytes=most + 100.0)
    monkeypatch.setattr(
        "tensoropt.report.unordered.step_of", lambda *_: SimpleNamespace(point=point, evaluated=ordered)
    )
    found = point_unordered(small_exploration(), 0)
    free = simulate_placement(problem, in_turn, enforced=False)
    assert (found.time_s, found.memory_bytes) == (free.time_s, free.memory_bytes + 100.0)
    assert (found.change > 0) == slower
    assert found.change != 0
    assert found.fits == (free.memory_bytes <= most)
    assert ("which a device does not have" in found.lines()[1]) != found.fits


def test_only_placed_plans_have_an_order_of_their_own(staged: dict[str, Exploration]) -> None:
    found = staged[PLACED.name]
    placed = placed_points(found)
    other = next(index for index in range(len(found.points)) if index not in placed)
    with pytest.raises(
        TensorOptError,
        match=rf"point {other + 1} is a sharded plan; choose one of the placed points: {placed[0] + 1}",
    ):
        point_unordered(found, other)
    with pytest.raises(
        TensorOptError, match="is a pipeline; no point here is: explore with --placements always"
    ):
        point_unordered(staged[PIPELINED.name], 0)


def test_show_has_it_in_words_and_as_data(
    staged: dict[str, Exploration], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = staged[PLACED.name]
    found.save(tmp_path / "out")
    index = placed_points(found)[0]
    asked = ["show", str(tmp_path / "out"), "--point", str(index + 1), "--unordered"]
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unordered"] == point_unordered(found, index).to_dict()
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "in its order: " in out
    assert "every device taking what is ready first: " in out
    assert main(asked[:-1]) == 0
    assert "in its order" not in capsys.readouterr().out
