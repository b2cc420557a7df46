"""The page *Details* as data: memory at the peak by kind and by operator, and the parts of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tensoropt.exploration.facts import hides
from tensoropt.plan.kinds import devices_words
from tensoropt.report.owners import PointOwners
from tensoropt.report.step_parts import part_rows
from tensoropt.simulate.recording import MEMORY_KINDS
from tensoropt.units import format_bytes

from ..state import View
from .frontier import FrontierData
from .point import KIND_TITLES, PROCESS, sizes_of
from .result import two_digits
from .units import Units, percent, plural

_NO_OPERATOR = "no single operator"
_MOST_OWNERS = 15


def owner_rows(owners: PointOwners) -> list[list[str]]:
    """Return (operator, size, share, kind) of the largest pieces of memory at the peak."""
    at = owners.at()
    whole = at.at.total or 1.0
    return [
        [
            row.operator or _NO_OPERATOR,
            format_bytes(row.bytes),
            percent(row.bytes / whole),
            f"{KIND_TITLES[row.kind]}: {row.what}",
        ]
        for row in at.rows[:_MOST_OWNERS]
    ]


def owners_words(owners: PointOwners, units: Units) -> str:
    """Return ``Peak at 24.5 ms: 1.46 GiB of 462 owners; the largest:`` (owners: tensors)."""
    at = owners.at()
    size, time = units.memory.text(at.at.total), units.time.text(at.at.time_s)
    return f"Peak at {time}: {size} of {plural(len(at.rows), 'owner')}; the largest:"


@dataclass(frozen=True)
class Segment:
    """A bar's segment: its share of the bar's length, and texts for its size and its share of the total."""

    kind: str
    title: str
    share: float
    size: str
    part: str


@dataclass(frozen=True)
class Bar:
    """A stacked bar, with a sentence that summarises it."""

    segments: tuple[Segment, ...]
    summary: str


def memory_bar(data: FrontierData, view: View, row: int) -> Bar:
    """Return one device's memory by kind, process memory, free memory and headroom.

    The bar is as long as the device's memory, or as the plan's memory if that is far smaller or larger.
    """
    point, fit = data.exploration.all_points[row], data.exploration.fit(row)
    unit = data.units.memory
    used, capacity, usable = fit.needed_bytes, data.capacity_bytes, data.limit_bytes(view)
    process = {} if not fit.process else {PROCESS: sum(fit.process.values())}
    # Below a twentieth of the device its segments would be too thin to read; an assumption.
    to_scale = 0.05 * capacity <= used <= capacity
    whole = capacity if to_scale else used
    where = point.kind.memory_of
    segments = [
        # A few bytes would be 7.6e-06 GiB in the page's unit.
        Segment(
            kind,
            KIND_TITLES[kind],
            size / whole,
            unit.text(size) if unit.of(size) >= 1e-3 or not size else format_bytes(size),
            percent(size / used),
        )
        for kind, size in (sizes_of(point) | process).items()
        if size or kind in MEMORY_KINDS
    ]
    if to_scale:
        free = max(usable - used, 0.0)
        segments.append(Segment("free", "free", free / whole, unit.text(free), ""))
        kept = capacity - max(usable, used)
        segments.append(Segment("headroom", "headroom", kept / whole, unit.text(kept), ""))
        summary = f"{unit.text(used)} of {unit.text(capacity)} {where} ({percent(used / capacity)})."
    elif used > capacity:
        summary = f"{unit.text(used)} {where}, {unit.text(used - capacity)} more than it has."
    else:
        summary = f"{unit.text(used)} {where}, {percent(used / capacity)} of its memory (enlarged)."
    return Bar(tuple(segments), summary)


def device_bars(data: FrontierData, row: int) -> tuple[Segment, ...]:
    """Return the peak memory of each device of a placed plan, or of each pipeline stage, relative to the
    highest one; empty for a sharded plan."""
    point = data.exploration.all_points[row]
    peaks = point.stages.peak_bytes
    devices = math.prod(data.exploration.spaces[point.space].mesh.shape)
    most, unit = max(peaks, default=0.0) or 1.0, data.units.memory
    titles = [devices_words(number, len(peaks), devices) for number in range(len(peaks))]
    return tuple(
        Segment("parameters", title, peak / most, unit.text(peak), percent(peak / most))
        for title, peak in zip(titles, peaks, strict=True)
    )


def step_bar(data: FrontierData, row: int) -> Bar:
    """Return a device's step as a bar of compute, exposed communication and idle time, with a summary."""
    point = data.exploration.all_points[row]
    waits = point.kind.host_wait if point.host_bound else "idle"
    parts = (("compute", "compute", point.compute_s), ("exposed", "communication", point.exposed_s),
             ("idle", waits, point.idle_s))  # fmt: skip
    total, hidden = point.time_s or 1.0, point.hidden_s
    segments = tuple(
        Segment(kind, title, value / total, two_digits(value), percent(value / total))
        for kind, title, value in parts
    )
    words = f"{two_digits(total)} per step"
    words += f"; {two_digits(hidden)} of communication overlaps compute" if hides(point) else ""
    if point.host_s:
        bound = " (host-bound)" if point.host_bound else ""
        words += f"; issuing it takes the host {two_digits(point.host_s)}{bound}"
    words += "."
    return Bar(segments, words)


def step_rows(detail: Any) -> list[list[str]]:
    """Return (title, time, share) of each part of the step; waits are listed by the link waited for."""
    return [[title, two_digits(s), percent(share)] for title, s, share in part_rows(detail.parts)]
