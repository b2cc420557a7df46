"""All explorations as options of a list, rows of one table and curves of one plot, from the index: none of
them is opened.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from tensoropt.exploration.exploration_files import DESCRIBED, Costs
from tensoropt.question.settings import settings_fields

from ..library import Entry, Head, Library
from .units import Units, time_unit, unit_for

_GROUPS = {"opened": "Opened", "job": "Jobs", "ready-made": "Ready-made"}
_USUALLY_SHOWN = 12
"""The number of explorations that are drawn before a person chooses: more lines are hard to follow."""
_MOST_POINTS, _LEAST_POINTS = 10_000, 60
"""The most points drawn in total, and the least for one exploration."""


@dataclass(frozen=True, eq=False)
class Run:
    """An exploration in the table and the plot.

    Attributes:
        entry: its entry in the library.
        head: its head, which says what it is about.
        curve: its points; None if they have not been read yet.
        title: what it is called in the table.
        label: the same, made distinct from all others.
        style: the number of its colour, dash and symbol; None if it cannot be read.
        model: what people call the model.
        made: when its file was written, seconds since the epoch; None if the file is gone.
    """

    entry: Entry
    head: Head
    curve: Costs | None
    title: str
    label: str
    style: int | None
    model: str
    made: float | None

    @property
    def key(self) -> str:
        """Its key in the library."""
        return self.entry.key

    @property
    def points(self) -> int:
        """The number of points of its frontier."""
        return 0 if self.curve is None else len(self.curve.needs)


@dataclass(frozen=True)
class AxisOptions:
    """The meaning of the plot's axes: memory of one device or of all, time of a step or of a sample, or
    samples in a second; logarithmic unless linear ones are chosen, as models differ by factors."""

    total: bool = False
    per_sample: bool = False
    log_x: bool = True
    log_y: bool = True
    per_second: bool = False

    @property
    def of_samples(self) -> bool:
        """Whether they need the batch."""
        return self.per_sample or self.per_second

    @classmethod
    def from_data(cls, data: Any) -> AxisOptions:
        """Return the axes in a page's store, which may hold anything."""
        known = data if isinstance(data, Mapping) else {}
        usual = {"total": False, "sample": False, "logx": True, "logy": True, "rate": False}
        return cls(*(known.get(name, default) is True for name, default in usual.items()))


def title_of(library: Library, entry: Entry) -> str:
    """Return a person's name for it, otherwise ``gpt2 on dgx-h100``; the folder's name, and that it is
    damaged, if its file cannot be read."""
    head = library.head_of(entry)
    name = library.labels.name(entry.identity)
    if name:
        return f"{name} (cannot be read)" if head.fault else name
    return own_title(library, entry)


def own_title(library: Library, entry: Entry) -> str:
    """Return the default title of an exploration without a name."""
    head = library.head_of(entry)
    if head.fault:
        return f"{entry.folder.name} (cannot be read)"
    return f"{library.model_name(head.source)} on {head.cluster}"


def choices(library: Library) -> list[dict[str, Any]]:
    """Return grouped options for a select."""
    found: dict[str, list[dict[str, str]]] = {}
    for entry, label in titles_of(library).items():
        found.setdefault(_GROUPS[entry.origin], []).append({"value": entry.key, "label": label})
    return [{"group": group, "items": items} for group, items in found.items()]


def titles_of(library: Library) -> dict[Entry, str]:
    """Return the title of every exploration; equal titles are distinguished by what differs, otherwise by
    their key."""
    entries = library.entries()
    titles = [title_of(library, e) for e in entries]
    alike: dict[str, list[Entry]] = {}
    for entry, title in zip(entries, titles, strict=True):
        alike.setdefault(title, []).append(entry)
    apart = {e.key: words for some in alike.values() for e, words in _apart(library, some).items()}
    return {e: f"{title}{apart.get(e.key, '')}" for e, title in zip(entries, titles, strict=True)}


def _apart(library: Library, entries: list[Entry]) -> dict[Entry, str]:
    """Return what is added to the common title of these explorations: settings that differ, or the key if
    none does."""
    if len(entries) < 2:
        return {}
    settings = {e: library.head_of(e).settings for e in entries}
    values = [dict(pairs) for pairs in settings.values()]
    differing = [n for n in values[0] if len({v.get(n) for v in values}) > 1]
    words = {
        e: "".join(f" · {n} {v}" for n, v in pairs if n in differing and v) for e, pairs in settings.items()
    }
    told = list(words.values())
    for entry, said in words.items():
        if not said or told.count(said) > 1:
            words[entry] = f"{said} ({entry.key.removeprefix('opened-')})"
    return words


def runs_of(library: Library, *, curves: bool = True) -> tuple[Run, ...]:
    """Return all explorations, as the header lists them; without their curves if these are not needed."""
    titles = titles_of(library)
    runs, styles = [], count()
    for entry, label in titles.items():
        head = library.head_of(entry)
        runs.append(
            Run(
                entry,
                head,
                library.costs_of(entry) if curves else None,
                library.labels.name(entry.identity) or own_title(library, entry),
                label,
                # An exploration that cannot be drawn needs no colour.
                None if head.fault else next(styles),
                "" if head.fault else library.model_name(head.source),
                _made(entry),
            )
        )
    return tuple(runs)


def _made(entry: Entry) -> float | None:
    try:
        return (entry.folder / DESCRIBED).stat().st_mtime
    except OSError:
        return None


def common_units(runs: Sequence[Run]) -> Units:
    """Return one unit of memory and one of time for all, by the largest and the slowest."""
    read = [run.curve for run in runs if run.curve is not None and run.points]
    memory = max((float(curve.needs.max()) for curve in read), default=0.0)
    slowest = max((float(curve.time.max()) for curve in read), default=0.0)
    return Units(unit_for(max(memory, 2.0**10)), time_unit(slowest))


_COMPARED = (
    ("model", "model"), ("graph", "model's shapes"), ("batch", "batch"), ("cluster", "cluster"),
    ("devices", "devices"), *((setting.name, setting.flag) for setting in settings_fields()),
)  # fmt: skip
"""The fields in which explorations may differ, with their titles."""
_WORK = ("model", "graph", "mode", "optimizer", "batch")
"""The fields that change what a step does: the page says if times are of different work."""


def table_rows(runs: Sequence[Run], units: Units) -> list[dict[str, Any]]:
    """Return one dict per exploration; numbers in the common units, None if unknown."""
    return [_row(run, units) for run in runs]


def _row(run: Run, units: Units) -> dict[str, Any]:
    head, settings = run.head, dict(run.head.settings)
    read = run.curve is not None and run.points > 0
    if settings.get("mode") != "train":
        settings["optimizer"] = ""  # inference updates nothing, whatever the settings say
    return {
        "id": run.key,
        "name": run.title,
        "style": run.style,
        # What distinguishes it from others with its title, for screens that have no room for columns.
        "apart": run.label.removeprefix(run.title).strip(" ·"),
        "model": run.model,
        "graph": str(head.step[0])[:12] if head.step else "",
        "cluster": head.cluster,
        "devices": head.devices or None,
        "batch": head.batch,
        **{setting.name: settings.get(setting.flag, "") for setting in settings_fields()},
        "points": run.points if run.curve is not None else None,
        "memory": _round(units.memory.of(float(run.curve.needs.min()))) if read and run.curve else None,
        "time": _round(units.time.of(float(run.curve.time.min()))) if read and run.curve else None,
        "made": "" if run.made is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(run.made)),
        "origin": run.entry.origin,
        "fault": head.fault,
    }


def known_to_the_browser(runs: Sequence[Run], units: Units) -> dict[str, Any]:
    """Return what the browser needs in order to show and hide, and to say what is compared, without further
    requests."""
    rows = table_rows(runs, units)
    facts = {}
    for run, row in zip(runs, rows, strict=True):
        facts[run.key] = {
            **{name: row[name] for name, _ in _COMPARED},
            "label": run.label,
            "style": run.style,
            "kind": run.head.kind,
            "capacity": units.memory.of(run.head.capacity_bytes),
            "most": units.memory.of(float(run.curve.needs.max()))
            if run.curve is not None and run.points
            else 0,
            "points": run.points,
        }
    return {
        "order": [run.key for run in runs],
        "usual": [run.key for run in runs if not run.head.fault][:_USUALLY_SHOWN],
        "facts": facts,
        "compared": [list(pair) for pair in _COMPARED],
        "work": list(_WORK),
    }


@dataclass(frozen=True, eq=False)
class _Drawn:
    """A frontier on given axes: bytes and seconds, and the numbers of its points, counted from 1."""

    x: np.ndarray
    y: np.ndarray
    number: np.ndarray


def drawn(run: Run, axes: AxisOptions, most: int = _MOST_POINTS) -> _Drawn:
    """Return the points of a run that the plot draws.

    It leaves out points that another point beats on these axes (only if points are on different numbers of
    devices), all of them if figures of samples are requested and the batch is not known, and as many others
    as needed for at most ``most`` to be left, with both ends among those that stay.
    """
    nothing = np.array([])
    batch = run.head.batch or 0
    if run.curve is None or not run.points or (axes.of_samples and not batch > 0):
        return _Drawn(nothing, nothing, nothing.astype(int))
    x = run.curve.needs * (run.curve.devices if axes.total else 1)
    y = run.curve.time / (batch if axes.of_samples else 1)
    order = np.lexsort((y, x))
    # Ascending in memory, each faster than all leaner ones.
    best = np.minimum.accumulate(y[order])
    kept = order[np.concatenate([[True], y[order][1:] < best[:-1]])]
    if axes.per_second:
        y = 1.0 / y
    if len(kept) > most:
        kept = kept[_spread(x[kept], y[kept], most)]
    return _Drawn(x[kept], y[kept], kept + 1)


def _spread(x: np.ndarray, y: np.ndarray, most: int) -> np.ndarray:
    """Return the places of at most ``most`` points, evenly along the curve as it is seen."""
    steps = np.abs(np.diff(x)) / (np.ptp(x) or 1.0) + np.abs(np.diff(y)) / (np.ptp(y) or 1.0)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    places = np.searchsorted(along, np.linspace(0, along[-1], most))
    return np.unique(np.concatenate([[0], np.minimum(places, len(x) - 1), [len(x) - 1]]))[-most:]


def shown_keys(kept: Any, known: Any) -> set[str]:
    """Return which runs a page shows: those it names, all of them, or the usual ones if it says nothing.

    Args:
        kept: the page's choice, as :file:`assets/runs.js` keeps it.
        known: the result of :func:`known_to_the_browser` that it received.
    """
    order = known.get("order", []) if isinstance(known, Mapping) else []
    chosen = kept.get("shown") if isinstance(kept, Mapping) else None
    if chosen == "all":
        return set(order)
    if isinstance(chosen, list):
        return {key for key in order if key in chosen}
    return set(known.get("usual", [])) if isinstance(known, Mapping) else set()


def most_of_each(runs: Sequence[Run]) -> int:
    """Return the most points of a run that are drawn, so that all together stay quick to move."""
    return max(_LEAST_POINTS, _MOST_POINTS // max(1, len(runs)))


def plot_notes(runs: Sequence[Run]) -> list[str]:
    """Say what the plot leaves out, in sentences."""
    notes = []
    most = most_of_each(runs)
    thinned = [run for run in runs if run.points > most]
    if thinned:
        names = ", ".join(run.label for run in thinned[:3]) + (" and others" if len(thinned) > 3 else "")
        notes.append(f"{names}: drawn with {most:,} of its points each; the frontier page has all.")
    broken = [run for run in runs if run.head.fault]
    notes += [f"{run.label}: {run.head.fault}" for run in broken[:3]]
    if len(broken) > 3:
        notes.append(f"{len(broken) - 3} more explorations cannot be read.")
    return notes


def _round(value: float) -> float:
    return float(f"{value:.4g}")
