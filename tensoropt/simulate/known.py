"""Results derived once from candidates and kept for all their batches: numbers of equal values, effects."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from tensoropt.costs.effects import Effects, Reading, When
from tensoropt.ops.layouts import Layout
from tensoropt.sharding.together import Turn
from tensoropt.simulate.effect_tables import EffectTables
from tensoropt.types import Indices

Value = TypeVar("Value", bound=Hashable)


class Numbering(Generic[Value]):
    """A numbering that gives equal values equal numbers; ``values`` are in the order of first occurrence."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._numbers: dict[Value, int] = {}

    def of(self, value: Value) -> int:
        """The number of a value."""
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class Kind:
    """Owners that look alike, such as one tensor in every layer: equal choices have equal effects.

    Attributes:
        effects: the distinct effects so far, by number.
        tables: the same as arrays.
    """

    def __init__(self, micro: int):
        self.effects: list[Effects] = []
        self.tables = EffectTables(micro)
        self._positions: dict[Hashable, dict[When, Indices]] = {}
        self._numbers: dict[tuple[int, ...], int] = {}

    def positions(self, owners: Hashable) -> dict[When, Indices]:
        """The positions of each moment in the step schedule, one per owner; the caller fills the mapping.

        Args:
            owners: the owners, in order. They are part of the lookup key, because a batch may have other
                owners of the kind than the previous one: whether a parameter's readers are alike depends on
                how it is stored in the strategies of that batch.
        """
        return self._positions.setdefault(owners, {})

    def number(self, key: tuple[int, ...], make: Callable[[], Effects]) -> int:
        """The number of a choice's effects.

        Args:
            key: everything that they depend on besides the kind.
        """
        if key not in self._numbers:
            self._numbers[key] = len(self.effects)
            self.effects.append(make())
            self.tables.add(self.effects[-1])
        return self._numbers[key]


class Known:
    """The results that batches of the same candidates, schedule and prices share; the batches fill it."""

    def __init__(self) -> None:
        self.readings: Numbering[Reading] = Numbering()
        self.layouts: Numbering[Layout] = Numbering()
        self.turns: Numbering[Turn] = Numbering()
        # GradientStorage, which is defined in a module that imports this one.
        self.gradients: Numbering[Any] = Numbering()
        self.kinds: dict[Hashable, Kind] = {}
        self._found: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of ``make``, which is called for the first of all batches only."""
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]

    def kind(self, key: Hashable, mesh: Sequence[int]) -> Kind:
        """The kind of the owners that agree in ``key``."""
        if key not in self.kinds:
            self.kinds[key] = Kind(mesh[0])
        return self.kinds[key]
