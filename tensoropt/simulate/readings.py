"""How each of many strategies sees the tensors: as groups write and read them, and as hubs hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from tensoropt.costs.effects import Reading
from tensoropt.costs.variables import Variable
from tensoropt.ops.layouts import Layout
from tensoropt.sharding.regions import region_of
from tensoropt.simulate.candidates import Candidates
from tensoropt.types import Indices

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Column(Generic[Value]):
    """One value per strategy: the distinct ``values``, and per strategy ``which`` of them it has."""

    which: Indices
    values: list[Value]

    def at(self, row: int) -> Value:
        """The value of one strategy."""
        return self.values[self.which[row]]


def column(values: Sequence[Value], which: Indices) -> Column[Value]:
    """The column of ``values[which]``, in which equal values have become one."""
    found: dict[Any, int] = {}
    # Equal readings of different configurations become one, which is what keeps the combinations of readers
    # few.
    number = np.array([found.setdefault(v, len(found)) for v in values], dtype=np.int64)
    return Column(number[which], list(found))


def distinct(columns: Sequence[Indices]) -> tuple[Indices, Indices]:
    """(a row of each distinct combination, per row the number of its combination)."""
    # A mixed-radix code of the columns so far, made dense again after each column, so that the product stays
    # below (rows x values) and cannot overflow.
    code = np.zeros(len(columns[0]), dtype=np.int64)
    firsts = np.zeros(1, dtype=np.int64)
    for one in columns:
        _, firsts, code = np.unique(
            code * (int(one.max(initial=0)) + 1) + one, return_index=True, return_inverse=True
        )
    return firsts, code


class Readings:
    """The choices of many strategies, seen from the tensors.

    Args:
        choices, options: per variable and per group the index of every strategy.
    """

    def __init__(
        self, candidates: Candidates, choices: Mapping[str, Indices], options: Mapping[str, Indices]
    ):
        self.candidates, self.choices, self.options = candidates, choices, options
        self.graph = candidates.graph
        self.count = len(next(iter(choices.values()))) if choices else 1
        self._region_of = region_of(candidates.regions)
        self._seen: dict[tuple[str, str, bool], Column[Reading]] = {}

    def written(self, group: str, name: str) -> Column[Reading]:
        """How a group leaves a tensor that it makes."""
        return self._reading(group, name, writes=True)

    def read(self, group: str, name: str) -> Column[Reading]:
        """How a group reads a tensor."""
        return self._reading(group, name, writes=False)

    def _reading(self, group_name: str, name: str, *, writes: bool) -> Column[Reading]:
        asked = group_name, name, writes
        if asked not in self._seen:
            group, candidates = self.graph.group_of[group_name], self.candidates
            short = group.short_names[name]
            looks = zip(
                candidates.configurations(group),
                candidates.facts(group),
                candidates.again(group),
                strict=True,
            )
            if writes:
                found = [
                    Reading(
                        c.layout(name),
                        short in f.writes_kept,
                        again,
                        f.lies_in.get(short, ""),
                        f.extents.get(short),
                    )
                    for c, f, again in looks
                ]
            else:
                found = [
                    Reading(
                        c.layout(name), short in f.reads_kept, again, extent=f.gradient_extents.get(short)
                    )
                    for c, f, again in looks
                ]
            self._seen[asked] = column(found, self.choices[group_name])
        return self._seen[asked]

    def hub(self, name: str) -> Column[Layout] | None:
        """Where a tensor with several readers is materialised; None of others."""
        if name not in self.graph.hubs:
            return None
        return column(self.candidates.hubs(name), self.choices[Variable.of_hub(name)])

    def inside(self, producer: str, reader: str) -> bool:
        """Whether a tensor is made and read in one region."""
        region = self._region_of.get(reader)
        return region is not None and region is self._region_of.get(producer)

    def stored(self) -> dict[str, Column[Layout]]:
        """Per parameter how it is stored."""
        found: dict[str, Column[Layout]] = {}
        for group in self.graph.groups:
            choices, options = self.choices[group.name], self.options[group.name]
            firsts, which = distinct([choices, options])
            for position, name in enumerate(group.parameters):
                layouts = [
                    self.candidates.stored(group, int(choices[row]), int(options[row]))[position]
                    for row in firsts
                ]
                found[name] = column(layouts, which)
        for name in self.graph.shared:
            found[name] = column(self.candidates.shared(name), self.choices[Variable.of_parameter(name)])
        return found
