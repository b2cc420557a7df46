"""One model on several numbers of devices: the paper's profiling mode, and mini-parallelism.

A device sweep is a folder of explorations, one per number of devices, as ``tensoropt explore --devices``
leaves it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.plan.cluster_offers import ClusterCurve
from tensoropt.plan.exploration import Exploration, load_exploration
from tensoropt.plan.exploration_files import DESCRIBED
from tensoropt.plan.settings import settings_fields
from tensoropt.units import format_bytes

BUDGETS = 6
"""Columns of a profile: as many as fit into a terminal's width."""


@dataclass(frozen=True)
class Cell:
    """The fastest plan of some devices within a budget: its time, whose it is, and which point."""

    time_s: float
    exploration: int
    point: int


@dataclass(frozen=True)
class Row:
    """One kind and number of devices; None where no plan fits."""

    devices: int
    kind: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Profile:
    """Devices × memory → time.

    Attributes:
        budgets_bytes: of the columns, per device.
        rows: ascending in devices.
    """

    budgets_bytes: tuple[float, ...]
    rows: tuple[Row, ...]


def folders_in(folder: str | os.PathLike[str] | None) -> Iterator[Path]:
    """The folder itself if it is an exploration, else those of its children that are, by name."""
    if folder is None or not Path(folder).is_dir():
        return
    if (Path(folder) / DESCRIBED).is_file():
        yield Path(folder)
        return
    for child in sorted(Path(folder).iterdir()):
        if (child / DESCRIBED).is_file():
            yield child


def load_sweep(
    folder: str | os.PathLike[str], damaged: dict[str, str] | None = None
) -> tuple[Exploration, ...]:
    """The explorations of a folder, ascending in devices; one where the folder is an exploration itself.

    Args:
        damaged: gets the reason for each that cannot be read, by name; without it, that is an error.

    Raises:
        TensorOptError: there is none, one is damaged, or they are not of one model's step.
    """
    sweep = []
    for path in folders_in(folder):
        try:
            sweep.append(load_exploration(path))
        except TensorOptError as error:
            if damaged is None:
                raise
            damaged[path.name] = str(error)
    if not sweep:
        reasons = [f"{name}: {reason}" for name, reason in (damaged or {}).items()]
        reason = "; ".join(reasons) or f"no {DESCRIBED} in it or in a folder of it"
        raise TensorOptError(
            f"{folder} holds no exploration that can be read ({reason}); run `tensoropt explore` with --out"
        )
    if len({same_step(exploration.model.fingerprint, exploration.settings) for exploration in sweep}) > 1:
        raise TensorOptError(
            f"{folder} holds explorations of different models or settings, which cannot be compared; name "
            "one of them, or keep those of one in a folder of their own"
        )
    return tuple(sorted(sweep, key=lambda exploration: exploration.devices))


def same_step(fingerprint: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """What explorations must share to be compared: the operators, and what is done with them in a step.

    Args:
        fingerprint: of the operators.
        settings: as the exploration keeps them.
    """
    of_step = (setting for setting in settings_fields() if setting.of_step)
    return fingerprint, *(str(settings.get(setting.name, setting.default)) for setting in of_step)


def profile(curves: Sequence[ClusterCurve], columns: int = BUDGETS) -> Profile:
    """The fastest step per number of devices and memory budget.

    A cell's ``exploration`` is its place in ``curves``.
    Budgets are spread evenly over the logarithm of memory, from what the leanest plan of all needs to what
    the fattest needs; what plans need on each number of devices differs by factors.
    """
    known = [(number, curve) for number, curve in enumerate(curves) if len(curve.memory)]
    sizes = np.concatenate([curve.memory for _, curve in known]) if known else np.array([])
    budgets = np.geomspace(sizes.min(), sizes.max(), columns) if len(sizes) else np.array([])
    alike: dict[tuple[int, str], list[tuple[int, ClusterCurve]]] = {}
    for number, curve in enumerate(curves):
        alike.setdefault((curve.count, curve.smallest.kind), []).append((number, curve))
    return Profile(
        tuple(map(float, budgets)),
        tuple(
            Row(devices, kind, tuple(_fastest(some, float(budget)) for budget in budgets))
            for (devices, kind), some in sorted(alike.items(), key=lambda item: item[0])
        ),
    )


def _fastest(curves: Sequence[tuple[int, ClusterCurve]], budget_bytes: float) -> Cell | None:
    best: tuple[float, float, int, int] | None = None
    for number, curve in curves:
        # The ends of the budgets are memories of points, which geomspace may miss by a rounding.
        point = int(np.searchsorted(curve.memory, budget_bytes * (1 + 1e-9), side="right")) - 1
        if point >= 0:
            found = (float(curve.time[point]), float(curve.memory[point]), number, point)
            best = found if best is None else min(best, found)
    return None if best is None else Cell(best[0], best[2], best[3])


def member(sweep: Sequence[Exploration], devices: int) -> Exploration:
    """The exploration on that many devices.

    Raises:
        TensorOptError: there is none; names the numbers there are.
    """
    for found in sweep:
        if found.devices == devices:
            return found
    raise TensorOptError(f"there is no exploration on {devices} devices; there are {_counts(sweep)}")


def fewest_devices(
    sweep: Sequence[Exploration], memory_bytes: float | None, time_s: float | None
) -> Exploration:
    """Mini-parallelism: the exploration on the fewest devices that has a plan within both limits.

    Raises:
        InfeasibleError: none has; says what would fit.
    """
    # load_sweep sorts ascending in devices: the first that fits has the fewest.
    for found in sweep:
        try:
            found.index(memory_bytes=memory_bytes, time_s=time_s)
        except InfeasibleError:
            continue
        return found
    leanest = min(sweep, key=lambda found: found.points[0].memory_bytes)
    fastest = min(sweep, key=lambda found: found.points[-1].time_s)
    raise InfeasibleError(
        f"no plan on {_counts(sweep)} devices is within the limits; the leanest needs "
        f"{format_bytes(leanest.points[0].memory_bytes)} on {leanest.devices} devices, the fastest takes "
        f"{fastest.points[-1].time_s:.3g} s on {fastest.devices}"
    )


def _counts(sweep: Sequence[Exploration]) -> str:
    return ", ".join(str(found.devices) for found in sweep)
