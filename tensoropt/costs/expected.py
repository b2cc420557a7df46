"""About how long tables, and searches of them, will take: what people are told of the time that is left.

The seconds are of one machine with two cores; another's pace comes out while work goes on
(:class:`tensoropt.session.remaining.Remaining`). No figure of a plan rests on them.
"""

from __future__ import annotations

from collections.abc import Mapping

from tensoropt.costs.tables import CostTables, Template
from tensoropt.sharding.groups import GroupGraph

FACTS_S = 4.5e-3
"""Of a workload's facts, found on two cores."""
CONFIGURATION_S, PAIR_S = 2e-3, 5e-6
"""Of the tables, per configuration of a group and per pair of configurations of neighbours."""
VARIABLE_S, ENTRY_S = 3e-3, 1e-4
"""Of a space's search, per variable and per entry of different tables of pairs."""
MOST_S = 15.0
"""Of a space's search: passes have limits, and the largest spaces are outlined only."""
ENTRIES_RECOMPUTED, ENTRIES = 4.0, 0.12
"""Entries of tables per pair of configurations, where groups may be recomputed and where not."""


def tables_s(graph: GroupGraph, templates: Mapping[str, Template]) -> float:
    """Seconds that the tables of a space take."""
    configurations = {id(template): len(template.works) for template in templates.values()}
    return CONFIGURATION_S * sum(configurations.values()) + PAIR_S * _pairs(graph, templates)


def guessed_search_s(graph: GroupGraph, templates: Mapping[str, Template], recomputed: bool) -> float:
    """Seconds that the search of a space takes, before its tables are made."""
    entries = _pairs(graph, templates) * (ENTRIES_RECOMPUTED if recomputed else ENTRIES)
    return min(MOST_S, VARIABLE_S * len(graph.groups) + ENTRY_S * entries)


def search_s(tables: CostTables) -> float:
    """Seconds that the search of a space takes."""
    # Layers that look alike share tables, and the search makes what they share once.
    entries = {id(edge.table): edge.table[..., 0].size for edge in tables.edges}
    return min(MOST_S, VARIABLE_S * len(tables.variables) + ENTRY_S * sum(entries.values()))


def _pairs(graph: GroupGraph, templates: Mapping[str, Template]) -> int:
    """Pairs of configurations of groups that hand on a tensor; of groups that look alike once."""
    producer = graph.atoms.graph.producer
    different = {
        (id(templates[group.name]), id(templates[graph.group_of[producer[name].name].name])): (
            len(templates[group.name].works) * len(templates[graph.group_of[producer[name].name].name].works)
        )
        for group in graph.groups
        for name in group.reads
    }
    return sum(different.values())
