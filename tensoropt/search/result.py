"""What a search returns: the frontier, its certificate, and lazily the strategy of any point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tensoropt.types import Floats

OptionKey = Any  # a name, or (source, target, n-th edge between them)


class ChosenStrategy(NamedTuple):
    """The strategy of one point: per operator its configuration; per operator and edge its option."""

    configurations: dict[str, int]
    options: dict[OptionKey, int]


def budget(memory: float) -> Floats:
    """(1,) a memory budget as bounds take it; ``ValueError`` where it is NaN."""
    if np.isnan(memory):
        raise ValueError("the memory budget is NaN; give bytes, or inf for no limit")
    return np.array([memory], dtype=np.float64)


@dataclass(frozen=True, eq=False)
class TrackedFrontier:
    """The cost frontier of a graph, with its certificate.

    ``memory`` (n,) bytes, ascending; ``time`` (n,) seconds, strictly descending. ``exact`` is True only
    when it is proven that no strategy beats or is missing from these points (of the additive model, every
    point within 4e-10 of its own cost). ``notes``: what was heuristic, in words, empty
    when nothing was.
    """

    memory: Floats
    time: Floats
    exact: bool
    notes: tuple[str, ...]
    unroll: Callable[[int], ChosenStrategy] = field(repr=False)
    bounds: Callable[[Floats], Floats] = field(repr=False)
    _cache: dict[int, ChosenStrategy] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.memory)

    def __repr__(self) -> str:
        word = "exact" if self.exact else "not proven exact"
        return f"TrackedFrontier({len(self.memory)} points, {word})"

    def lower_bound(self, memory: float) -> float:
        """A time no strategy within ``memory`` bytes can beat; inf where none fits.

        Raises ``ValueError`` where ``memory`` is NaN.
        """
        return float(self.bounds(budget(memory))[0])

    @property
    def gap(self) -> Floats:
        """(n,) per point: how much faster, at most, a strategy of no more memory could be (time / bound
        - 1).
        """
        bounds = self.bounds(self.memory)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.time <= bounds, 0.0, self.time / bounds - 1.0)

    @property
    def worst_gap(self) -> float:
        """The same over all memory budgets, also between the points: 0 for an exact frontier."""
        if self.exact or not len(self.memory):
            return 0.0
        bounds = self.bounds(np.append(np.nextafter(self.memory[1:], 0), np.inf))
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.where(self.time <= bounds, 0.0, self.time / bounds - 1.0).max(initial=0.0))

    def strategy(self, index: int) -> dict[str, int]:
        """Configuration of every operator at point ``index``; only this point is rebuilt."""
        return dict(self._chosen(index).configurations)

    def options(self, index: int) -> dict[OptionKey, int]:
        """Option of every operator, and of every edge under the key (source, target, n-th edge between
        them).
        """
        return dict(self._chosen(index).options)

    def _chosen(self, index: int) -> ChosenStrategy:
        n = len(self.memory)
        if not -n <= index < n:
            raise IndexError(f"point {index} of a frontier with {n} points")
        index %= n
        if index not in self._cache:
            self._cache[index] = self.unroll(index)
        return self._cache[index]
