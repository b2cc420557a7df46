"""Lines through times of messages, worked out by hand.

What coming from work to a collective and going back costs: from stamps of ranks, and as it is saved.
"""

from __future__ import annotations

import json
import math

import pytest

from tensoropt.profiling.link_fits import LinkFit, Segment, Transition, _transition_of_group, fit_segments
from tensoropt.profiling.link_timing import Turns

FOUND = Transition(
    works_s=(0.0, 1e-3, 4e-3),
    sizes=(4096, 65536),
    arriving_s=((0.0, 0.0), (1e-4, 2e-4), (1e-4, 3e-4)),
    leaving_s=((0.0, 0.0), (1e-5, 2e-5), (1e-5, 4e-5)),
)


def test_what_is_saved_comes_back():
    assert Transition.from_dict(json.loads(json.dumps(FOUND.to_dict()))) == FOUND


def test_work_takes_as_long_as_the_slower_rank_of_each_block():
    """Ranks are slow by turns: 3 and 1 ms, then 1 and 3. Alone a block takes each 2 ms, in step all 3."""
    alone, turns = Turns(1, 0, 2), Turns(1, 4096, 2)
    ranks = []
    for first in (3e-3, 1e-3):
        second = 4e-3 - first
        by_itself = [(0.0, first, first), (first, 4e-3, 4e-3)]
        in_step = [(0.0, first, 3.1e-3), (3.1e-3, 3.1e-3 + second, 6.2e-3)]
        ranks.append([[by_itself, in_step, [(0.0, 0.0, 1e-4)] * 2]] * 4)
    plan = [alone, turns, Turns(0, 4096, 2)]
    transition = _transition_of_group([(plan, ranks)])
    assert transition.works_s == pytest.approx((0.0, 2e-3))
    assert transition.leaving_s[1][0] == pytest.approx(1e-3)
    assert transition.arriving_s[1][0] == pytest.approx(0.0, abs=1e-9)


def test_a_larger_message_bounds_the_time_of_a_smaller_one():
    """Noise has lifted the first time above the second: both are taken for 1 s, a flat line. The residual is
    against what was measured: 50 % and nothing."""
    (segment,), residual = fit_segments([1000, 1_000_000], [2.0, 1.0])
    assert (segment.alpha_s, segment.seconds_per_byte) == pytest.approx((1.0, 0.0))
    assert residual == pytest.approx(math.sqrt(0.5 * 0.5**2))


def test_between_two_lines_time_is_interpolated_and_never_falls():
    """1 s up to 100 bytes, from 300 bytes on 2 s and more; a line that begins below the first is lifted."""
    first = Segment(alpha_s=1.0, seconds_per_byte=0.0, up_to_bytes=100.0)
    second = Segment(alpha_s=1.7, seconds_per_byte=0.001, from_bytes=300.0)
    fit = LinkFit(kind="send", group=(0, 1), segments=(first, second), residual=0.0)
    assert [fit.time_s(n) for n in (0, 100, 150, 200, 300, 1300)] == pytest.approx([1, 1, 1.25, 1.5, 2, 3])
    lower = Segment(alpha_s=0.0, seconds_per_byte=0.001, from_bytes=300.0)
    fit = LinkFit(kind="send", group=(0, 1), segments=(first, lower), residual=0.0)
    assert [fit.time_s(n) for n in (200, 300, 900, 2000)] == pytest.approx([1, 1, 1, 2])
