"""Views that many strategies have of the tensors: as groups write and read them, and as hubs hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from tensoropt.costs.effects import Reading, WeightProduct
from tensoropt.costs.variables import Variable
from tensoropt.ops.families.stages import ARRIVE
from tensoropt.ops.layouts import Layout
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload
from tensoropt.sharding.groups import Group
from tensoropt.sharding.regions import region_of
from tensoropt.simulate.candidates import Candidates
from tensoropt.simulate.known import Known
from tensoropt.types import Indices

Value = TypeVar("Value")
_LARGEST_CODE = 2**62


@dataclass(frozen=True, slots=True)
class Column(Generic[Value]):
    """One value per strategy: the distinct ``values``, and per strategy the index ``which`` of its value."""

    which: Indices
    values: list[Value]

    def at(self, row: int) -> Value:
        """The value of one strategy."""
        return self.values[self.which[row]]


def distinct(columns: Sequence[Indices]) -> tuple[Indices, Indices]:
    """(a row with each distinct combination; for each row, the number of its combination)."""
    # A mixed-radix code of the columns so far, made dense again if the next column's values could overflow
    # it.
    firsts, code, size = np.zeros(1, dtype=np.int64), np.zeros(len(columns[0]), dtype=np.int64), 1
    for one in columns:
        base = int(one.max(initial=0)) + 1
        if size * base > _LARGEST_CODE:
            firsts, code = np.unique(code, return_index=True, return_inverse=True)[1:]
            size = len(firsts)
        code, size = code * base + one, size * base
    return np.unique(code, return_index=True, return_inverse=True)[1:]


class Readings:
    """The choices of many strategies, from the tensors' point of view.

    Args:
        choices, options: for each variable and each group, the index that every strategy chose.
        product: for a group's configuration that reads a tensor, the product with which the gradient's
            reduction may overlap.
        known: that of earlier batches of the same candidates. Equal readings and layouts have equal numbers
            in all of them, which keeps the combinations of readers few.
    """

    def __init__(
        self,
        candidates: Candidates,
        choices: Mapping[str, Indices],
        options: Mapping[str, Indices],
        product: Callable[[Group, str, Workload, Facts], WeightProduct | None] = lambda *_: None,
        known: Known | None = None,
    ):
        self.candidates, self.choices, self.options = candidates, choices, options
        self.product = product
        self.known = Known() if known is None else known
        self.graph = candidates.graph
        self.count = len(next(iter(choices.values()))) if choices else 1
        self._region_of = self.known.once("regions of groups", lambda: region_of(candidates.regions))
        self._seen: dict[tuple[str, str, bool], Column[Reading]] = {}

    def written(self, group: str, name: str) -> Column[Reading]:
        """The way in which a group leaves a tensor that it makes."""
        return self._reading(group, name, writes=True)

    def read(self, group: str, name: str) -> Column[Reading]:
        """The way in which a group reads a tensor."""
        return self._reading(group, name, writes=False)

    def _reading(self, group_name: str, name: str, *, writes: bool) -> Column[Reading]:
        asked = group_name, name, writes
        if asked not in self._seen:
            group, known = self.graph.group_of[group_name], self.known
            # Equal groups see their tensors in the same way, each under its own name.
            key = ("reading", self.candidates.signature(group), group.short_names[name], writes)
            numbers = known.once(key, lambda: self._numbers(group, name, writes=writes))
            self._seen[asked] = Column(numbers[self.choices[group_name]], known.readings.values)
        return self._seen[asked]

    def _numbers(self, group: Group, name: str, *, writes: bool) -> Indices:
        """The number of the way in which a group writes or reads a tensor, per configuration of the group."""
        short, candidates = group.short_names[name], self.candidates
        configurations, again = candidates.configurations(group), candidates.again(group)
        looks = zip(configurations, candidates.facts(group), again, strict=True)
        if writes:
            found = [
                Reading(
                    c.layout(name),
                    short in f.writes_kept,
                    again,
                    f.lies_in.get(short, ""),
                    f.extents.get(short),
                    given=group.anchor.target == ARRIVE,
                )
                for c, f, again in looks
            ]
        else:
            found = [
                Reading(
                    c.layout(name),
                    short in f.reads_kept,
                    again,
                    extent=f.gradient_extents.get(short),
                    product=self.product(group, name, work, f),
                )
                for (c, f, again), work in zip(looks, candidates.works(group), strict=True)
            ]
        return np.array([self.known.readings.of(reading) for reading in found], dtype=np.int64)

    def keeps(self, group_name: str, buffer: str, view: str = "") -> np.ndarray:
        """Whether a group's backward, or its second forward, needs a buffer that it reads, per strategy.

        Args:
            view: if given, whether this result of the group is a view of the buffer, instead.
        """
        group, candidates = self.graph.group_of[group_name], self.candidates
        short, result = group.short_names[buffer], group.short_names[view] if view else ""

        def found() -> np.ndarray:
            looks = zip(candidates.facts(group), candidates.again(group), strict=True)
            if view:
                return np.array([facts.lies_in_free.get(result) == short for facts, _ in looks], dtype=bool)
            return np.array([short in facts.free_kept or again for facts, again in looks], dtype=bool)

        key = ("keeps", candidates.signature(group), short, result)
        return np.asarray(self.known.once(key, found)[self.choices[group_name]])

    def used(self, group_name: str, name: str) -> Column[Layout]:
        """The layout in which a group uses a parameter."""
        group, known = self.graph.group_of[group_name], self.known
        layouts = known.once(
            ("use", self.candidates.signature(group), group.short_names[name]),
            lambda: np.array(
                [known.layouts.of(c.layout(name)) for c in self.candidates.configurations(group)],
                dtype=np.int64,
            ),
        )
        return Column(layouts[self.choices[group_name]], known.layouts.values)

    def hub(self, name: str) -> Column[Layout] | None:
        """The placement in which a tensor with several readers is materialised; None for other tensors."""
        if name not in self.graph.hubs:
            return None
        return self._layouts(name, self.candidates.hubs, Variable.of_hub)

    def _layouts(
        self, name: str, of: Callable[[str], Sequence[Layout]], variable: Callable[[str], Variable]
    ) -> Column[Layout]:
        known = self.known

        def numbers() -> tuple[Variable, Indices]:
            return variable(name), np.array([known.layouts.of(layout) for layout in of(name)], dtype=np.int64)

        chosen, numbered = known.once(("layouts", name), numbers)
        return Column(numbered[self.choices[chosen]], known.layouts.values)

    def inside(self, producer: str, reader: str) -> bool:
        """Whether a tensor is produced and read in the same region."""
        region = self._region_of.get(reader)
        return region is not None and region is self._region_of.get(producer)

    def stored(self) -> dict[str, Column[Layout]]:
        """The stored layout of each parameter."""
        found: dict[str, Column[Layout]] = {}
        for group in self.graph.groups:
            if not group.parameters:
                continue
            choices, options = self.choices[group.name], self.options[group.name]
            firsts, which = distinct([choices, options])
            numbers = np.array([self._stored(group, int(choices[r]), int(options[r])) for r in firsts])
            for position, name in enumerate(group.parameters):
                found[name] = Column(numbers[which, position], self.known.layouts.values)
        for name in self.graph.shared:
            found[name] = self._layouts(name, self.candidates.shared, Variable.of_parameter)
        return found

    def _stored(self, group: Group, choice: int, option: int) -> list[int]:
        """The numbers of the layouts in which a group's own parameters are stored."""
        return [self.known.layouts.of(layout) for layout in self.candidates.stored(group, choice, option)]
