"""Estimates of how long tables, and searches of them, will take: the remaining time that people are shown.

The seconds are those of one machine with two cores; another machine's pace is learned while work goes on
(:class:`tensoropt.profiling.eta.Remaining`). No figure of a plan depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping

from tensoropt.costs.tables import CostTables, Template
from tensoropt.sharding.groups import GroupGraph

FACTS_S = 4.5e-3
"""Seconds to find one workload's facts, on two cores."""
CONFIGURATION_S, PAIR_S = 2e-3, 5e-6
"""Seconds of building tables, per configuration of a group and per pair of configurations of neighbours."""
VARIABLE_S, ENTRY_S = 3e-3, 1e-4
"""Seconds of a space's search, per variable and per entry of distinct pair tables."""
MOST_S = 15.0
"""The most seconds of a space's search: passes have limits, and the largest spaces are only outlined."""
ENTRIES_RECOMPUTED, ENTRIES = 4.0, 0.12
"""Table entries per pair of configurations, with and without recomputation."""


def tables_s(graph: GroupGraph, templates: Mapping[str, Template]) -> float:
    """The estimated seconds to build a space's tables."""
    configurations = {id(template): len(template.works) for template in templates.values()}
    return CONFIGURATION_S * sum(configurations.values()) + PAIR_S * _pairs(graph, templates)


def guessed_search_s(graph: GroupGraph, templates: Mapping[str, Template], recomputed: bool) -> float:
    """The estimated seconds to search a space, before its tables are built."""
    entries = _pairs(graph, templates) * (ENTRIES_RECOMPUTED if recomputed else ENTRIES)
    return min(MOST_S, VARIABLE_S * len(graph.groups) + ENTRY_S * entries)


def search_s(tables: CostTables) -> float:
    """The estimated seconds to search a space."""
    # Layers that look alike share tables, and the search does the shared work once.
    entries = {id(edge.table): edge.table[..., 0].size for edge in tables.edges}
    return min(MOST_S, VARIABLE_S * len(tables.variables) + ENTRY_S * sum(entries.values()))


def _pairs(graph: GroupGraph, templates: Mapping[str, Template]) -> int:
    """Number of configuration pairs of groups that pass a tensor on; groups that look alike count once."""
    producer = graph.atoms.graph.producer
    different = {
        (id(templates[group.name]), id(templates[graph.group_of[producer[name].name].name])): (
            len(templates[group.name].works) * len(templates[graph.group_of[producer[name].name].name].works)
        )
        for group in graph.groups
        for name in group.reads
    }
    return sum(different.values())
