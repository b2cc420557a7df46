"""Under additive costs nobody beats the frontier: it is the optimum of the same space."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tensoropt.costs.tables import CostTables
from tensoropt.planners.sharded import ilp
from tensoropt.planners.sharded.common import cheapest
from tensoropt.planners.sharded.optcnn import fastest
from tensoropt.search import TrackedFrontier, track_frontier
from tests.costs.models import gates, gpt2, problem, tables_of, two_layers

MODELS = {"two layers": two_layers, "gates": gates, "gpt2": gpt2}


@cache
def solved(name: str, mesh: tuple[int, ...]) -> tuple[CostTables, TrackedFrontier]:
    # Planners read tables without options of edges.
    tables = tables_of(problem(MODELS[name]), mesh).without_moves
    return tables, track_frontier(tables, epsilon=0.0)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("two layers", (2, 2)), ("gates", (1, 2)), pytest.param("gpt2", (2, 2), marks=pytest.mark.slow)],
)
def test_optcnn_is_the_fast_end_of_the_frontier(name, mesh):
    tables, frontier = solved(name, mesh)
    choice, options, notes = fastest(tables)
    memory, compute, communication = tables.breakdown(choice, options)
    assert compute + communication == pytest.approx(frontier.time[-1], rel=1e-9)
    assert not notes
    assert memory >= frontier.memory[-1] * (1 - 1e-9)


@pytest.mark.parametrize("name", ["two layers", "gates"])
def test_the_program_meets_the_frontier_at_every_budget(name):
    tables, frontier = solved(name, (1, 2))
    assert frontier.exact
    for i in np.linspace(0, len(frontier) - 1, 6).astype(int):
        found = ilp._ZeroOneProgram(tables).solve(float(frontier.memory[i]) * (1 + 1e-9))
        assert found is not None
        assert found.gap == 0.0
        assert found.memory_bytes <= frontier.memory[i] * (1 + 1e-6)
        assert found.seconds == pytest.approx(frontier.time[i], rel=1e-5)


def test_a_budget_below_the_leanest_has_no_solution():
    tables, frontier = solved("two layers", (1, 2))
    assert ilp._ZeroOneProgram(tables).solve(float(frontier.memory[0]) * 0.99) is None


def test_what_is_not_proven_is_said(monkeypatch):
    def unproven(graph):
        return replace(track_frontier(graph), exact=False, notes=("fixed a",))

    monkeypatch.setattr(cheapest, "track_frontier", unproven)
    choice, notes = cheapest.cheapest({"a": np.array([2.0, 1.0])}, [])
    assert choice == {"a": 1}
    assert notes == ("fixed a", "at most 0.0% above the optimum")
