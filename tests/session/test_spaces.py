"""Spaces searched and judged."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from tensoropt import InfeasibleError, Settings, explore
from tensoropt.cluster import Mesh, load_cluster
from tensoropt.engine.models import ModelSpec
from tensoropt.exploration.frontier_table import table_rows
from tensoropt.plan.kinds import PLACED, SHARDED
from tensoropt.plan.point import unbeaten
from tensoropt.search import CostGraph, NoStrategyError, outline_frontier, track_frontier
from tensoropt.session import one_space
from tensoropt.session.simulations import Simulations
from tensoropt.session.spaces import SpaceSearch
from tensoropt.types import silent
from tests.plan import explorations


@pytest.mark.parametrize("epsilon", [0.0, 0.001])
def test_nothing_that_runs_is_an_error_with_a_remedy(monkeypatch, epsilon):
    refuse = Mock(side_effect=NoStrategyError("no strategy is possible: operator 'fatal'"))
    for name in ("track_frontier", "outline_frontier"):
        monkeypatch.setattr(f"tensoropt.session.one_space.{name}", refuse)
    tables = SimpleNamespace(mesh=(1, 2), variables=(), edges=())
    nothing = Simulations(load_cluster("dgx-h100"), [])
    space = SimpleNamespace(done=None, simulated=np.zeros((0, 2)))
    space.copy = lambda: space
    nothing.spaces.append(space)
    spaces = SpaceSearch([(Mesh(shape=(2,)), tables)], Settings(epsilon=epsilon), nothing, silent)
    with pytest.raises(InfeasibleError, match=r"mesh 2: no strategy can run .* 'fatal'.*--measure never"):
        spaces.search()


def beaten(point, others) -> bool:
    """Whether another one needs no more additive memory and time, and less of one."""
    costs = (point.additive_memory_bytes, point.additive_time_s)
    theirs = [(p.additive_memory_bytes, p.additive_time_s) for p in others]
    return any(p != costs and p[0] <= costs[0] and p[1] <= costs[1] for p in theirs)


@pytest.mark.parametrize(
    ("name", "settings"), [("mlp", (("batch", 4096),)), pytest.param("gpt2-tiny", (), marks=pytest.mark.slow)]
)
def test_what_is_exact_is_beaten_by_no_point_of_any_space(store, name, settings):
    """The judge prefers points that another mesh or micro-batch count beats in the additive model."""
    model = ModelSpec(f"zoo:{name}", 0, settings=settings).build()
    asked = {"measure": "never", "recompute": "never", "store": store, "planners": "optcnn"}
    found = explore(*model, cluster="dgx-h100[4]", micro_batches=[1, 2], **asked)
    # Nothing is proven of plans that are placed or have stages, nor against them.
    sharded = [p for p in found.all_points if p.kind is SHARDED]
    assert not [p for p in found.points if p.exact and beaten(p, found.points)]
    assert any(beaten(p, sharded) for p in found.points if not p.exact)
    assert all(p.gap == 0 for p in found.points if p.exact)
    for one in sharded:
        within = [p.additive_time_s for p in sharded if p.additive_memory_bytes <= one.additive_memory_bytes]
        assert one.additive_time_s <= min(within) * (1 + one.gap) * (1 + 1e-9)
    assert "optcnn" in {p.planner for p in sharded}


def test_of_placed_plans_nothing_is_proven(store, tmp_path):
    model = ModelSpec("zoo:mlp", 0).build()
    asked = {"micro_batches": [1], "measure": "never", "store": store, "planners": "m_topo"}
    found = explore(*model, cluster="dgx-h100[2]", **asked)
    placed = [p for p in found.all_points if p.kind is PLACED]
    assert placed
    assert all(p.gap is None and not p.exact for p in placed)
    assert not [p for p in found.points if p.exact and beaten(p, found.points)]
    shown = replace(found, points=tuple(placed))
    assert {(row["exact"], row["gap"]) for row in explorations.csv_of(shown, tmp_path)} == {("false", "")}
    assert {row[-2] for row in table_rows(shown, range(len(placed)))[1:]} == {"-"}


def test_a_rounding_is_enough_to_be_beaten():
    point = explorations.point
    ours = point(10.0, 1.0, 0, additive_memory_bytes=4.0, additive_time_s=2.0)
    less = point(11.0, 0.9, 0, additive_memory_bytes=4.0, additive_time_s=2.0 - 2**-51)
    equal = point(12.0, 0.8, 0, additive_memory_bytes=4.0, additive_time_s=2.0 - 2**-51)
    more = point(13.0, 0.7, 0, additive_memory_bytes=5.0, additive_time_s=2.0 - 2**-51)
    last = point(14.0, 0.6, 0, additive_memory_bytes=6.0, additive_time_s=1.0)
    found = unbeaten([ours, less, equal, more, last])
    assert [p.exact for p in found] == [False, True, True, False, True]
    assert [p.time_s for p in found] == [1.0, 0.9, 0.8, 0.7, 0.6]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt2-tiny", marks=pytest.mark.slow)])
def test_points_do_not_depend_on_the_processes(tmp_path, name):
    """In a process of its own, as test runners have threads and do not fork."""
    program = """
import os, sys
from tensoropt import processes
from tensoropt.cli.parser import main
forks, fork, cores = [], processes._fork, processes.cores
processes._fork = lambda *asked: forks.append(fork(*asked)) or forks[-1]
model = [sys.argv[1], "--cluster", "dgx-h100[4]", "--micro-batches", "1,2"]
processes.cores = lambda: 2
assert main(["explore", *model, "--anew", "--out", "2"]) == 0 and forks
forks.clear()
processes.cores = cores
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
assert main(["explore", *model, "--anew", "--out", "1"]) == 0 and not forks
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONHASHSEED": "0"}
    run = subprocess.run(
        [sys.executable, "-c", program, f"zoo:{name}"],
        timeout=400, check=False, capture_output=True, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    csvs = [(tmp_path / cores / "frontier.csv").read_text(encoding="utf-8") for cores in ("2", "1")]
    assert csvs[0] == csvs[1]


def test_what_another_process_sends_of_a_frontier_is_the_same():
    graph = CostGraph()
    generator = np.random.default_rng(3)
    for name in "abcd":
        graph.add_operator(name, [generator.uniform(1, 9, (2, 2)) for _ in range(3)])
    for a, b in ("ab", "bc", "cd"):
        graph.add_edge(a, b, generator.uniform(0, 3, (3, 3, 2)))
    for found in (track_frontier(graph), track_frontier(graph, epsilon=0.05), outline_frontier(graph)):
        sent = pickle.loads(pickle.dumps(found))
        assert (sent.memory.tolist(), sent.time.tolist()) == (found.memory.tolist(), found.time.tolist())
        assert (sent.exact, sent.notes) == (found.exact, found.notes)
        budgets = np.linspace(0, 2 * found.memory[-1], 30)
        assert sent.bounds(budgets).tolist() == found.bounds(budgets).tolist()
        for index in range(len(found)):
            assert sent.strategy(index) == found.strategy(index)
            assert sent.options(index) == found.options(index)
        with pytest.raises(IndexError, match="point 99"):
            sent.strategies([99])


def test_every_method_tracks_the_same_frontier(model, store, monkeypatch):
    """Of a graph in which no operator has to be fixed, with no gap allowed."""
    tracked = Mock(wraps=one_space.track_frontier)
    monkeypatch.setattr(one_space, "track_frontier", tracked)
    asked = {"cluster": "dgx-h100[2]", "measure": "never", "micro_batches": [1, 2], "epsilon": 0}
    ours, *published = (
        explore(*model, store=store, placements="never", method=method, **asked)
        for method in ("auto", "ldp", "elimination")
    )
    used = [call.kwargs["method"] for call in tracked.call_args_list]
    assert list(dict.fromkeys(used)) == ["auto", "ldp", "elimination"]
    for other in published:
        assert not any("heuristic" in note for note in other.report["notes"])
        assert explorations.costs(other) == explorations.costs(ours)
