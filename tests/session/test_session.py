"""How long parts of an exploration take."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tensoropt.cluster import load_cluster
from tensoropt.costs import tables as expected
from tensoropt.question.settings import Settings
from tensoropt.session import session as remaining
from tensoropt.session.session import Session


def test_progress_says_how_long_it_still_takes():
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
