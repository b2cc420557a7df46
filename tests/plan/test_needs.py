"""What plans need: a column, and of one point its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensoropt import Point, load_cluster
from tensoropt.costs.device_fit import _ALLOCATOR_SHARE, _DRIVER_SHARE
from tensoropt.exploration.exploration import Exploration, load_exploration
from tests.plan.explorations import MIB, point, small_exploration

GIB = 2.0**30
FOUND = small_exploration()
GPUS = load_cluster("rtx-4090").to_dict()


def counted(memory: float, time_s: float) -> Point:
    """A point whose memory counts a process."""
    terms = {"context": 400 * MIB, "segments": 22 * MIB, "communicators": 100 * MIB, "constants": 5 * MIB}
    made = point(memory + sum(terms.values()), time_s, 0, terms=terms)
    return made.changed(memory=(memory, 0.0, 0.0, 0.0, 0.0))


def test_a_counted_process_is_taken_without_its_unused_segments():
    found = replace(FOUND, cluster=GPUS, points=(counted(GIB, 1.0),))
    tensors = GIB + 5 * MIB
    needs = tensors * (1 + _ALLOCATOR_SHARE) + 500 * MIB + _DRIVER_SHARE * 24 * GIB
    assert found.needs.tolist() == [round(needs)]


def test_on_cpu_ranks_plans_need_their_memory():
    found = replace(FOUND, cluster=load_cluster("cpu:2").to_dict())
    assert found.needs.tolist() == [p.memory_bytes for p in found.points]
    assert FOUND.needs.tolist() == [p.memory_bytes for p in FOUND.points]  # nothing is known of devices


@pytest.mark.parametrize("saved", [False, True])
def test_the_column_has_what_each_point_needs(saved, tmp_path):
    """Also where a process is estimated from what a point sends, of points in memory and in a file."""
    sending = point(30 * MIB, 0.15, 0, collectives=(("all_to_all", (0,), 64, 2), ("send", (0,), 8, 9)))
    points = (*FOUND.points[:2], sending, FOUND.points[3], counted(GIB, 0.1))
    found = replace(FOUND, cluster=GPUS, points=points)
    if saved:
        found.save(tmp_path / "saved")
        found = load_exploration(tmp_path / "saved")
    assert isinstance(found, Exploration)
    assert found.needs.tolist() == [found.fit(row).needed_bytes for row in range(len(found.points))]
    assert found.needs[2] > found.needs[1] + 50 * MIB


def test_a_limit_is_the_explorations_budget_or_the_usual_share_of_a_device():
    found = replace(FOUND, cluster=GPUS)
    assert found.limit_bytes == pytest.approx(0.95 * 24 * GIB)
    assert replace(found, settings={**found.settings, "memory_bytes": 30 * GIB}).limit_bytes == 24 * GIB
    assert (found.verdict(0), found.verdict(0, found.needs[0])) == ("fits", "tight")
    assert found.verdict(0, found.needs[0] - 1) == "does not fit"


def test_the_knee_is_one_of_what_fits():
    found = replace(FOUND, cluster=GPUS)
    assert (found.within(found.needs[1]).tolist(), found.knee_within(found.needs[0])) == ([0, 1], 0)
    assert found.knee_within(0.0) == found.knee
