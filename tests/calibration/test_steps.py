"""Seconds of steps and collectives, worked out by hand."""

from __future__ import annotations

from tensoropt.calibration.steps import seconds_of


def test_a_collective_counts_from_the_rank_that_comes_last():
    one = {"steps": [(0.0, 9.0)], "collectives": [[("reduce", 1.0, 4.0), ("gather", 5.0, 6.0)]]}
    other = {"steps": [(0.5, 8.0)], "collectives": [[("reduce", 3.0, 4.5), ("gather", 5.0, 7.0)]]}
    assert seconds_of([one, other]) == ([8.5], [{"reduce": 1.5, "gather": 2.0}])
