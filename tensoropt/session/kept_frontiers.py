"""Search results of single spaces, kept for explorations that search in the same way.

An interrupted exploration continues where it ended, and published planners are compared without a new search.
Every step of the search follows from the exploration's question, so its place among the steps identifies it.
The profile store holds numbers and texts only, from which the objects are made again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from tensoropt.costs.tables import CostTables
from tensoropt.errors import TensorOptError
from tensoropt.processes import as_forks_end
from tensoropt.profiling.store import ProfileStore
from tensoropt.search import Staircase, TrackedFrontier
from tensoropt.search.bands import BandBound
from tensoropt.search.bounds import Highest, Lowest
from tensoropt.search.hull import Hull
from tensoropt.search.reduced_graph import Caps
from tensoropt.search.result import ChosenStrategies
from tensoropt.session.one_space import SpacePart
from tensoropt.session.simulations import Simulated
from tensoropt.session.turns import Found

KIND = "frontiers"
BOUNDS = {kind.__name__: kind for kind in (BandBound, Caps, Highest, Hull, Lowest, Staircase)}
"""What a bound consists of, by name."""


class KeptFrontiers:
    """The kept steps of one search.

    Args:
        store: None keeps nothing.
        key: identifies everything that decides what this search finds.
    """

    def __init__(self, store: ProfileStore | None = None, key: str = ""):
        self.store, self.key = store, key
        self._step = 0

    def each(
        self, work: Callable[[int], SpacePart], numbers: Sequence[int], tables: Callable[[int], CostTables]
    ) -> list[SpacePart]:
        """Run ``work`` on each of some spaces, in forks; for kept spaces, return what was found then.

        Args:
            tables: returns the tables of a space; what was found in tables with other numbers (timed anew) is
                ignored.
        """
        self._step += 1
        parts = {number: self._read(number, tables(number)) for number in numbers}
        left = [number for number, part in parts.items() if part is None]
        # Kept as they come, before the others of this step are there: one of them may be interrupted.
        for _, part in as_forks_end(work, left):
            parts[part.number] = part
            self._write(part, tables(part.number))
        return [part for part in parts.values() if part is not None]

    def _name(self, number: int, tables: CostTables) -> str:
        return f"{self.key}-{self._step}-{number}-{tables.digest[:16]}"

    def _read(self, number: int, tables: CostTables) -> SpacePart | None:
        data = None if self.store is None else self.store.get(self._name(number, tables), KIND)
        # Missing, or damaged in whatever way: treated as missing.
        with contextlib.suppress(Exception):
            return None if data is None else part_from(data, number, tables)
        return None

    def _write(self, part: SpacePart, tables: CostTables) -> None:
        if self.store is None:
            return
        # What cannot be written is searched once more the next time.
        with contextlib.suppress(TensorOptError):
            self.store.put(self._name(part.number, tables), data_of(part, tables), KIND)


def data_of(part: SpacePart, tables: CostTables) -> dict[str, Any]:
    """Return the results for a space as JSON in which arrays stand; each frontier once."""
    every = (part.frontier, *(found for _, found in part.capped), *(found.frontier for found in part.every))
    frontiers = list({id(frontier): frontier for frontier in every if frontier is not None}.values())
    place: dict[int, int | None] = {id(frontier): place for place, frontier in enumerate(frontiers)}
    place[id(None)] = None
    columns: dict[str, int] = {variable.key: column for column, variable in enumerate(tables.variables)}
    return {
        "frontiers": [_frontier_data(frontier, columns) for frontier in frontiers],
        "frontier": place[id(part.frontier)],
        "capped": [(cap, place[id(frontier)]) for cap, frontier in part.capped],
        "every": [(found.space, place[id(found.frontier)], found.numbers) for found in part.every],
        "simulated": [getattr(part.simulated, field.name) for field in fields(Simulated)],
        "refused": part.refused,
        "took_s": part.took_s,
    }


def part_from(data: dict[str, Any], number: int, tables: CostTables) -> SpacePart:
    """Return the results for a space with these tables, of :func:`data_of`."""
    keys = [variable.key for variable in tables.variables]
    frontiers = [_frontier_from(frontier, keys) for frontier in data["frontiers"]]
    every = []
    for space, place, numbers in data["every"]:
        every.append(Found(space, frontiers[place]))
        every[-1].numbers = numbers
    return SpacePart(
        number,
        None if data["frontier"] is None else frontiers[data["frontier"]],
        tuple((cap, None if place is None else frontiers[place]) for cap, place in data["capped"]),
        every,
        Simulated(*data["simulated"]),
        data["refused"],
        data["took_s"],
    )


def _frontier_data(frontier: TrackedFrontier, columns: dict[str, int]) -> dict[str, Any]:
    chosen = frontier.strategies()
    edges = [(columns[source], columns[target], ordinal) for source, target, ordinal in chosen.edges]
    return {
        "points": (frontier.memory, frontier.time, frontier.exact, frontier.notes),
        "edges": np.array(edges, np.int64).reshape(-1, 3),
        "strategies": (chosen.configurations, chosen.options, chosen.edge_options),
        "bounds": _bound_data(frontier.bounds.__self__),  # type: ignore[attr-defined]
    }


def _frontier_from(data: dict[str, Any], keys: Sequence[str]) -> TrackedFrontier:
    memory, time, exact, notes = data["points"]
    edges = [(keys[source], keys[target], ordinal) for source, target, ordinal in data["edges"].tolist()]
    chosen = ChosenStrategies(keys, edges, *data["strategies"])
    return TrackedFrontier(memory, time, exact, tuple(notes), chosen.at, _bound_from(data["bounds"]).bounds)


def _bound_data(value: Any) -> Any:
    """Return a bound, or part of one, as a list that begins with its name in :data:`BOUNDS`."""
    if isinstance(value, (list, tuple)):
        return list(map(_bound_data, value))
    name = type(value).__name__
    if name in BOUNDS:
        return [name, *(_bound_data(getattr(value, field.name)) for field in fields(value))]
    return value


def _bound_from(data: Any) -> Any:
    if not isinstance(data, list):
        return data
    if data and isinstance(data[0], str):
        return BOUNDS[data[0]](*map(_bound_from, data[1:]))
    return tuple(map(_bound_from, data))
