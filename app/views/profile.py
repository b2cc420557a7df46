"""The paper's profiling mode: devices × memory → time, over every exploration of one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tensoropt.errors import TensorOptError
from tensoropt.plan import Exploration

from ..library import Library
from .frontier import FrontierData, unit_for
from .units import Units

COLUMNS = 6


@dataclass(frozen=True)
class ProfileRow:
    label: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class ProfileTable:
    """Fastest time per device count (rows) within a memory budget per device (columns); — where none fits."""

    head: tuple[str, ...]
    rows: tuple[ProfileRow, ...]


def devices_by_memory(library: Library, key: str) -> ProfileTable | None:
    """The table for the model of exploration ``key``; None while only one device count is known."""
    try:
        chosen = library.load(key)
    except TensorOptError:
        return None
    same = [found for found in _loaded(library) if _alike(found, chosen)]
    curves: dict[tuple[int, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    for found in same:
        data = FrontierData.of(found)
        for count in np.unique(data.devices):
            rows = data.devices == count
            curves.setdefault((int(count), data.device), []).append((data.memory[rows], data.time[rows]))
    if len(curves) < 2:
        return None
    return table_of({k: _joined(v) for k, v in curves.items()}, Units.of(chosen))


def _loaded(library: Library) -> list[Exploration]:
    found = []
    for entry in library.entries():
        try:
            found.append(library.load(entry.key))
        except TensorOptError:
            continue
    return found


def _alike(a: Exploration, b: Exploration) -> bool:
    """The same step: model, batch, mode and optimizer."""

    def step(e: Exploration) -> tuple[Any, ...]:
        return e.model.fingerprint, e.settings.get("mode"), e.settings.get("optimizer")

    return step(a) == step(b)


def _joined(curves: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([m for m, _ in curves]), np.concatenate([t for _, t in curves])


def table_of(curves: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]], units: Units) -> ProfileTable:
    """Budgets spread evenly over the logarithm of memory, from the leanest plan to the fattest."""
    memory = np.concatenate([m for m, _ in curves.values()])
    budgets = np.geomspace(memory.min(), memory.max(), COLUMNS)
    rows = []
    for (count, device), (sizes, times) in sorted(curves.items()):
        cells = []
        for budget in budgets:
            fitting = times[sizes <= budget * (1 + 1e-9)]
            cells.append(units.time.text(float(fitting.min())) if len(fitting) else "—")
        rows.append(ProfileRow(f"{count} × {device}", tuple(cells)))
    return ProfileTable(tuple(unit_for(b).text(float(b)) for b in budgets), tuple(rows))
