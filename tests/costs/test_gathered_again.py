"""The option of an edge to gather a tensor again: what it costs, and pins."""

from __future__ import annotations

from math import inf

import numpy as np

from tensoropt.costs.cost_graph import edge_keys
from tensoropt.costs.restrictions import Restriction
from tensoropt.costs.tables import CostTables
from tensoropt.costs.variables import Variable
from tests.costs.models import problem, tables_of, three


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
