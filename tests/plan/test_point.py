"""Points that others beat, where figures are equal but for rounding."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tensoropt.plan.point import SAME, Point, reduce_points

ROUNDING = 1e-15


def point(memory: float, time_s: float, planner: str = "frontier") -> Point:
    return Point.of(
        memory_bytes=memory, time_s=time_s, compute_s=time_s, communication_s=0.0, exposed_s=0.0,
        hidden_s=0.0, additive_memory_bytes=memory, additive_time_s=time_s,
        memory=(memory, 0.0, 0.0, 0.0, 0.0), space=0, collectives=(), sources={}, exact=False, gap=None,
        planner=planner,
    )  # fmt: skip


def test_a_leaner_plan_takes_the_place_of_a_point_that_is_faster_by_rounding():
    points = (point(1.0, 9.0), point(4.0, 2.0), point(5.0, 1.0))
    other = point(3.0, 2.0 * (1 + ROUNDING), "tofu")
    assert reduce_points([*points, other]) == (points[0], other, points[2])


def test_a_faster_plan_takes_the_place_of_a_point_that_is_leaner_by_rounding():
    points = (point(1.0, 9.0), point(4.0, 2.0))
    other = point(4.0 * (1 + ROUNDING), 1.5, "tofu")
    assert reduce_points([*points, other]) == (points[0], other)


def test_a_plan_that_differs_by_rounding_alone_does_not_come_in():
    points = (point(1.0, 9.0), point(4.0, 2.0))
    others = [point(4.0 * (1 - ROUNDING), 2.0, "tofu"), point(4.0, 2.0 * (1 - ROUNDING), "zero")]
    assert reduce_points([*points, *others]) == points


off = st.sampled_from((-ROUNDING, 0, ROUNDING))
costs = st.tuples(st.integers(1, 5), st.integers(1, 5), off, st.booleans())


@given(st.lists(costs, min_size=1, max_size=8), st.lists(costs, max_size=8))
def test_no_other_beats_what_remains(own, given_others):
    def made(cost: tuple[int, int, float, bool], planner: str) -> Point:
        memory, time_s, off, of_memory = cost
        return point(memory * (1 + off * of_memory), time_s * (1 + off * (not of_memory)), planner)

    points = reduce_points([made(c, "frontier") for c in own])
    others = [made(c, "tofu") for c in given_others]
    kept = reduce_points([*points, *others])
    for a, b in itertools.pairwise(kept):
        assert a.memory_bytes < b.memory_bytes
        assert a.time_s > b.time_s
    # Whatever was there before, something is as good, but for rounding.
    for p in (*points, *others):
        assert any(
            k.memory_bytes <= p.memory_bytes * (1 + 4 * SAME) and k.time_s <= p.time_s * (1 + 4 * SAME)
            for k in kept
        )
