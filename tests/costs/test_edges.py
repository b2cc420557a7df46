"""Arrays of cost tables are made once, by what they follow from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.cluster import Mesh, load_cluster
from tensoropt.costs import edges
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.edges import TableArrays
from tensoropt.evaluation.problem import prepare_graph
from tensoropt.profiling.store import ProfileStore
from tests.costs.models import tables_of
from tests.models import Call
from tests.profiling.test_store import cached


@pytest.mark.parametrize("keep", ["another version of the code", "this one"])
def test_arrays_of_other_code_are_others(store, keep):
    made = []
    for code in ("this one", keep):
        arrays = TableArrays(store, repr((code, True, "prices")))
        arrays.once(lambda: "group", lambda: made.append(1) or np.ones(2))
        arrays.save()
    assert len(made) == (1 if keep == "this one" else 2)


def problem(width: int = 32):
    """Two layers that look alike, and one of a width of its own; the first weight is used once more."""

    def forward(m, x):
        y = torch.relu(m.two(torch.relu(m.one(x))))
        z = m.back(torch.relu(m.wide(y))) + y
        return torch.nn.functional.linear(z, m.one.weight).sum()

    alike = {"one": nn.Linear(16, 16), "two": nn.Linear(16, 16)}
    model = Call(forward, **alike, wide=nn.Linear(16, width), back=nn.Linear(width, 16))
    return prepare_graph(capture(model, (torch.randn(8, 16),)).graph)


class Counted(TableArrays):
    """Counts what is asked for and what is made."""

    def __init__(self, store: ProfileStore):
        super().__init__(store, "prices")
        self.asked, self.made = 0, 0

    def once(self, depends_on, make):
        def counted() -> np.ndarray:
            self.made += 1
            return make()

        self.asked += 1
        return super().once(depends_on, counted)


def arrays_in(tables):
    found = [column for v in tables.variables for column in (*v.memory, *v.compute, *v.communication)]
    return [*found, *(edge.table for edge in tables.edges), *(edge.rows for edge in tables.edges)]


def same(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(arrays_in(one), arrays_in(other), strict=True))


def test_tables_are_the_same_to_the_last_bit(store):
    fresh, first = tables_of(problem(), (2, 4)), Counted(store)
    assert same(fresh, tables_of(problem(), (2, 4), arrays=first))
    assert first.made == first.asked > 5
    first.save()
    again = Counted(store)
    assert same(fresh, tables_of(problem(), (2, 4), arrays=again))
    assert (again.made, again.asked) == (0, first.asked)


def test_only_what_belongs_to_a_changed_layer_is_made_anew(store):
    first = Counted(store)
    tables_of(problem(), (2, 4), arrays=first)
    first.save()
    changed = Counted(store)
    assert same(tables_of(problem(24), (2, 4)), tables_of(problem(24), (2, 4), arrays=changed))
    assert 0 < changed.made < changed.asked / 2


def test_all_that_decides_prices_is_in_their_description():
    cluster = load_cluster("dgx-h100[4]")
    first, second = Mesh(shape=(4,)), Mesh(shape=(2, 2))
    level = cluster.levels[0]
    level = replace(level, link=replace(level.link, bandwidth_bytes_per_s=1e9))
    faster = replace(cluster, levels=(level, *cluster.levels[1:]))
    described = [
        CommunicationModel(one, mesh).described
        for one, mesh in ((cluster, first), (cluster, second), (faster, first))
    ]
    assert len(set(described)) == 3


def test_nothing_is_kept_without_a_store():
    arrays = TableArrays()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            arrays.once(lambda: 1 / 0, lambda: 1 / 0)
        assert arrays.once(lambda: pytest.fail("is not asked"), lambda: np.ones(2)).sum() == 2
    in_memory = TableArrays(in_memory=True)
    assert in_memory.once(str, lambda: np.ones(2)) is in_memory.once(str, lambda: np.zeros(2))
    for kept in (arrays, in_memory):
        kept.save()


def test_large_arrays_are_not_kept(store, monkeypatch):
    monkeypatch.setattr(edges, "_MOST_BYTES", 100)
    arrays = TableArrays(store, "prices")
    arrays.once(lambda: "key", lambda: np.ones(100))
    arrays.save()
    assert not cached(store, "tables", "")


def test_what_cannot_be_stored_is_built_again(store):
    store._connection.execute("PRAGMA max_page_count = 1")  # no more than there are
    arrays = TableArrays(store, "prices")
    assert arrays.once(lambda: "key", lambda: np.random.default_rng(0).random(10**4)).size == 10**4
    arrays.save()
    assert store.persistent
    assert not cached(store, "tables", "")
