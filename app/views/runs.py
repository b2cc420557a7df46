"""All explorations as rows of one table and curves of one plot, from the index: none of them is opened."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensoropt.plan.device_sweep import FILE
from tensoropt.plan.exploration_files import Costs

from ..index import Head
from ..library import Entry, Library
from .library import own_title, titles_of
from .units import Unit, Units

USUALLY_SHOWN = 12
"""Explorations that are drawn before a person chooses: more lines are hard to follow."""
MOST_POINTS, LEAST_POINTS = 10_000, 60
"""Drawn in all, and of one exploration at least."""


@dataclass(frozen=True, eq=False)
class Run:
    """One exploration.

    Attributes:
        entry: where it is.
        head: what it is of.
        curve: its points; None where they have not been read yet.
        title: what it is called in the table.
        label: the same, told apart from all others.
        tags: what a person gave it.
        style: the number of its colour, dash and symbol; None for one that cannot be read.
        model: what people call the model.
        made: when its file was written, seconds since the epoch; None where it is gone.
    """

    entry: Entry
    head: Head
    curve: Costs | None
    title: str
    label: str
    tags: tuple[str, ...]
    style: int | None
    model: str
    made: float | None

    @property
    def key(self) -> str:
        """Its key in the library."""
        return self.entry.key

    @property
    def points(self) -> int:
        """How many points its frontier has."""
        return 0 if self.curve is None else len(self.curve.memory)


@dataclass(frozen=True)
class Axes:
    """What the axes of the plot mean: memory of one device or of all, time of a step or of a sample."""

    total: bool = False
    per_sample: bool = False
    log_x: bool = False
    log_y: bool = False

    @classmethod
    def from_data(cls, data: Any) -> Axes:
        """From a page's store, which may hold anything."""
        known = data if isinstance(data, Mapping) else {}
        return cls(*(known.get(name) is True for name in ("total", "sample", "logx", "logy")))


def runs_of(library: Library, *, curves: bool = True) -> tuple[Run, ...]:
    """All explorations, as the header lists them; without their curves where they are not wanted."""
    found = titles_of(library)
    # What cannot be drawn needs no colour.
    library.labels.give_styles(e.identity for e in found if not library.head_of(e).fault)
    runs = []
    for entry, label in found.items():
        head, known = library.head_of(entry), library.labels.of(entry.identity)
        runs.append(
            Run(
                entry,
                head,
                library.costs_of(entry) if curves else None,
                known.name or own_title(library, entry),
                label,
                known.tags,
                None if head.fault else known.style,
                "" if head.fault else library.model_name(head.source),
                _made(entry),
            )
        )
    return tuple(runs)


def _made(entry: Entry) -> float | None:
    try:
        return (entry.folder / FILE).stat().st_mtime
    except OSError:
        return None


def common_units(runs: Sequence[Run]) -> Units:
    """One unit of memory and one of time for all, by the largest and the slowest."""
    memory = max((float(r.curve.memory.max()) for r in runs if r.curve is not None and r.points), default=0.0)
    slowest = max((float(r.curve.time.max()) for r in runs if r.curve is not None and r.points), default=0.0)
    return Units(
        next(
            (Unit(n, f) for n, f in (("GiB", 2.0**30), ("MiB", 2.0**20)) if memory >= f), Unit("KiB", 2.0**10)
        ),
        time_unit(slowest),
    )


def time_unit(seconds: float) -> Unit:
    """The unit in which a time of this size is read."""
    return Unit("s", 1.0) if seconds >= 10 else Unit("ms", 1e-3) if seconds >= 1e-3 else Unit("µs", 1e-6)


COMPARED = (
    ("model", "model"), ("graph", "model's shapes"), ("mode", "mode"), ("optimizer", "optimizer"),
    ("batch", "batch"), ("cluster", "cluster"), ("devices", "devices"), ("dtype", "dtype"),
    ("micro", "micro-batches"), ("recompute", "recomputation"), ("constraints", "constraints"),
)  # fmt: skip
"""Fields in which explorations are alike or differ, with what they are called."""
WORK = ("model", "graph", "mode", "optimizer", "batch")
"""Those that change what a step does: times of different work are said to be."""


def table_rows(runs: Sequence[Run], units: Units) -> list[dict[str, Any]]:
    """One dict per exploration; numbers in the common units, None where unknown."""
    return [_row(run, units) for run in runs]


def _row(run: Run, units: Units) -> dict[str, Any]:
    head, settings = run.head, dict(run.head.settings)
    read = run.curve is not None and run.points > 0
    mode = head.step[1] if head.step else ""
    return {
        "id": run.key,
        "name": run.title,
        "tags": ", ".join(run.tags),
        "style": run.style,
        # What tells it apart from others of its title, for screens that have no room for columns.
        "apart": run.label.removeprefix(run.title).strip(" ·"),
        "model": run.model,
        "graph": str(head.step[0])[:12] if head.step else "",
        "cluster": head.cluster,
        "devices": head.devices or None,
        "dtype": head.step[3] if head.step else "",
        "batch": head.batch,
        "mode": mode,
        # Inference updates nothing, whatever the settings say.
        "optimizer": head.step[2] if head.step and mode == "train" else "",
        "micro": settings.get("micro_batches", ""),
        "recompute": settings.get("recompute", ""),
        "constraints": settings.get("constraints", ""),
        "points": run.points if run.curve is not None else None,
        "memory": _round(units.memory.of(float(run.curve.memory.min()))) if read and run.curve else None,
        "time": _round(units.time.of(float(run.curve.time.min()))) if read and run.curve else None,
        "made": "" if run.made is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(run.made)),
        "origin": run.entry.origin,
        "fault": head.fault,
    }


def known_to_the_browser(runs: Sequence[Run], units: Units) -> dict[str, Any]:
    """What the browser needs in order to show and hide, and to say what is compared, without asking again."""
    rows = table_rows(runs, units)
    facts = {}
    for run, row in zip(runs, rows, strict=True):
        facts[run.key] = {
            **{name: row[name] for name, _ in COMPARED},
            "label": run.label,
            "style": run.style,
            "kind": run.head.kind,
            "capacity": units.memory.of(run.head.capacity_bytes),
            "most": units.memory.of(float(run.curve.memory.max()))
            if run.curve is not None and run.points
            else 0,
            "points": run.points,
        }
    return {
        "order": [run.key for run in runs],
        "usual": [run.key for run in runs if not run.head.fault][:USUALLY_SHOWN],
        "facts": facts,
        "compared": [list(pair) for pair in COMPARED],
        "work": list(WORK),
    }


@dataclass(frozen=True, eq=False)
class Drawn:
    """A frontier on given axes: bytes and seconds, and which points these are, counted from 1."""

    x: np.ndarray
    y: np.ndarray
    number: np.ndarray


def drawn(run: Run, axes: Axes, most: int = MOST_POINTS) -> Drawn:
    """The points of a run that the plot draws.

    Left out are points that another one is better than on these axes (only where points are on different
    numbers of devices), all of them where a time per sample is wanted and the batch is not known, and so many
    that at most ``most`` are left, both ends among what stays.
    """
    nothing = np.array([])
    if run.curve is None or not run.points or (axes.per_sample and not (run.head.batch or 0) > 0):
        return Drawn(nothing, nothing, nothing.astype(int))
    x = run.curve.memory * (run.curve.devices if axes.total else 1)
    y = run.curve.time / (run.head.batch if axes.per_sample and run.head.batch else 1)
    order = np.lexsort((y, x))
    # Ascending in memory, each faster than all leaner ones.
    best = np.minimum.accumulate(y[order])
    kept = order[np.concatenate([[True], y[order][1:] < best[:-1]])]
    if len(kept) > most:
        kept = kept[_spread(x[kept], y[kept], most)]
    return Drawn(x[kept], y[kept], kept + 1)


def _spread(x: np.ndarray, y: np.ndarray, most: int) -> np.ndarray:
    """Places of at most ``most`` points, evenly along the curve as it is seen."""
    steps = np.abs(np.diff(x)) / (np.ptp(x) or 1.0) + np.abs(np.diff(y)) / (np.ptp(y) or 1.0)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    found = np.searchsorted(along, np.linspace(0, along[-1], most))
    return np.unique(np.concatenate([[0], np.minimum(found, len(x) - 1), [len(x) - 1]]))[-most:]


def shown_keys(kept: Any, known: Any) -> set[str]:
    """Which runs a page shows: those it names, all of them, or the usual ones where it says nothing.

    Args:
        kept: the page's choice, as :file:`assets/runs.js` keeps it.
        known: what :func:`known_to_the_browser` gave it.
    """
    order = known.get("order", []) if isinstance(known, Mapping) else []
    chosen = kept.get("shown") if isinstance(kept, Mapping) else None
    if chosen == "all":
        return set(order)
    if isinstance(chosen, list):
        return {key for key in order if key in chosen}
    return set(known.get("usual", [])) if isinstance(known, Mapping) else set()


def most_of_each(runs: Sequence[Run]) -> int:
    """How many points of a run are drawn at most, so that all together stay quick to move."""
    return max(LEAST_POINTS, MOST_POINTS // max(1, len(runs)))


def plot_notes(runs: Sequence[Run]) -> list[str]:
    """What the plot leaves out, in sentences."""
    found = []
    most = most_of_each(runs)
    thinned = [run for run in runs if run.points > most]
    if thinned:
        names = ", ".join(run.label for run in thinned[:3]) + (" and others" if len(thinned) > 3 else "")
        found.append(f"{names}: drawn with {most:,} of its points each; the frontier page has all.")
    broken = [run for run in runs if run.head.fault]
    found += [f"{run.label}: {run.head.fault}" for run in broken[:3]]
    if len(broken) > 3:
        found.append(f"{len(broken) - 3} more explorations cannot be read.")
    return found


def _round(value: float) -> float:
    return float(f"{value:.4g}")
