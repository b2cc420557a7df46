"""Limits of partial strategies against the rule that they follow, corner by corner and line by line."""

from __future__ import annotations

import numpy as np
import pytest

from tensoropt.search.engine import BREAKPOINTS, breakpoints, corners_of, envelope, fill_limits, least_time
from tensoropt.search.hull import SLACK, Hull
from tests import naive


class Entry:
    """Random partial strategies of an entry, what can complete them, and a staircase of known strategies."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self.partial = self._cloud(rng, int(rng.integers(1, 200)))
        self.outside_points = self._cloud(rng, int(rng.integers(1, 200)))
        lines = int(rng.integers(3, 12))
        angles = np.sort(rng.uniform(0.0, np.pi / 2, lines - 2))
        self.weight_m = np.concatenate([[1.0], np.cos(angles), [0.0]])
        self.weight_t = np.concatenate([[0.0], np.sin(angles), [1.0]])
        self.inside, self.outside = (self._least(c) for c in (self.partial, self.outside_points))
        steps, reach = int(rng.integers(1, 60)), int(rng.integers(2000, 5000))
        memory = np.sort(rng.choice(reach, steps, replace=False)).astype(float)
        time = np.sort(rng.choice(reach, steps, replace=False))[::-1].astype(float)
        ends = int(rng.integers(4))
        self.corner_m = np.append(memory, np.inf) if ends & 1 else memory
        self.corner_t = np.append(time, time[-1] / 2) if ends & 1 else time
        if ends & 2:
            self.corner_m = np.append(memory[0] / 2, self.corner_m)
            self.corner_t = np.append(np.inf, self.corner_t)

    @staticmethod
    def _cloud(rng, count):
        """Whole costs, as all snapped ones are multiples of a grid: their sums are exact."""
        memory = rng.integers(0, 1000, count)
        return np.stack([memory, 1000 - memory + rng.integers(0, 500, count)], axis=1).astype(float)

    def _least(self, cloud):
        return (cloud[:, :1] * self.weight_m + cloud[:, 1:] * self.weight_t).min(axis=0)

    @property
    def corners(self):
        return list(zip(self.corner_m.tolist(), self.corner_t.tolist(), strict=True))

    def limits(self, memories):
        scratch = [np.empty(len(self.weight_m)) for _ in range(3)]
        found = np.empty(len(memories))
        fill_limits(
            self.outside, self.corner_m, self.corner_t, self.weight_m, self.weight_t, *scratch,
            memories, found, np.empty((64, 4), np.int64),
        )  # fmt: skip
        return found

    def breakpoints(self):
        found = np.empty(BREAKPOINTS)
        scratch = [np.empty(len(self.weight_m)) for _ in range(3)]
        lines = self.weight_m, self.weight_t
        breakpoints(self.inside, self.outside, self.corner_m, *lines, *scratch, found)
        return found


SEEDS = range(120)


@pytest.mark.parametrize("part", range(4))
def test_the_limit_is_the_best_corner_less_the_least_completion(part):
    for seed in SEEDS[part::4]:
        entry = Entry(seed)
        reach = float(entry.corner_m[np.isfinite(entry.corner_m)].max(initial=0.0))
        corners = np.sort(np.append(entry.corner_m[entry.corner_m < np.inf], reach / 3))
        for memories in (entry.breakpoints(), corners):
            found = entry.limits(memories)
            want = naive.limits(memories, entry.corners, entry.outside, entry.weight_m, entry.weight_t, SLACK)
            assert found == pytest.approx(np.array(want), rel=1e-13, abs=1e-9), seed
            assert (np.diff(found[np.isfinite(found)]) <= 0).all()


def test_what_reaches_a_corner_is_within_the_limit():
    """Partial strategies that with some completion lie exactly on a corner."""
    for seed in SEEDS:
        entry = Entry(seed)
        for u_m, u_t in entry.corners:
            if not np.isfinite(u_m + u_t):
                continue
            for m, t in entry.outside_points[:5]:
                if u_m < m or u_t < t:
                    continue
                limit = entry.limits(np.array([u_m - m]))[0]
                assert limit >= u_t - t, seed


def test_a_corner_that_no_memory_is_left_for_gives_no_room():
    """One completion, of 10 bytes and 5 s; corners at (30, 20) and (40, 12)."""
    entry = Entry(0)
    entry.weight_m, entry.weight_t = np.array([1.0, 0.5, 0.0]), np.array([0.0, 0.5, 1.0])
    entry.outside_points = np.array([[10.0, 5.0]])
    entry.outside = entry._least(entry.outside_points)
    entry.corner_m, entry.corner_t = np.array([30.0, 40.0]), np.array([20.0, 12.0])
    found = entry.limits(np.array([0.0, 19.9, 20.0, 20.05, 20.3, 30.0, 30.01, 31.0]))
    assert found.tolist()[:6] == pytest.approx([15, 15, 15, 7, 7, 7])
    assert found.tolist()[6:] == [-np.inf, -np.inf]


def test_breakpoints_ascend_from_the_least_memory_to_the_most_useful():
    for seed in SEEDS:
        entry = Entry(seed)
        found = entry.breakpoints()
        least = entry.inside[0] / entry.weight_m[0]
        most = max([least, *(m - entry.outside[0] for m in entry.corner_m if m < np.inf)])
        assert (np.diff(found) >= 0).all(), seed
        assert found[0] == least
        assert found[-1] <= most
        half = BREAKPOINTS // 2
        even = least + (most - least) * np.arange(half) / half
        assert np.isin(even, found).all(), seed


def test_breakpoints_lie_at_even_steps_of_the_least_time():
    for seed in SEEDS:
        entry = Entry(seed)
        lines = len(entry.weight_m)
        slope, level, start = (np.empty(lines) for _ in range(3))
        size = envelope(entry.inside, entry.weight_m, entry.weight_t, slope, level, start)
        found = entry.breakpoints()
        least = entry.inside[0] / entry.weight_m[0]
        most = max([least, *(m - entry.outside[0] for m in entry.corner_m if m < np.inf)])
        heights = [least_time(x, size, slope, level, start) for x in (least, most)]
        times = np.array([least_time(x, size, slope, level, start) for x in found])
        half = BREAKPOINTS // 2
        for i in range(half):
            goal = heights[0] + (heights[1] - heights[0]) * (i + 0.5) / half
            assert np.isclose(times, goal, rtol=1e-9, atol=1e-6).any(), (seed, i)


@pytest.mark.parametrize("most", [8, 40, 300])
@pytest.mark.parametrize("ends", [(1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (0.5, 0.5)])
def test_coarser_corners_leave_room_for_all_that_finer_ones_do(most, ends):
    """Whatever lies below a corner lies below one of those that stand for it."""
    rng = np.random.default_rng(most)
    memory = np.sort(rng.choice(100_000, 1000, replace=False)).astype(float) + 1
    time = np.sort(rng.choice(100_000, 1000, replace=False))[::-1].astype(float) + 1
    values = np.array([memory[0] * ends[0], 100.0, time[-1] * ends[1]])
    hull = Hull(np.array([1.0, 0.5, 0.0]), np.array([0.0, 0.5, 1.0]), values, memory, time, ())
    fine, coarse = (corners_of(hull, memory, time, count) for count in (10**6, most))
    assert len(fine.memory) == 999 + (ends[0] < 1) + (ends[1] < 1)
    assert 2 <= len(coarse.memory) <= most + 2
    for m, t in zip(fine.memory, fine.time, strict=True):
        assert ((coarse.memory >= m) & (coarse.time >= t)).any()
    for m, t in zip(coarse.memory, coarse.time, strict=True):  # and none stands for nothing
        assert (fine.memory == m).any()
        assert (fine.time == t).any()


def test_the_envelope_is_the_highest_line_everywhere():
    for seed in SEEDS:
        entry = Entry(seed)
        slope, level, start = (np.empty(len(entry.weight_m)) for _ in range(3))
        size = envelope(entry.outside, entry.weight_m, entry.weight_t, slope, level, start)
        assert start[0] == -np.inf
        assert (np.diff(start[:size]) >= 0).all()
        assert (np.diff(slope[:size]) < 0).all()
        for x in np.concatenate([np.linspace(-500, 3000, 30), start[1:size]]):
            lines = zip(entry.outside, entry.weight_m, entry.weight_t, strict=True)
            want = max((value * (1 - SLACK) - m * x) / t for value, m, t in lines if t > 0)
            assert least_time(x, size, slope, level, start) == pytest.approx(want, rel=1e-9, abs=1e-7), seed
