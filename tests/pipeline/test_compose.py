"""Composing stages, against all compositions one by one."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.pipeline import compose as module
from tensoropt.pipeline.compose import Offer, compose, unbeaten

Cut = tuple[int, str]
Offers = list[dict[tuple[Cut, Cut], Offer]]


def offer(*rows: tuple[float, float, float, float]) -> Offer:
    """Rows of memory, first, further and end seconds."""
    return Offer(*(np.array(column, dtype=float) for column in zip(*rows, strict=True)))


def every(offers: Sequence[Mapping[tuple[Cut, Cut], Offer]], micro_batches: int) -> list[tuple[float, float]]:
    """(memory, seconds) of all compositions that none beats, by trying all: the naive twin."""
    found = []
    for ranges in itertools.product(*(of_stage.items() for of_stage in offers)):
        ends = [one for one, _ in ranges]
        if any(a[1] != b[0] for a, b in itertools.pairwise(ends)):
            continue
        for rows in itertools.product(*(range(len(of.memory)) for _, of in ranges)):
            memory, first, further, end = (
                [getattr(of, name)[row] for (_, of), row in zip(ranges, rows, strict=True)]
                for name in ("memory", "first_s", "further_s", "end_s")
            )
            found.append((max(memory), sum(first) + (micro_batches - 1) * max(further) + max(end)))
    kept: list[tuple[float, float]] = []
    for memory, seconds in sorted(found):
        if not kept or seconds < kept[-1][1] - 1e-12 * seconds:
            kept.append((memory, seconds))
    return kept


numbers = st.integers(1, 12).map(float)
rows = st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=3)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Offers, int]:
    """Stages between three positions, each crossed in two ways."""
    stages = draw(st.integers(2, 3))
    middle = [(position, way) for position in (1, 2, 3) for way in "ab"]
    offers: Offers = []
    for stage in range(stages):
        starts = [(0, "")] if stage == 0 else middle
        stops = [(4, "")] if stage == stages - 1 else middle
        pairs = [(a, b) for a in starts for b in stops if a[0] < b[0] and draw(st.booleans())]
        offers.append({ends: offer(*draw(rows)) for ends in pairs})
    return offers, draw(st.integers(1, 8))


@given(problems())
def test_it_finds_what_all_compositions_have(problem):
    offers, micro_batches = problem
    found = [(one.memory_bytes, one.time_s) for one in compose(offers, micro_batches)]
    wanted = every(offers, micro_batches)
    assert len(found) == len(wanted)
    assert np.array(found[::-1]) == pytest.approx(np.array(wanted))


def test_by_hand():
    # Two stages, four micro-batches; the first may be lean and slow.
    offers = [
        {((0, ""), (1, "")): offer((8, 1, 1, 0), (2, 3, 3, 0))},
        {((1, ""), (2, "")): offer((4, 2, 2, 1))},
    ]
    fast, lean = compose(offers, 4)
    assert (fast.memory_bytes, fast.time_s) == (8.0, 1 + 2 + 3 * 2 + 1)
    assert (lean.memory_bytes, lean.time_s) == (4.0, 3 + 2 + 3 * 3 + 1)
    assert [row for _, row in lean.stages] == [1, 0]
    assert fast.exact
    # The slowest stage alone takes 2 s four times: a plan of 7 s beats the first where it fits.
    assert [one.memory_bytes for one in compose(offers, 4, known=[(8.0, 7.0)])] == [4.0]
    assert not list(compose(offers, 4, known=[(4.0, 7.0)]))


def test_stages_meet_where_they_are_crossed_alike():
    offers = [{((0, ""), (1, "split")): offer((1, 1, 1, 1))}, {((1, "whole"), (2, "")): offer((1, 1, 1, 1))}]
    assert list(compose(offers, 2)) == []


def test_a_step_leaves_out_what_is_hardly_leaner():
    offers = [{((0, ""), (1, "")): offer((100, 1, 1, 0), (99.5, 2, 2, 0), (99, 3, 3, 0))}]
    assert [one.memory_bytes for one in compose(offers, 1)] == [100, 99.5, 99]
    assert [one.memory_bytes for one in compose(offers, 1, step=0.01)] == [100, 99]


def test_labels_that_are_left_out_are_told(monkeypatch):
    monkeypatch.setattr(module, "_MOST_LABELS", 1)
    offers = [
        {((0, ""), (1, "")): offer((1, 1, 4, 0), (1, 4, 1, 0))},
        {((1, ""), (2, "")): offer((1, 1, 4, 0), (1, 4, 1, 0))},
    ]
    assert [one.exact for one in compose(offers, 3)] == [False]


@given(st.lists(st.tuples(numbers, numbers, numbers), max_size=12))
def test_unbeaten_rows(rows):
    costs = np.array(rows).reshape(-1, 3)
    kept = unbeaten(costs).tolist()
    for number, row in enumerate(rows):
        beaten = any(
            all(a <= b for a, b in zip(other, row, strict=True)) and (other != row or at < number)
            for at, other in enumerate(rows)
            if at != number
        )
        assert (number in kept) != beaten
