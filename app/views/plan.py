"""The plan page as data: memory by kind, the step's time, operators, timelines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensoropt.plan import Exploration
from tensoropt.plan.plan import STAGE_AXIS
from tensoropt.plan.plan_names import TENSOR, what_it_does
from tensoropt.plan.space import Space
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
    waiting = "waiting for the host" if point.pipeline is None else "idle, and waiting for the host"
    titles = STEP_TITLES | ({"idle": waiting} if point.host_bound else {})
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
    recomputed: bool = False


LOOP_WORDS = {
    "out_features": "output features",
    "in_features": "input features",
    "out_channels": "output channels",
    "in_channels": "input channels",
    "partial": "partial sums",
    "partial_grad": "partial gradients",
}
"""Dims by the words of people; others by their own name."""


def axes_words(
    configuration: Mapping[str, str], batch: str = "", sizes: Mapping[str, int] | None = None
) -> str:
    """``batch ×2, output features ×4``: what is split into how many parts, whatever the axes are called.

    Axes that split the same are put together, so that two meshes can be compared; a placed operator has its
    device.

    Args:
        batch: the operator's label on the micro-batch axis.
        sizes: of the axes.
    """
    if list(configuration) == ["device"]:
        return f"device {configuration['device']}"
    parts: dict[str, int] = {}
    for axis, label in configuration.items():
        size = (sizes or {}).get(axis, 1)
        if axis == STAGE_AXIS or label == "none":
            continue
        dim = label.partition("@")[0]
        loop, _, atom = dim.partition(".")
        words = "batch" if label == batch else LOOP_WORDS.get(loop, loop) + (f" {atom}" if atom else "")
        if loop in ("rows", "d1") and label != batch:
            words = f"dim {atom}" if atom else "dim 1"
        elif re.fullmatch(r"d\d+", loop) and label != batch:
            words = f"dim {loop[1:]}"
        parts[words] = parts.get(words, 1) * size
    place = [f"stage {configuration[STAGE_AXIS]}"] if STAGE_AXIS in configuration else []
    return ", ".join([*place, *(f"{w} ×{n}" if n > 1 else w for w, n in parts.items())]) or "whole"


def _sizes(exploration: Exploration, row: int) -> dict[str, int]:
    mesh = exploration.spaces[exploration.all_points[row].space].mesh
    return dict(zip(mesh.names, mesh.shape, strict=True))


def operator_rows(exploration: Exploration, row: int, detail: Any = None) -> tuple[OperatorRow, ...]:
    """The operators in the model's order; without details only what the plan itself says."""
    if detail is not None:
        space, sizes = exploration.spaces[exploration.all_points[row].space], _sizes(exploration, row)
        shares = detail.shares()[0]
        return tuple(
            _detailed(o, share, space, sizes) for o, share in zip(detail.operators, shares, strict=True)
        )
    plan = exploration.plan(row)
    groups = exploration.spaces[exploration.all_points[row].space].groups
    modules, sizes = _modules(exploration), _sizes(exploration, row)
    found = []
    for name, operator in plan.operators.items():
        if operator.device is not None:
            axes = axes_words({"device": str(operator.device)})
            found.append(OperatorRow(name, "", len(operator.members), axes, "", 0, 0, 0, "plan"))
            continue
        keys = [plan.parameters[p].key for p in groups[name]["parameters"]] if name in groups else []
        axes = axes_words(operator.axes, operator.micro, sizes)
        module = modules.get(name, _module_of(keys))
        found.append(OperatorRow(name, module, len(operator.members), axes, "", 0, 0, 0, "plan"))
    return tuple(found)


def picture_rows(exploration: Exploration, row: int, detail: Any) -> tuple[OperatorRow, ...]:
    """The operators of the picture: those of the table, but of a pipeline its operators, not its stages."""
    point = exploration.all_points[row]
    return operator_rows(exploration, row, None if point.pipeline is not None else detail)


def _modules(exploration: Exploration) -> dict[str, str]:
    """The module of each operator group, where the graph was saved."""
    if exploration.recorded is None:
        return {}
    return {group.name: group.anchor.module for group in exploration.recorded.grouped.groups}


TOTAL = "total"
HEADLINE = "fullest, busiest device"
"""Whose memory and whose seconds the headline has, where devices have different loads."""


def beside_rows(exploration: Exploration, row: int, detail: Any) -> tuple[Share, ...]:
    """What the operators' rows leave of memory, compute and communication, and the total: the headline's.

    Nothing without details. Where rows are stages, or operators of devices of different loads, they have no
    sum that a device has: only the headline's figures follow.
    """
    point = exploration.all_points[row]
    if detail is None:
        return ()
    if point.carried is not None:
        return (Share(HEADLINE, point.memory_bytes, point.compute_s, point.communication_s),)
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


def _detailed(o: Any, share: Share, space: Space, sizes: Mapping[str, int]) -> OperatorRow:
    batch = space.groups[o.group]["micro"] if o.group in space.groups else ""
    return OperatorRow(
        group=o.group,
        module=o.module,
        members=len(o.members),
        axes=axes_words(o.configuration, batch, sizes),
        options=option_words(o.options, o.configuration, batch, sizes, space.keys),
        memory_bytes=float(share.memory_bytes),
        compute_s=float(share.compute_s),
        communication_s=float(share.communication_s),
        source=str(o.source),
        kept_bytes=float(o.kept_bytes),
        recomputed=bool(o.recomputed),
    )


STORED = {"held/P": "ZeRO-1", "held": "ZeRO-2", "": "ZeRO-3", "ahead": "ZeRO-3, gathered ahead"}
"""Shards that are no part of a split use, by what a stored layout says beside its axes."""


def option_words(
    options: Iterable[str],
    configuration: Mapping[str, str],
    batch: str,
    sizes: Mapping[str, int],
    keys: Mapping[str, str],
) -> str:
    """``weight, bias: ZeRO-1 ×8``: parameters that are stored in shards although they are used whole.

    Args:
        options: ``parameter: placement, ...`` per parameter, as details say them.
        keys: graph name of a parameter -> the model's own.
    """
    told: dict[str, list[str]] = {}
    for option in options:
        name, colon, stored = option.partition(": ")
        if not colon:
            told.setdefault("", []).append(option)  # of a stage: what it recomputes
            continue
        placements = stored.split(", ")
        parts = 1
        for (axis, label), placement in zip(configuration.items(), placements, strict=False):
            if placement.startswith("S(") and what_it_does(label, batch) != TENSOR:
                parts *= sizes.get(axis, 1)
        if parts > 1:
            way = placements[-1] if len(placements) > len(configuration) else ""
            words = f"{STORED.get(way, way)} ×{parts}"
            told.setdefault(words, []).append(keys.get(name, name).rpartition(".")[2])
    return "; ".join(
        f"{', '.join(names)}: {words}" if words else ", ".join(names) for words, names in told.items()
    )


def _module_of(keys: Sequence[str]) -> str:
    return keys[0].rpartition(".")[0] if keys else ""


def changed_operators(
    exploration: Exploration, row: int, other: int
) -> tuple[tuple[str, str, str, str], ...]:
    """(operator, module, what it splits in the other plan, in this one), where the two differ.

    What is split into how many parts is compared, not by which axis: plans over two meshes may be the same.
    """
    first = {o.group: o for o in operator_rows(exploration, other)}
    second = {o.group: o for o in operator_rows(exploration, row)}
    return tuple(
        (name, o.module, first[name].axes if name in first else "—", o.axes)
        for name, o in second.items()
        if name not in first or first[name].axes != o.axes
    )


def recomputed_blocks(exploration: Exploration, row: int) -> tuple[str, ...]:
    """The blocks that a plan computes again in backward, in the model's order."""
    return exploration.plan(row).recomputed


def recomputation_difference(exploration: Exploration, row: int, other: int) -> tuple[tuple[str, str], ...]:
    """(which plans, which blocks) of what is recomputed: in both, in one only; nothing where in none."""
    mine, theirs = recomputed_blocks(exploration, row), recomputed_blocks(exploration, other)
    parts = (
        ("in both", [b for b in mine if b in theirs]),
        ("only there", [b for b in theirs if b not in mine]),
        ("only here", [b for b in mine if b not in theirs]),
    )
    return tuple((title, blocks_words(blocks)) for title, blocks in parts if blocks)


def blocks_words(blocks: Sequence[str]) -> str:
    """``h.0–3, h.7``: blocks in a row are named by their ends."""
    runs: list[tuple[str, int, int]] = []
    words = []
    for block in blocks:
        head, _, number = block.rpartition(".")
        if not number.isdigit():
            words.append(block)
        elif runs and runs[-1][0] == head and runs[-1][2] == int(number) - 1:
            runs[-1] = (head, runs[-1][1], int(number))
        else:
            runs.append((head, int(number), int(number)))
    for head, low, high in runs:
        name = f"{head}.{low}" if head else str(low)
        words.append(name if low == high else f"{name}–{high}")
    return ", ".join(words)
