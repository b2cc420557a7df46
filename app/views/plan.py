"""The plan page as data: memory by kind, and the step's time."""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.plan.facts import hides
from tensoropt.simulate.recording import MEMORY_KINDS

from ..state import View
from .frontier import FrontierData
from .point import KIND_TITLES, sizes_of
from .units import percent


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
    point = data.exploration.all_points[row]
    unit = data.units.memory
    used, capacity, usable = point.memory_bytes, data.capacity_bytes, data.usable_bytes(view)
    # Below a twentieth of the device its segments would be too thin to read; the share is an assumption.
    to_scale = 0.05 * capacity <= used <= capacity
    whole = capacity if to_scale else used
    where = "on the fullest device" if point.record is not None else "on each device"
    segments = [
        Segment(kind, KIND_TITLES[kind], size / whole, unit.text(size), percent(size / used))
        for kind, size in sizes_of(point).items()
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
    if point.record is None:
        return ()
    title, peaks = "device" if point.placed is not None else "place", point.record.info.peak_bytes
    most, unit = max(peaks, default=0.0) or 1.0, data.units.memory
    return tuple(
        Segment("parameters", f"{title} {number}", peak / most, unit.text(peak), percent(peak / most))
        for number, peak in enumerate(peaks)
    )


_STEP_TITLES = {"compute": "compute", "exposed": "communication", "idle": "idle"}


def step_bar(data: FrontierData, row: int) -> Bar:
    """Return one step of one device: compute, communication that is waited for, idle time; it says what is
    hidden."""
    point = data.exploration.all_points[row]
    unit = data.units.time
    parts = {"compute": point.compute_s, "exposed": point.exposed_s, "idle": point.idle_s}
    total, hidden = point.time_s or 1.0, point.hidden_s
    waiting = "waiting for the host" if point.pipeline is None else "idle, and waiting for the host"
    titles = _STEP_TITLES | ({"idle": waiting} if point.host_bound else {})
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
