"""Bad input is refused with the culprit's name and a remedy."""

import numpy as np
import pytest

from tensoropt.search import CostGraph, track_frontier

ONE = [[1.0, 1.0]]


def graph(*names, configurations=2):
    made = CostGraph()
    for name in names:
        made.add_operator(name, [ONE] * configurations)
    return made


@pytest.mark.parametrize(
    ("costs", "match"),
    [
        ([[[1.0, -1.0]]], r"'a'.*negative"),
        ([[[1.0, np.nan]]], r"'a'.*NaN"),
        (np.array([[[1.0, np.nan]]]), r"'a'.*NaN"),
        ([[[1.0, 2.0], [3.0]]], r"'a', configuration 0.*ragged"),
        ([[[1.0, 2.0, 3.0]]], r"'a', configuration 0.*shape"),
        (np.zeros((2, 1, 3)), r"'a'.*memory, time"),
        ([], r"'a'.*no configurations"),
        (7, r"'a'.*list"),
        ([["x"]], r"'a', configuration 0.*not numbers"),
    ],
)
def test_bad_operator_costs_name_the_operator(costs, match):
    with pytest.raises(ValueError, match=match):
        CostGraph().add_operator("a", costs)


def test_an_operator_is_added_once():
    with pytest.raises(ValueError, match=r"'a' is already"):
        graph("a").add_operator("a", [ONE])


@pytest.mark.parametrize(
    ("costs", "settings", "match"),
    [
        (np.zeros((3, 2, 2)), {}, r"'a' -> 'b'.*rows.*3 entries.*2 configurations"),
        (np.zeros((2, 3, 2)), {}, r"'a' -> 'b'.*cols"),
        (np.full((2, 2, 2), -1.0), {}, r"'a' -> 'b'.*negative"),
        ([[ONE, ONE], [ONE]], {}, r"'a' -> 'b'.*ragged"),
        ([[ONE, [[np.nan, 0]]], [ONE, ONE]], {}, r"'a' -> 'b'.*NaN"),
        (3.0, {}, r"'a' -> 'b'.*table of rows"),
        (np.zeros((1, 1, 2)), {"rows": [0, 0], "cols": [0, 1]}, r"'a' -> 'b': cols.*0 to 0"),
        (np.zeros((1, 1, 2)), {"rows": [0], "cols": [0, 0]}, r"'a' -> 'b': rows must be 2 integers"),
        (np.zeros((1, 1, 2)), {"rows": [0.0, 0.0], "cols": [0, 0]}, r"'a' -> 'b': rows must be 2 integers"),
    ],
)
def test_bad_edge_costs_name_the_edge(costs, settings, match):
    with pytest.raises(ValueError, match=match):
        graph("a", "b").add_edge("a", "b", costs, **settings)


def test_edges_need_two_known_operators():
    with pytest.raises(ValueError, match=r"'a' -> 'x'.*'x' is not in the graph"):
        graph("a").add_edge("a", "x", np.zeros((2, 2, 2)))
    with pytest.raises(ValueError, match=r"'a' -> 'a' joins an operator with itself"):
        graph("a").add_edge("a", "a", np.zeros((2, 2, 2)))


def test_what_alone_makes_a_graph_impossible_is_named_by_the_search():
    """Such a graph can be built: inf entries are input like any other."""
    alone = graph("a")
    alone.add_operator("b", [[[np.inf, 1.0]], []])
    with pytest.raises(ValueError, match=r"no strategy is possible: operator 'b'.*all are impossible"):
        track_frontier(alone)
    made = graph("a", "b")
    table = np.full((2, 2, 2), np.inf)
    table[1, 1] = 0
    made.add_edge("a", "b", table, rows=[0, 0], cols=[0, 1])
    with pytest.raises(ValueError, match=r"edge 'a' -> 'b' allows no pair"):
        track_frontier(made)


@pytest.mark.parametrize("method", ["auto", "ldp", "elimination"])
def test_a_graph_in_which_nothing_is_possible_names_the_edge(method):
    made = graph("a", "b", "c")
    only = np.full((2, 2, 2), np.inf)
    only[0, 0] = 0
    made.add_edge("a", "b", only)
    made.add_edge("b", "c", only[::-1])
    with pytest.raises(ValueError, match=r"no strategy is possible.*'b'"):
        track_frontier(made, method=method)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"method": "best"}, "auto, ldp, elimination"),
        ({"epsilon": -0.1}, "epsilon is -0.1"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"max_points": 1}, "max_points is 1"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_bad_settings_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        track_frontier(graph("a"), **settings)


def test_a_point_that_is_not_there():
    found = track_frontier(graph("a"))
    with pytest.raises(IndexError, match="point 1"):
        found.strategy(1)
    assert found.strategy(-1) == found.strategy(0)
