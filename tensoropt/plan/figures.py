"""The registry of all figures of a point (memory, time, ...): name, unit, label and meaning of each.

The CSV, ``--json``, ``choose``, the dashboard's table and tooltips, and the columns of a saved frontier are
made from this registry. Simulated figures are passed to :meth:`~tensoropt.plan.point.Point.of` by name. Other
figures are computed from a point by the formula given here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tensoropt.costs.process_memory import TERMS
from tensoropt.simulate.recording import MEMORY_KINDS
from tensoropt.types import SOURCES
from tensoropt.units import format_bytes, format_number, format_seconds


@dataclass(frozen=True)
class _FigureUnit:
    """The unit of a figure.

    Attributes:
        plain: converts a value for JSON and CSV.
        words: formats a value for people.
    """

    name: str
    plain: Callable[[Any], Any]
    words: Callable[[Any], str]


_BYTES = _FigureUnit("bytes", round, format_bytes)
_SECONDS = _FigureUnit("seconds", float, format_seconds)
_SHARE = _FigureUnit("share", float, lambda share: f"{100 * share:.0f} %")
_NUMBER = _FigureUnit("number", float, format_number)
_COUNT = _FigureUnit("count", int, lambda count: f"{count:,}")
FLAG = _FigureUnit("flag", bool, lambda flag: "yes" if flag else "no")
_WORDS = _FigureUnit("words", str, str)


@dataclass(frozen=True)
class Figure:
    """The description of a figure of a point, such as memory or time.

    Attributes:
        name: the column's name, and the attribute of a point.
        label: the name shown to people.
        about: a sentence on its meaning.
        of: computes the figure from a point's row (:class:`~tensoropt.exploration.figure_rows.FigureRow`);
            None for simulated figures, which points store.
        part: for a part of a breakdown, (the breakdown's name, the part's name): ``("terms", "context")``.
        default: the value for points that do not store the figure; NaN if it is then unknown.
        listed: whether the figure has its own line in ``choose`` and tooltips, and a column in the dashboard;
            other figures appear in sentences.
    """

    name: str
    unit: _FigureUnit
    label: str
    about: str
    of: Callable[[Any], Any] | None = None
    part: tuple[str, str] | None = None
    default: float = math.nan
    listed: bool = False

    def value(self, row: Any) -> Any:
        """Return the figure of a point's row; None if it is unknown or does not apply."""
        if self.of is not None:
            return self.of(row)
        found = row.point.figures.get(self.name, self.default)
        return None if found != found else found

    def cell(self, row: Any) -> Any:
        """Return the figure of a point's row for a CSV file; "" if it is unknown."""
        value = self.plain(row)
        return "" if value is None else str(value).lower() if self.unit is FLAG else value

    def plain(self, row: Any) -> Any:
        """Return the figure of a point's row for JSON; None if it is unknown."""
        value = self.value(row)
        return None if value is None else self.unit.plain(value)


def _parts(breakdown: str, parts: Iterable[str], name: str, unit: _FigureUnit, about: str) -> list[Figure]:
    """Return one figure per part of a breakdown; ``{}`` in names and texts stands for the part's name."""
    return [
        Figure(
            name.format(part.replace(" ", "_")),
            unit,
            part.replace("_", " "),
            about.format(part.replace("_", " ")),
            part=(breakdown, part),
            default=0.0,
        )
        for part in parts
    ]


FIXED = (
    Figure("point", _COUNT, "point", "Its number, from 1 in order of memory.", lambda row: row.number),
    Figure("memory_bytes", _BYTES, "memory", "What a device needs at the step's peak, as simulated."),
    Figure("time_s", _SECONDS, "time", "How long a step takes, as simulated."),
    Figure("devices", _COUNT, "devices", "How many devices it runs on.", lambda row: row.space.devices),
    Figure("mesh", _WORDS, "mesh", "The mesh of the devices.", lambda row: row.space.mesh.label),
    Figure("micro_batches", _COUNT, "micro-batches", "Into how many micro-batches the batch is cut.",
           lambda row: row.space.micro_batches),
    Figure("compute_s", _SECONDS, "compute", "How long a device computes in a step."),
    Figure("communication_s", _SECONDS, "network", "How long all communication takes, overlapped or not."),
    Figure("exact", FLAG, "exact", "Whether no searched strategy is better in the additive model.",
           default=0.0),
    Figure("gap", _SHARE, "gap", "The most by which a strategy with no more memory could be faster."),
    Figure("planner", _WORDS, "planner", "The planner that found it.", lambda row: row.point.planner),
)  # fmt: skip
"""The fixed first columns of a frontier's table, which other programs read by name and position."""

FURTHER = (
    Figure("additive_memory_bytes", _BYTES, "memory added up", "The memory as the search adds it up."),
    Figure("additive_time_s", _SECONDS, "time added up", "The time as the search adds it up."),
    Figure("exposed_s", _SECONDS, "waited for", "Communication that a device waits for."),
    Figure("hidden_s", _SECONDS, "hidden", "Communication that overlaps other work."),
    Figure("idle_s", _SECONDS, "idle", "Waiting for other devices, or for the host.", default=0.0),
    *_parts("memory", MEMORY_KINDS, "{}_bytes", _BYTES, "What {} take at the memory's peak."),
    *_parts("sources", SOURCES, "{}_share", _SHARE, "The share of a step's time whose source is {}."),
    *_parts("terms", TERMS, "{}_bytes", _BYTES, "What {} take of a device beside the step's tensors."),
    Figure("host_s", _SECONDS, "host", "How long the host takes to issue a step, if it is not the device.",
           default=0.0),
    Figure("host_bound", FLAG, "host-bound", "Whether the device waits for its host.",
           lambda row: row.point.host_bound),
    Figure("stages", _COUNT, "stages", "How many stages its pipeline has.",
           lambda row: len(row.point.stages.stages) or None),
    Figure("schedule", _WORDS, "schedule", "The order in which micro-batches pass the stages.",
           lambda row: row.point.stages.schedule or None),
    Figure("cuts", _WORDS, "cuts", "The first operator of each stage after the first.",
           lambda row: " ".join(row.point.stages.begins) or None),
    Figure("name", _WORDS, "plan", "The plan's usual name.", lambda row: row.name),
    Figure("sent_bytes", _BYTES, "sent", "The most that a rank sends in a step.", listed=True),
    Figure("needs_bytes", _BYTES, "needs", "Memory needed on a device: tensors, process, driver, allocator.",
           lambda row: row.needs),
    Figure("fits", _WORDS, "fits", "Whether a device has that memory: yes, tight (within the error), or no.",
           lambda row: row.fits),
)  # fmt: skip
"""The columns after the fixed ones; new columns are added at the end."""

_RATES = (
    Figure("samples_per_s", _NUMBER, "samples/s", "Samples per second of all devices.",
           lambda row: row.rates.samples_per_s),
    Figure("tokens_per_s", _NUMBER, "tokens/s", "Tokens per second of all devices.",
           lambda row: row.rates.tokens_per_s),
    Figure("mfu", _SHARE, "MFU", "Model FLOPs utilisation.", lambda row: row.rates.mfu),
    Figure("device_hours_per_1000_steps", _NUMBER, "device-hours", "Device-hours of 1,000 steps.",
           lambda row: row.rates.device_hours(1000.0)),
    Figure("price_per_hour", _NUMBER, "price", "Money for an hour of all devices.",
           lambda row: row.rates.per_hour),
)  # fmt: skip
"""The last columns, defined in :mod:`tensoropt.exploration.rates`."""

FIGURES = (*FIXED, *FURTHER, *_RATES)
KEPT: Mapping[str, Figure] = {figure.name: figure for figure in FIGURES if figure.of is None}
"""The simulated figures by name, which points store."""
LISTED = tuple(figure for figure in KEPT.values() if figure.listed)
BREAKDOWNS: Mapping[str, Mapping[str, str]] = {
    name: {figure.part[1]: figure.name for figure in FIGURES if figure.part and figure.part[0] == name}
    for name in dict.fromkeys(figure.part[0] for figure in FIGURES if figure.part)
}
"""The names of figures, by breakdown and part name."""


def kept_figures(named: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures that a point stores, from figures and whole breakdowns by name; None and NaN are
    left out.

    A breakdown is a mapping from part names to values, or a sequence of the values.
    """
    found: dict[str, float] = {}
    for name, value in named.items():
        if name in BREAKDOWNS:
            parts = BREAKDOWNS[name]
            items = value.items() if isinstance(value, Mapping) else zip(parts, value, strict=True)
            found.update((parts[part], float(size)) for part, size in items)
        elif name not in KEPT:
            raise TypeError(f"a point has no figure {name!r}")
        elif value is not None and value == value:
            found[name] = bool(value) if KEPT[name].unit is FLAG else float(value)
    return found


class _Worded(dict[str, str]):
    def __init__(self, of: object):
        super().__init__()
        self.of = of

    def __missing__(self, name: str) -> str:
        return KEPT[name].unit.words(getattr(self.of, name))


def worded(of: object, text: str) -> str:
    """Return a text in which names such as ``{time_s}`` are replaced by that figure of ``of`` (a point,
    plan or step), in words with units."""
    return text.format_map(_Worded(of))
