"""Lines through times of messages, worked out by hand."""

import math

import pytest

from tensoropt.profiling.link_fits import LinkFit, Segment, fit_segments


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
