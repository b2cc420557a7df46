"""A search that was interrupted goes on where it ended, and finds the same."""

from __future__ import annotations

import importlib
import inspect
import io
import pickle
from pathlib import Path

import pytest

from tensoropt.api import compare, explore, explore_graph, recost
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.kept_tables import KeptTables, TableArrays
from tensoropt.engine.models import ModelSpec
from tensoropt.profiling.store import ProfileStore
from tensoropt.search.bounds import Bound
from tensoropt.session import kept_frontiers
from tensoropt.session.kept import KeptExplorations
from tensoropt.session.kept_frontiers import READABLE, KeptFrontiers, PartReader
from tensoropt.session.one_space import OneSpace

ASKED = {"cluster": "dgx-h100[2]", "measure": "never", "micro_batches": [1, 2]}


@pytest.fixture(scope="module")
def model():
    return ModelSpec("zoo:mlp", 0).build()


@pytest.fixture
def store(tmp_path):
    with ProfileStore(tmp_path / "profiles.sqlite") as opened:
        yield opened


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


def test_an_interrupted_search_goes_on_where_it_ended(model, store, count):
    fresh = explore(*model, store=None, **ASKED)
    every, count.done, count.stop = count.done, 0, 3
    with pytest.raises(StoppedError):
        explore(*model, store=store, keep=True, **ASKED)
    count.stop = -1
    again = explore(*model, store=store, keep=True, **ASKED)
    assert every >= 4
    assert count.done == every
    assert points(again) == points(fresh)


def test_planners_are_compared_without_another_search(model, store, count):
    found = explore(*model, store=store, keep=True, **ASKED)
    count.stop = count.done
    beside = compare(*model, planners=["optcnn"], store=store, keep=True, **ASKED)
    assert points(beside) == points(found)
    assert beside.comparison


def test_planners_run_beside_a_saved_frontier_without_another_search(model, store, count):
    found = explore(*model, store=store, keep=True, **ASKED)
    count.stop = count.done
    beside, old = recost(found, planners=["optcnn"], store=store, keep=True, old_points=False)
    assert points(beside) == points(found)
    assert beside.comparison
    assert old == ()
    with pytest.raises(StoppedError):
        recost(found, store=store)


def test_a_graph_is_explored_with_what_was_kept(model, store, count):
    found = explore(*model, store=store, keep=True, **ASKED)
    count.stop = count.done
    graph = found.recorded.graph
    assert points(explore_graph(graph, found.model, store=store, keep=True, **ASKED)) == points(found)
    with pytest.raises(StoppedError):
        explore_graph(graph, found.model, store=store, **ASKED)


@pytest.mark.parametrize("other", [{"epsilon": 1e-4}, {"cluster": "dgx-v100[2]"}, {"micro_batches": [1, 4]}])
def test_another_question_is_another_search(model, store, count, other):
    explore(*model, store=store, keep=True, **ASKED)
    before = count.done
    explore(*model, store=store, keep=True, **{**ASKED, **other})
    assert count.done > before


def test_tables_of_other_numbers_are_searched_again(model, store, count, monkeypatch):
    """As after devices were timed anew: the question is the same."""
    explore(*model, store=store, keep=True, **ASKED)
    before = count.done
    prices = CommunicationModel.time_s
    monkeypatch.setattr(CommunicationModel, "time_s", lambda *args: 2 * prices(*args))
    monkeypatch.setattr(KeptExplorations, "find", lambda *_: None)
    monkeypatch.setattr(KeptTables, "at", lambda *_: TableArrays(None))
    slower = explore(*model, store=store, keep=True, **ASKED)
    assert count.done == 2 * before
    assert points(slower) == points(explore(*model, store=None, **ASKED))


def test_damaged_files_are_as_if_they_were_not_there(model, store, count, tmp_path):
    found = explore(*model, store=store, keep=True, **ASKED)
    files = sorted((tmp_path / "frontiers").rglob("*.pickle.gz"))
    files[0].write_bytes(b"")
    files[1].write_bytes(files[1].read_bytes()[:100])
    before = count.done
    again = compare(*model, planners=["optcnn"], store=store, keep=True, **ASKED)
    assert count.done == before + 2
    assert points(again) == points(found)


def test_nothing_is_kept_unasked(model, store, tmp_path):
    explore(*model, store=store, **ASKED)
    assert not (tmp_path / "frontiers").exists()
    assert not (tmp_path / "tables").exists()


def test_the_oldest_searches_go(tmp_path, monkeypatch):
    import os

    monkeypatch.setattr(kept_frontiers, "MOST_BYTES", 2500)
    for age, name in enumerate("abc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1-0.pickle.gz").write_bytes(b"0" * 1000)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    KeptFrontiers(tmp_path, "a").remove_old()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


class Hostile:
    """Would write a file where it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_file_of_somebody_else_runs_nothing(tmp_path):
    file = tmp_path / "run"
    with pytest.raises(pickle.UnpicklingError, match="is no part of a search"):
        PartReader(io.BytesIO(pickle.dumps(Hostile(file)))).load()
    assert not file.exists()


def test_every_bound_can_be_read_back():
    """A class that is not on the list would have its search made again each time, in silence."""
    modules = [importlib.import_module(f"tensoropt.search.{name}") for name in ("bands", "bounds", "hull")]
    bounds = {
        found
        for module in modules
        for found in vars(module).values()
        if inspect.isclass(found) and "bounds" in vars(found) and found is not Bound
    }
    assert {found.__name__ for found in bounds} >= {"BandBound", "Staircase", "Hull"}
    for found in bounds:
        assert found.__name__ in READABLE[found.__module__], found
