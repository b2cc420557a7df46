"""How long an exploration still takes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tensoropt.cluster import load_cluster
from tensoropt.costs import expected
from tensoropt.plan.settings import Settings
from tensoropt.session import remaining
from tensoropt.session.remaining import LEAST_LEFT, START_S, Remaining
from tensoropt.session.session import Session


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_nothing_is_said_before_something_is_announced(clock):
    assert Remaining(clock).words == ""


def test_what_is_announced_adds_up_and_runs_down(clock):
    left = Remaining(clock)
    left.expect("tables", 6.0)
    left.expect("searches", 4.0)
    assert left.words == "about 10 s left"
    clock.now += 3
    assert left.left_s == pytest.approx(7.0)
    clock.now += 100
    assert left.left_s == pytest.approx(LEAST_LEFT * 10)


def test_what_is_done_corrects_the_pace(clock):
    """Four seconds took twelve: of the rest as much more as START_S at the expected pace leaves."""
    left = Remaining(clock)
    left.expect("tables", 4.0)
    left.expect("searches", 10.0)
    clock.now += 12
    left.expect("tables", 0.0)
    assert left.left_s == pytest.approx(10 * (START_S + 12) / (START_S + 4))


def test_what_turns_out_to_be_more_is_no_sign_of_a_slow_pace(clock):
    left = Remaining(clock)
    left.expect("searches", 2.0)
    clock.now += 50
    left.expect("searches", 8.0)
    assert left.left_s == pytest.approx(8.0)


def test_progress_says_how_long_it_still_takes(clock):
    told = []
    session = Session(load_cluster("dgx-h100"), Settings(), progress=lambda *a: told.append(a))
    session.report("capture", 0, 1, "a model")
    session.remaining.expect("tables", 30.0)
    session.report("tables", 0, 4, "mesh 8")
    assert told == [("capture", 0, 1, "a model"), ("tables", 0, 4, "about 30 s left, mesh 8")]


def tables(entries, variables=10, different=1):
    table = np.zeros((entries, 1, 2))
    edges = [SimpleNamespace(table=table)] * 3 + [
        SimpleNamespace(table=table.copy()) for _ in range(different - 1)
    ]
    return SimpleNamespace(variables=[None] * variables, edges=edges)


def test_tables_that_are_shared_are_searched_once():
    once, twice = (expected.search_s(tables(1000, different=n)) for n in (1, 2))
    assert twice - once == pytest.approx(1000 * expected.ENTRY_S)
    assert expected.search_s(tables(10**8)) == expected.MOST_S


def test_a_slow_outline_is_followed_by_a_slow_search():
    one = tables(1000)
    assert remaining.outlined_s(one, 0.0) == expected.search_s(one)
    assert remaining.outlined_s(one, 10.0) == 10.0 * remaining.LIKE_OUTLINE


def test_wide_meshes_take_longer_over_several_levels():
    others = [tables(1000), tables(2000)]
    assert remaining.wide_s(1, others) == expected.search_s(others[1])
    assert remaining.wide_s(2, others) == remaining.LIKE_WIDEST * expected.search_s(others[1])
