"""The option of an edge to gather a tensor again: what it costs, that the search finds the best, and pins."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from tensoropt.costs.cost_graph import edge_keys
from tensoropt.costs.restrictions import Restriction
from tensoropt.costs.tables import CostTables
from tensoropt.costs.variables import Variable
from tensoropt.search import track_frontier
from tests.costs.models import problem, tables_of, three, two_layers


def cells_of(tables: CostTables, name: str) -> np.ndarray:
    edges = dict(zip(edge_keys(tables.edges), tables.edges, strict=True))
    return edges[tables.moves[name]].table


def test_gathering_again_costs_time_for_the_memory_of_the_copy():
    tables = tables_of(problem(three), (1, 4))
    assert tables.moves
    for name in tables.moves:
        kept, again = np.moveaxis(cells_of(tables, name), 2, 0)
        offered = again[..., 0] < inf
        assert offered.any()
        assert (again[offered][:, 0] < kept[offered][:, 0]).all()
        assert (again[offered][:, 1] > kept[offered][:, 1]).all()


def every_cost(tables: CostTables) -> np.ndarray:
    """(n, 2) what all combinations of configurations and of edges' options cost, parameters being stored as
    they are used."""
    names, shape = [v.key for v in tables.variables], [len(v.memory) for v in tables.variables]
    total = np.zeros((*shape, 1, 2))
    for place, v in enumerate(tables.variables):
        columns = zip(v.memory, v.compute, v.communication, strict=True)
        own = np.array([(m[0], c[0] + n[0]) for m, c, n in columns])
        total = total + own.reshape(*(len(own) if a == place else 1 for a in range(len(shape))), 1, 2)
    for edge in tables.edges:
        cells = edge.table if edge.table.ndim > 3 else edge.table[:, :, None]
        cells = cells[np.ix_(edge.rows, edge.cols)]
        ends = names.index(edge.a), names.index(edge.b)
        cells = cells if ends[0] < ends[1] else cells.swapaxes(0, 1)
        sizes = [size if place in ends else 1 for place, size in enumerate(shape)]
        wide = cells.reshape(*sizes, -1, 2)
        total = (total[..., :, None, :] + wide[..., None, :, :]).reshape(*shape, -1, 2)
    return total.reshape(-1, 2)


@pytest.mark.parametrize("build", [three, two_layers])
def test_the_best_tensors_to_gather_again_are_found(build):
    """Against every configuration with every set of tensors that are gathered again."""
    tables = tables_of(problem(build), (1, 2), "sgd")
    costs = every_cost(tables)
    costs = costs[np.isfinite(costs).all(axis=1)]
    costs = costs[np.lexsort((costs[:, 1], costs[:, 0]))]
    least = np.minimum.accumulate(costs[:, 1])
    best = costs[np.concatenate([[True], costs[1:, 1] < least[:-1]])]
    plain = tables.restricted(lambda v, i: np.arange(len(v.memory[i])) < 1)
    frontier = track_frontier(plain, epsilon=0.0)
    assert list(frontier.memory) == pytest.approx(list(best[:, 0]), rel=1e-12)
    assert list(frontier.time) == pytest.approx(list(best[:, 1]), rel=1e-12)


def test_pinned_groups_always_or_never_gather_again():
    prepared = problem(three)
    names = [group.name for group in prepared.graph.groups]
    free = tables_of(prepared, (1, 4))
    always = tables_of(prepared, (1, 4), restriction=Restriction(gathered_again=dict.fromkeys(names, True)))
    never = tables_of(prepared, (1, 4), restriction=Restriction(gathered_again=dict.fromkeys(names, False)))
    assert never.moves == {} == free.without_moves.moves
    assert always.moves == free.moves
    for name in free.moves:
        kept, again = np.moveaxis(cells_of(free, name), 2, 0)
        pinned_kept, pinned_again = np.moveaxis(cells_of(always, name), 2, 0)
        assert np.array_equal(again, pinned_again)
        assert np.array_equal(np.where(again[..., :1] < inf, inf, kept), pinned_kept)
    for ours, theirs in zip(never.edges, free.without_moves.edges, strict=True):
        assert np.array_equal(ours.table, theirs.table)


def test_the_options_name_the_tensor_or_its_edge():
    tables = tables_of(problem(three), (1, 4))
    name, edge = next(iter(tables.moves.items()))
    by_edge, by_name = {edge: 1}, {Variable.of_move(name): 1}
    assert tables.gathered_again(name, by_edge) == tables.gathered_again(name, by_name) == 1
    assert tables.gathered_again(name, {}) == 0
