"""The plan page as data: memory by kind, the step's time, operators, timelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensoropt.plan import Exploration
from tensoropt.report.rows import Share
from tensoropt.simulate.recording import MEMORY_KINDS

from ..state import View
from .frontier import FrontierData
from .point import KIND_TITLES, PROCESS, hides
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
    """One device's memory by kind, what a process takes beside tensors, what is free, the headroom.

    The bar is as long as the device's memory, unless the plan is far smaller or larger: then as the plan.
    """
    point = data.exploration.all_points[row]
    unit = data.units.memory
    used, capacity, usable = point.memory_bytes, data.capacity_bytes, data.usable_bytes(view)
    # Below a twentieth of the device its segments would be too thin to read; the share is an assumption.
    to_scale = 0.05 * capacity <= used <= capacity
    whole = capacity if to_scale else used
    where = "on the fullest device" if point.carried is not None else "on each device"
    segments = [
        Segment(kind, KIND_TITLES[kind], size / whole, unit.text(size), percent(size / used))
        for kind, size in zip(MEMORY_KINDS, point.memory, strict=True)
    ]
    beside = sum(point.terms.values())
    if beside:
        segments.append(
            Segment(PROCESS, KIND_TITLES[PROCESS], beside / whole, unit.text(beside), percent(beside / used))
        )
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
    """What each device of a placed plan, or of each stage of a pipeline, holds at most, as a share of the
    fullest; none of a sharded plan."""
    point = data.exploration.all_points[row]
    if point.carried is None:
        return ()
    kind, title = ("placed", "device") if point.placed is not None else ("pipeline", "place")
    peaks = [float(peak) for peak in point.carried[kind]["peak_bytes"]]
    most, unit = max(peaks, default=0.0) or 1.0, data.units.memory
    return tuple(
        Segment("parameters", f"{title} {number}", peak / most, unit.text(peak), percent(peak / most))
        for number, peak in enumerate(peaks)
    )


STEP_TITLES = {"compute": "compute", "exposed": "communication", "idle": "idle"}


def step_bar(data: FrontierData, row: int) -> Bar:
    """One step of one device: compute, communication that is waited for, idle; what is hidden is said."""
    point = data.exploration.all_points[row]
    unit = data.units.time
    parts = {"compute": point.compute_s, "exposed": point.exposed_s, "idle": point.idle_s}
    total, hidden = point.time_s or 1.0, point.hidden_s
    titles = STEP_TITLES | ({"idle": "waiting for the host"} if point.host_bound else {})
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


@dataclass(frozen=True)
class OperatorRow:
    """One operator group of a plan; sizes in bytes and seconds, 0 where not known.

    Attributes:
        memory_bytes: parameters, gradients and optimizer state, which last through the step.
        kept_bytes: for backward, of one micro-batch.
        compute_s, communication_s: without what is computed again.
    """

    group: str
    module: str
    members: int
    axes: str
    options: str
    memory_bytes: float
    compute_s: float
    communication_s: float
    source: str
    kept_bytes: float = 0.0


def axes_words(configuration: Mapping[str, str]) -> str:
    """``a → batch, b → out_features``, without axes that split nothing; of a placed operator its device."""
    if list(configuration) == ["device"]:
        return f"device {configuration['device']}"
    split = [f"{axis} → {dim}" for axis, dim in configuration.items() if dim != "none"]
    return ", ".join(split) or "whole"


def operator_rows(exploration: Exploration, row: int, detail: Any = None) -> tuple[OperatorRow, ...]:
    """The operators in the model's order; without details only what the plan itself says."""
    if detail is not None:
        shares = detail.shares()[0]
        return tuple(_detailed(o, share) for o, share in zip(detail.operators, shares, strict=True))
    plan = exploration.plan(row)
    groups = exploration.spaces[exploration.all_points[row].space].groups
    found = []
    for name, operator in plan.operators.items():
        if operator.device is not None:
            axes = axes_words({"device": str(operator.device)})
            found.append(OperatorRow(name, "", len(operator.members), axes, "", 0, 0, 0, "plan"))
            continue
        keys = [plan.parameters[p].key for p in groups[name]["parameters"]]
        found.append(
            OperatorRow(
                name, _module_of(keys), len(operator.members), axes_words(operator.axes), "", 0, 0, 0, "plan"
            )
        )
    return tuple(found)


TOTAL = "total"


def beside_rows(exploration: Exploration, row: int, detail: Any) -> tuple[Share, ...]:
    """What the operators' rows leave of memory, compute and communication, and the total: the headline's.

    Nothing without details, or where rows are stages or devices of different loads.
    """
    point = exploration.all_points[row]
    if detail is None or point.carried is not None:
        return ()
    operators, beside = detail.shares()
    process = Share(KIND_TITLES[PROCESS], sum(point.terms.values()), 0.0, 0.0)
    rows = [
        share
        for share in (*beside, process)
        # A rounding of what adds up to nothing is no row.
        if share.compute_s or share.communication_s or abs(share.memory_bytes) > 0.5
    ]
    columns = zip(
        *((s.memory_bytes, s.compute_s, s.communication_s) for s in (*operators, *rows)), strict=True
    )
    return (*rows, Share(TOTAL, *map(sum, columns)))


def _detailed(o: Any, share: Share) -> OperatorRow:
    return OperatorRow(
        group=o.group,
        module=o.module,
        members=len(o.members),
        axes=axes_words(o.configuration),
        options=option_words(o.options),
        memory_bytes=float(share.memory_bytes),
        compute_s=float(share.compute_s),
        communication_s=float(share.communication_s),
        source=str(o.source),
        kept_bytes=float(o.kept_bytes),
    )


def option_words(options: Any) -> str:
    """What an operator's options say, whatever form they have."""
    if not options:
        return ""
    if isinstance(options, str):
        return options
    if isinstance(options, Mapping):
        return ", ".join(f"{k} {v}" for k, v in options.items())
    return ", ".join(map(str, options))


def _module_of(keys: Sequence[str]) -> str:
    return keys[0].rpartition(".")[0] if keys else ""


def changed_operators(
    exploration: Exploration, row: int, other: int
) -> tuple[tuple[str, str, str, str], ...]:
    """(operator, module, its configuration in the other plan, in this one), where the two differ.

    Plans over different meshes name different axes; then an operator differs unless it is whole in both.
    """
    first = {o.group: o for o in operator_rows(exploration, other)}
    second = {o.group: o for o in operator_rows(exploration, row)}
    return tuple(
        (name, o.module, first[name].axes if name in first else "—", o.axes)
        for name, o in second.items()
        if name not in first or first[name].axes != o.axes
    )
