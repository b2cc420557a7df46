"""Working sets: the memory that a group needs while it runs, in addition to what is kept.

The search adds memory up, but only the largest working set at any moment counts. Searching under caps on it
finds plans that a sum cannot distinguish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tensoropt.costs.cost_graph import Allowed, VariableTable
from tensoropt.costs.move_effects import MoveEffects
from tensoropt.costs.tables import CostTables
from tensoropt.ops.layouts import Layout
from tensoropt.profiling.facts import Facts
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.groups import Group

# An assumption: every cap is one more search of the space.
_CAPS = 2
_WORTH = 0.02
"""The share of the leanest plan's memory that a cap must be able to save to be worth a search."""


@dataclass(frozen=True)
class WorkingSets:
    """The bytes that groups need while they run.

    Attributes:
        of: per group and configuration, an array over its options.
    """

    of: Mapping[str, Sequence[np.ndarray]]

    def caps(self, choice: Mapping[str, int], options: Mapping[object, int], memory: float) -> list[float]:
        """The caps worth a search, ascending: from the least that some group needs to just below what this
        strategy needs; none if that is a small part of its ``memory``."""
        floor = max((min(float(a.min()) for a in each if a.size) for each in self.of.values()), default=0.0)
        used = max((float(self.of[g][choice[g]][options.get(g, 0)]) for g in self.of), default=0.0)
        if used - floor <= _WORTH * memory:
            return []
        # Geometric steps are an assumption. The last of them is what the strategy itself needs: under it the
        # same strategy would result, so it is left out.
        return [float(cap) for cap in np.geomspace(max(floor, 1.0), used, _CAPS + 1)[:-1]]

    def within(self, cap_bytes: float) -> Allowed:
        """What a graph is restricted to under a cap: the options whose groups need no more while they run."""

        def allowed(variable: VariableTable, index: int) -> np.ndarray | None:
            needed = self.of.get(variable.key)
            return None if needed is None else needed[index] <= cap_bytes

        return allowed


def working_sets(tables: CostTables) -> WorkingSets:
    """The working sets of all groups of the tables, in bytes of one rank."""
    known: dict[int, list[np.ndarray]] = {}
    found, sizes = {}, MoveEffects(tables.prices)
    for group in tables.graph.groups:
        # Equal layers share this tuple (TableBuilder._group), so each kind of layer is computed once.
        key = id(tables.of[group.name].options)
        if key not in known:
            known[key] = _of_group(tables, sizes, group)
        found[group.name] = known[key]
    return WorkingSets(found)


def _of_group(tables: CostTables, sizes: MoveEffects, group: Group) -> list[np.ndarray]:
    facts = tables.templates[group.name].facts
    return [
        np.array([_bytes(sizes, tables.configuration(group, i), facts[i % len(facts)], o) for o in options])
        for i, options in enumerate(tables.of[group.name].options)
    ]


def _bytes(sizes: MoveEffects, configuration: Configuration, facts: Facts, stored: Sequence[Layout]) -> float:
    """The larger of forward and backward: inputs and results, with parameters gathered."""
    group = configuration.group
    reads = sum(sizes.bytes(n, configuration.layout(n)) for n in group.reads)
    gathered = sum(
        size
        for n, layout in zip(group.parameters, stored, strict=True)
        # Only parameters that are larger at their use than in storage are gathered; those stored as used
        # count with the parameters.
        if (size := sizes.bytes(n, configuration.layout(n))) > sizes.bytes(n, layout)
    )
    forward = max(facts.forward_peak_bytes, facts.forward_parameters_peak_bytes + gathered)
    backward = max(facts.backward_peak_bytes, facts.backward_parameters_peak_bytes + gathered)
    return float(max(reads + forward, backward if sizes.training else 0))
