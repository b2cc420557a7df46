"""A search that was interrupted goes on where it ended, and finds the same."""

from __future__ import annotations

import importlib
import inspect

import numpy as np
import pytest

from tensoropt.api import compare, explore, explore_captured, recost
from tensoropt.costs import source
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.edges import TableArrays
from tensoropt.files import pack, unpack
from tensoropt.profiling.store import CACHED
from tensoropt.search.bounds import Bound
from tensoropt.session import one_space
from tensoropt.session.kept import KeptCapture, KeptExplorations
from tensoropt.session.one_space import BOUNDS, OneSpace, part_from

ASKED = {
    "cluster": "dgx-h100[2]", "measure": "never", "micro_batches": [1, 2], "placements": "never",
    "pipelines": "never",
}  # fmt: skip


def points(found):
    return [(p.memory_bytes, p.time_s, p.choice) for p in found.points]


class StoppedError(Exception):
    """Stands for control-C."""


@pytest.fixture
def count(monkeypatch):
    """How many spaces were outlined or searched; the one with number ``count.stop`` ends the search."""

    class Count:
        done, stop = 0, -1

    counted = Count()

    def watched(real):
        def run(self, *args):
            if counted.done == counted.stop:
                raise StoppedError
            counted.done += 1
            return real(self, *args)

        return run

    monkeypatch.setattr(OneSpace, "outline", watched(OneSpace.outline))
    monkeypatch.setattr(OneSpace, "search", watched(OneSpace.search))
    # Forks count for themselves.
    monkeypatch.setattr("tensoropt.processes.cores", lambda: 1)
    return counted


def test_an_interrupted_search_goes_on_where_it_ended(model, empty_store, count):
    fresh = explore(*model, store=None, **ASKED)
    every, count.done, count.stop = count.done, 0, 3
    with pytest.raises(StoppedError):
        explore(*model, store=empty_store, keep=True, **ASKED)
    count.stop = -1
    again = explore(*model, store=empty_store, keep=True, **ASKED)
    assert every >= 4
    assert count.done == every
    assert points(again) == points(fresh)


def test_planners_are_compared_without_another_search(model, found, kept_store, count):
    count.stop = 0
    beside = compare(*model, planners=["optcnn"], store=kept_store, keep=True, **ASKED)
    assert points(beside) == points(found)
    assert beside.comparison


def test_planners_run_beside_a_saved_frontier_without_another_search(found, kept_store, count):
    count.stop = 0
    beside, old = recost(found, planners=["optcnn"], store=kept_store, keep=True, old_points=False)
    assert points(beside) == points(found)
    assert beside.comparison
    assert old == ()
    with pytest.raises(StoppedError):
        recost(found, store=kept_store)


def test_a_graph_is_explored_with_what_was_kept(found, kept_store, count):
    count.stop = 0
    captured = KeptCapture(found.model, found.recorded.graph)
    assert points(explore_captured(captured, store=kept_store, keep=True, **ASKED)) == points(found)
    with pytest.raises(StoppedError):
        explore_captured(captured, store=kept_store, **ASKED)


def test_another_question_is_another_search(model, kept_store, count):
    for other in ({"epsilon": 1e-4}, {"cluster": "dgx-v100[2]"}, {"micro_batches": [1, 4]}):
        before = count.done
        explore(*model, store=kept_store, keep=True, **{**ASKED, **other})
        assert count.done > before, other


def test_tables_of_other_numbers_are_searched_again(model, kept_store, count, monkeypatch):
    """As after devices were timed anew: the question is the same."""
    prices = CommunicationModel.time_s
    monkeypatch.setattr(CommunicationModel, "time_s", lambda *args: 2 * prices(*args))
    monkeypatch.setattr(KeptExplorations, "find", lambda *_: None)
    monkeypatch.setattr(source, "TableArrays", lambda *_: TableArrays())
    slower = explore(*model, store=kept_store, keep=True, **ASKED)
    searched = count.done
    assert points(slower) == points(explore(*model, store=None, **ASKED))
    assert count.done == 2 * searched > 0


def test_damaged_values_are_as_if_they_were_not_there(model, found, kept_store, count):
    first, second, *_ = kept_store.cached("frontiers", "")
    for key, damage in ((first, b""), (second, b"\x1f\x8b half of one")):
        kept_store._connection.execute("UPDATE cache SET value = ? WHERE key = ?", (damage, key))
    again = compare(*model, planners=["optcnn"], store=kept_store, keep=True, **ASKED)
    assert count.done == 2
    assert points(again) == points(found)


def test_nothing_is_kept_unasked(model, empty_store):
    explore(*model, store=empty_store, **ASKED)
    assert [empty_store.cached(kind, "") for kind in CACHED] == [[]] * len(CACHED)


def test_every_bound_can_be_read_back():
    """A class that is not on the list could not be kept."""
    modules = [importlib.import_module(f"tensoropt.search.{name}") for name in ("paper", "bounds", "hull")]
    bounds = {
        found
        for module in modules
        for found in vars(module).values()
        if inspect.isclass(found) and "bounds" in vars(found) and found is not Bound
    }
    assert {found.__name__ for found in bounds} >= {"BandBound", "Staircase", "Hull"}
    assert bounds <= set(BOUNDS.values())


@pytest.mark.parametrize("epsilon", [0.0, 0.01])
def test_what_is_read_back_is_what_was_found(model, empty_store, monkeypatch, epsilon):
    """Points, strategies, what was simulated, and the certificate within any budget."""
    kept, real = [], one_space.data_of
    monkeypatch.setattr(
        one_space, "data_of", lambda part, tables: kept.append((part, tables)) or real(part, tables)
    )
    explore(*model, store=empty_store, keep=True, epsilon=epsilon, **ASKED)
    assert kept
    for part, tables in kept:
        read = part_from(unpack(pack(real(part, tables))), part.number, tables)
        frontiers = [
            (found.frontier, same.frontier) for found, same in zip(part.every, read.every, strict=True)
        ]
        assert [cap for cap, _ in read.capped] == [cap for cap, _ in part.capped]
        assert all(
            a.numbers.tolist() == b.numbers.tolist() for a, b in zip(part.every, read.every, strict=True)
        )
        assert (read.frontier is None) == (part.frontier is None)
        assert read.frontier is None or any(read.frontier is same for _, same in frontiers)
        assert np.array_equal(read.simulated.configurations, part.simulated.configurations)
        assert np.array_equal(read.simulated.costs, part.simulated.costs)
        for found, same in frontiers:
            assert (same.exact, same.notes) == (found.exact, found.notes)
            assert (
                same.memory.tobytes() + same.time.tobytes() == found.memory.tobytes() + found.time.tobytes()
            )
            for point in range(0, len(found), 1 + len(found) // 9):
                assert same.strategy(point) == found.strategy(point)
                assert same.options(point) == found.options(point)
            budgets = np.concatenate([[0.0], found.memory, found.memory * 1.001, [np.inf]])
            assert same.bounds(budgets).tobytes() == found.bounds(budgets).tobytes()
