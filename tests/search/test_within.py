"""Frontiers within an allowed gap: nothing is missing that is faster by more, and work is bounded."""

from __future__ import annotations

import numpy as np
import pytest

import tensoropt.search.within as within
from tensoropt.search import NoStrategyError, Staircase, outline_frontier, track_frontier
from tensoropt.search.track import _enough_within
from tests.search.graphs import SHAPES, Case, seeds_of
from tests.search.test_result import chain

MORE = 1 + 1e-9


def fastest(memory, time, budget):
    """The time of the fastest point within a budget."""
    return time[memory <= budget * MORE].min(initial=np.inf)


def holds(exact, loose, epsilon) -> None:
    """Nothing of the exact frontier is missing by more than the gap, unless a note says so; bounds bound."""
    assert exact.worst_gap == 0
    for memory, time in zip(exact.memory, exact.time, strict=True):
        assert loose.lower_bound(memory) <= time * MORE
        if not loose.notes:
            assert fastest(loose.memory, loose.time, memory) <= time * (1 + epsilon) * MORE
    if not loose.notes:
        assert loose.worst_gap <= epsilon
        assert (loose.gap <= epsilon).all()
    for memory, time in zip(loose.memory, loose.time, strict=True):
        assert fastest(exact.memory, exact.time, memory) <= time * MORE


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("epsilon", [1e-3, 0.05, 0.5])
def test_nothing_is_missing_by_more_than_the_gap(shape, epsilon):
    for seed in seeds_of(2000, 2012):
        case = Case(seed, shape, 7, 4)
        try:
            exact = track_frontier(case.graph)
        except NoStrategyError:
            continue
        holds(exact, track_frontier(case.graph, epsilon=epsilon), epsilon)


@pytest.mark.parametrize("name", ["_FEW_PAIRS", "_SUMS"])
def test_less_work_is_said_and_bounds_still_hold(monkeypatch, name):
    for amount in (name, "_LAST_PAIRS"):
        monkeypatch.setattr(within, amount, 40)
    graph = chain(30, 6)
    exact, loose = track_frontier(graph), track_frontier(graph, epsilon=1e-4)
    # What a pass left out that had aimed closer was looked for again.
    assert exact.time.tolist() == track_frontier(graph, method="elimination").time.tolist()
    holds(exact, loose, 1e-4)
    if name == "_SUMS":
        assert loose.notes == (within._UNPROVEN,)
        assert loose.worst_gap > 1e-4


def test_of_a_graph_that_is_too_large_there_is_an_outline(monkeypatch):
    graph = chain(30, 6)
    exact = track_frontier(graph)
    monkeypatch.setattr(within, "_LARGE_WORK", 10)
    loose = track_frontier(graph, epsilon=1e-3)
    assert loose.notes == outline_frontier(graph).notes == (within.TOO_LARGE,)
    holds(exact, loose, 1e-3)


def test_classes_that_join_to_no_strategy_prove_the_gap(monkeypatch):
    """Known strategies lie above the lowered staircase, so that what is left below it may be impossible."""
    graph, first = chain(30, 6), []
    real = within.HullSearch.find_hull

    def impossible_once_narrowed(self, lines):
        first.append(self.program)
        return real(self, lines) if self.program is first[0] else None

    monkeypatch.setattr(within, "_WORTH_NARROWING", 1.0)
    monkeypatch.setattr(within.HullSearch, "find_hull", impossible_once_narrowed)
    found = track_frontier(graph, epsilon=0.001)
    assert first[-1] is not first[0]
    assert len(found) > 1
    assert found.notes == ()
    assert found.worst_gap <= 0.001


def test_the_number_of_points_follows_the_gap():
    graph = chain(60, 6)
    counts = [len(track_frontier(graph, epsilon=epsilon)) for epsilon in (1e-4, 1e-3, 1e-2, 1e-1)]
    assert counts == sorted(counts, reverse=True)
    times = track_frontier(graph, epsilon=1e-2).time
    # Every kept point is needed, so that two steps lower the time by the gap.
    assert counts[2] <= 2 * np.log(times[0] / times[-1]) / np.log(1.01) + 2


@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_what_rivals_beat_need_not_be_found(epsilon):
    graph = chain(20, 5)
    exact = track_frontier(graph)
    half = len(exact) // 2
    rivals = Staircase(exact.memory[half:] * 0.9, exact.time[half:] * 0.9)
    found = track_frontier(graph, epsilon=epsilon, rivals=rivals)
    lean = exact.memory < rivals.memory[0]
    for memory, time in zip(exact.memory[lean], exact.time[lean], strict=True):
        assert fastest(found.memory, found.time, memory) <= time * (1 + epsilon) * MORE
    # A bound may take rivals for known, but is never above what this graph's strategies reach.
    for memory, time in zip(exact.memory, exact.time, strict=True) if epsilon else ():
        assert found.lower_bound(memory) <= time * MORE


def test_an_outline_is_made_of_strategies_and_bounds_the_frontier():
    graph = chain(40, 6)
    exact, outline = track_frontier(graph), outline_frontier(graph)
    assert 2 < len(outline) < len(exact)
    assert outline.memory[0] == exact.memory[0]
    assert outline.time[-1] == exact.time[-1]
    holds(exact, outline, np.inf)


def test_enough_within_keeps_the_ends_and_every_gap():
    rng = np.random.default_rng(0)
    for epsilon in (0.01, 0.1):
        memory = np.cumsum(rng.random(200)) + 1.0
        time = np.cumsum(rng.random(200))[::-1] + 1.0
        bound = Staircase(memory, time * 0.995)
        kept = _enough_within(memory, time, bound.bounds, epsilon)
        assert kept[0] == 0
        assert kept[-1] == len(memory) - 1
        assert len(kept) < len(memory)
        for i in range(len(memory)):
            best = time[kept[kept <= i][-1]]
            assert best <= max(bound.time[i] * (1 + epsilon), time[i] * (1 + epsilon / 2)) * MORE
