"""The published methods in every order find our points, and what is told of them is what was measured."""

from __future__ import annotations

import numpy as np
import pytest

from tensoropt.search import track_frontier
from tensoropt.search.flat_tables import FlatTables
from tensoropt.search.reduced_graph import reduce_graph
from tests.benchmarks.search.baselines import ORDERS, OutOfTimeError, node_first, plain_tracking
from tests.benchmarks.search.graphs import Axis, rnn, transformer
from tests.benchmarks.search.published import COLUMNS, RATIOS, compared, ratio, told

MESH = (Axis(2), Axis(2))
GRAPHS = {"rnn": rnn(2, MESH), "transformer": transformer(1, (Axis(2),))}


@pytest.mark.parametrize("method", ORDERS)
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_every_order_finds_our_points(graph, method: str) -> None:
    found = track_frontier(graph)
    memory, time = plain_tracking(graph, method, limit_s=60)
    assert np.array_equal(memory, found.memory)
    assert np.array_equal(time, found.time)


def test_nodes_first_removes_the_ends_of_a_chain_last() -> None:
    """``rnn`` is a chain: its inner operators have two neighbours, its ends one."""
    reduced = reduce_graph(FlatTables.of(GRAPHS["rnn"]))
    order = node_first(reduced)
    last = len(reduced.domains) - 1
    assert order.removed == (*range(1, last), 0, last)
    assert order.fixed == ()


def test_what_runs_out_of_time_is_a_bound_and_what_is_late_is_not_run() -> None:
    def late() -> None:
        raise OutOfTimeError

    points = (np.zeros(2), np.ones(2))
    ways = dict.fromkeys(COLUMNS, lambda: points) | {"elimination": late, "kernels_ldp": late}
    row = {
        "model": "RNN",
        "layers": 2,
        "operators": 5,
        "most_configurations": 9,
        **compared(ways, {"kernels_ldp"}),
    }
    assert (row["points"], row["ldp_same"], row["ours_runs"]) == (2, True, 5)
    assert row["elimination_s"].startswith(">")
    assert ratio(row, "elimination", "ours").startswith(">")
    assert (row["elimination_runs"], row["kernels_ldp_runs"]) == (1, 0)
    assert ratio(row, "ldp", "elimination") is None
    text = told([row])
    assert all(name in text for name in (*COLUMNS.values(), *RATIOS))
    assert "yes" in text


def test_points_that_differ_are_said() -> None:
    ways = {"ours": lambda: (np.zeros(1), np.ones(1)), "ldp": lambda: (np.zeros(1), np.zeros(1))}
    assert compared(ways, set())["ldp_same"] is False
