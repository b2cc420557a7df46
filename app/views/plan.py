"""The plan page as data: memory by kind, the step's time, owners of the memory at one moment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.exploration.facts import hides
from tensoropt.plan.kinds import devices_words
from tensoropt.report.owners import MomentOwners, PointOwners
from tensoropt.report.step_parts import part_rows
from tensoropt.simulate.recording import MEMORY_KINDS, OwnerRow
from tensoropt.units import format_bytes

from ..state import View
from .frontier import FrontierData
from .point import KIND_TITLES, PROCESS, sizes_of
from .units import Units, percent, plural

_NO_OPERATOR = "no single operator"


def moment(owners: PointOwners, wanted: int | None, step: int = 0) -> MomentOwners:
    """Return the owners at a point of the curve, ``step`` points on; at the peak if none is requested.

    A point that does not exist (of another plan, or from an older page) also means the peak.
    """
    try:
        at = owners.at(wanted)
    except TensorOptError:
        at = owners.at()
    if step:
        at = owners.at(min(max(at.number + step, 0), len(owners.curve) - 1))
    return at


def until(row: OwnerRow, units: Units) -> str:
    """Say until when it is alive, and what ends it."""
    if row.until_s is None:
        return "stays"
    return f"{units.time.text(row.until_s)}: {row.until}"


def owner_cells(at: MomentOwners, units: Units) -> list[dict[str, Any]]:
    """Return a row per owner, the most bytes first, each in the unit that fits it."""
    whole = at.at.total or 1.0
    return [
        {
            "id": str(number),
            "group": row.operator,
            "operator": row.operator or _NO_OPERATOR,
            "tensor": row.tensor if row.tensor != row.operator else "",
            "what": row.what,
            "kind": KIND_TITLES[row.kind],
            "bytes": row.bytes,
            "size": format_bytes(row.bytes),
            "share": percent(row.bytes / whole),
            "until": until(row, units),
        }
        for number, row in enumerate(at.rows)
    ]


def total_cells(at: MomentOwners, units: Units) -> list[dict[str, Any]]:
    """Return the row below: the sum of all of them, which is the height of the curve there."""
    size = sum(row.bytes for row in at.rows)
    words = {"bytes": size, "size": units.memory.text(size), "share": percent(1.0)}
    return [{"id": "total", "operator": "total", **words}]


def moment_words(owners: PointOwners, at: MomentOwners, units: Units) -> str:
    """Return ``Peak, at 24.5 ms: 1.46 GiB of 462 owners``."""
    where = "Peak, at" if at.number == owners.peak else "At"
    size, time = units.memory.text(at.at.total), units.time.text(at.at.time_s)
    return f"{where} {time}: {size}, {plural(len(at.rows), 'owner')}"


@dataclass(frozen=True)
class Segment:
    """A piece of a bar: its share of the whole bar, its size in words and its share of the total in words."""

    kind: str
    title: str
    share: float
    size: str
    part: str


@dataclass(frozen=True)
class Bar:
    """A stacked bar with the sentence that sums it up."""

    segments: tuple[Segment, ...]
    summary: str


def memory_bar(data: FrontierData, view: View, row: int) -> Bar:
    """Return one device's memory by kind, what a process takes beside tensors, what is free, and the
    headroom.

    The bar is as long as the device's memory, unless the plan is far smaller or larger: then it is as long as
    the plan.
    """
    point, fit = data.exploration.all_points[row], data.exploration.fit(row)
    unit = data.units.memory
    used, capacity, usable = fit.needed_bytes, data.capacity_bytes, data.limit_bytes(view)
    process = {} if not fit.process else {PROCESS: sum(fit.process.values())}
    # Below a twentieth of the device its segments would be too thin to read; the share is an assumption.
    to_scale = 0.05 * capacity <= used <= capacity
    whole = capacity if to_scale else used
    where = point.kind.memory_of
    segments = [
        # In the page's unit, a few bytes would be 7.6e-06 GiB.
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
    """Return the most that each device of a placed plan, or of each stage of a pipeline, holds, as a share of
    the fullest; empty for a sharded plan."""
    point = data.exploration.all_points[row]
    peaks = point.stages.peak_bytes
    devices = math.prod(data.exploration.spaces[point.space].mesh.shape)
    most, unit = max(peaks, default=0.0) or 1.0, data.units.memory
    titles = [devices_words(number, len(peaks), devices) for number in range(len(peaks))]
    return tuple(
        Segment("parameters", title, peak / most, unit.text(peak), percent(peak / most))
        for title, peak in zip(titles, peaks, strict=True)
    )


_STEP_TITLES = {"compute": "compute", "exposed": "communication", "idle": "idle"}


def step_bar(data: FrontierData, row: int) -> Bar:
    """Return one step of one device: compute, communication that is waited for, idle time; it says what is
    hidden."""
    point = data.exploration.all_points[row]
    unit = data.units.time
    parts = {"compute": point.compute_s, "exposed": point.exposed_s, "idle": point.idle_s}
    total, hidden = point.time_s or 1.0, point.hidden_s
    titles = _STEP_TITLES | ({"idle": point.kind.host_wait} if point.host_bound else {})
    segments = tuple(
        Segment(kind, titles[kind], value / total, unit.text(value), percent(value / total))
        for kind, value in parts.items()
    )
    words = f"{unit.text(total)} per step"
    words += f"; {unit.text(hidden)} of communication hide behind compute" if hides(point) else ""
    if point.host_s:
        bound = " (host-bound)" if point.host_bound else ""
        words += f"; issuing it takes the host {unit.text(point.host_s)}{bound}"
    words += "."
    return Bar(segments, words)


def step_rows(detail: Any, units: Units) -> list[list[str]]:
    """Return (title, time, share) of the parts of the step, with the links that are waited for."""
    return [[title, units.time.text(s), percent(share)] for title, s, share in part_rows(detail.parts)]
