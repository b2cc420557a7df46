"""The detail of a point without indices, placed or pipelined, from its record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tensoropt.placement.points import OVERLAP
from tensoropt.plan.exploration import Exploration
from tensoropt.plan.plan import STAGE_AXIS
from tensoropt.plan.point import Point
from tensoropt.plan.point_records import PipelineRecord, PlacedRecord
from tensoropt.report.rows import Detail, Share
from tensoropt.report.spent import NOTHING, Spent, beside_groups, spent_by_group
from tensoropt.report.step_parts import (
    COPIES,
    OPTIMIZER_TITLE,
    RECOMPUTATION,
    Computed,
    Part,
    kind_of,
    step_parts,
)
from tensoropt.simulate.recording import OperatorRow, TimelineEvent


def carried_detail(exploration: Exploration, index: int) -> Detail:
    """Return the detail of placed or pipelined point ``index`` of ``all_points``, from its record."""
    point = exploration.all_points[index]
    assert point.record is not None, "a point with indices is simulated anew"
    recording = point.record.recording
    rows, timeline = recording.operator_rows(), recording.timeline()
    parts: tuple[Part, ...]
    if point.pipeline is not None:
        parts = _parts_of_pipeline(exploration, index, point.pipeline, timeline)
    else:
        rows = _copying_apart(rows, spent_by_group(timeline, {row.group for row in rows}))
        parts = _parts_of_placed(exploration, index, rows, timeline)
    return Detail(
        point=index,
        operators=tuple(rows),
        edges=(),
        timeline=timeline,
        memory_curve=recording.memory_curve(),
        step=point,
        overlap=OVERLAP if point.pipeline is None else point.pipeline.overlap,
        sources=point.sources,
        parts=parts,
        places=_places_of(point),
    )


def _copying_apart(rows: Sequence[OperatorRow], spent: Mapping[str, Spent]) -> list[OperatorRow]:
    """Return the rows of a placed plan with the seconds of its timeline; those that cut tensors into pieces,
    or join pieces, copy."""
    found = []
    for row in rows:
        one = spent.get(row.group, NOTHING)
        worked = replace(row, communication_s=one.communication_s, forward_s=0.0, backward_s=0.0)
        if row.members:
            found.append(replace(worked, forward_s=one.forward_s, backward_s=one.backward_s))
        else:
            found.append(replace(worked, copies_s=one.forward_s + one.backward_s))
    return found


def _parts_of_placed(
    exploration: Exploration, index: int, rows: Sequence[OperatorRow], timeline: Sequence[TimelineEvent]
) -> tuple[Part, ...]:
    """Return the parts of the step on the device that computes longest."""
    busy: dict[str, float] = defaultdict(float)
    for event in timeline:
        if event.is_computing:
            busy[event.lane] += event.duration_s
    lane = max(busy, key=busy.__getitem__, default="")
    own = [event for event in timeline if event.lane == lane]
    spent = spent_by_group(own, {row.group for row in rows})
    computed = []
    copied_s = 0.0
    for row in rows:
        one = spent.get(row.group, NOTHING)
        if row.members:
            computed.append(Computed(row.module, _kind(exploration, row), one.forward_s + one.backward_s))
        else:
            copied_s += one.forward_s + one.backward_s
    beside = beside_groups(own, spent)
    beside[COPIES] += copied_s
    return step_parts(exploration, index, computed, beside, timeline)


def _kind(exploration: Exploration, row: OperatorRow) -> str:
    """Return what a placed group, or a piece of one, computes."""
    recorded = exploration.recorded
    group = recorded.grouped.group_of.get(row.members[0]) if recorded is not None else None
    return kind_of(group.anchor.target if group is not None else row.members[0])


def _parts_of_pipeline(
    exploration: Exploration, index: int, record: PipelineRecord, timeline: Sequence[TimelineEvent]
) -> tuple[Part, ...]:
    """Return the parts of the step on a rank of the busiest place."""
    if record.computed is None:  # saved by an older version: its stages' operators are not distinguished
        return step_parts(exploration, index, None, {}, timeline)
    computed = [Computed(module, kind_of(target), s) for _, module, target, s in record.computed]
    beside = {RECOMPUTATION: record.again_s, OPTIMIZER_TITLE: record.optimizer_s}
    known_s = sum(beside.values()) + sum(one.seconds for one in computed)
    # This includes the slow-down of computation during communication.
    beside[COPIES] = max(exploration.all_points[index].compute_s - known_s, 0.0)
    return step_parts(exploration, index, computed, beside, timeline)


def _places_of(point: Point) -> tuple[Share, ...]:
    """Return the peak and the seconds of each device of a placed plan, or of a rank of each place of a
    pipeline.

    Empty for pipelines that were explored before these were kept, and for points that carry no recording.
    """
    if point.placed is not None:
        return _devices(point.placed, sum(point.terms.values()))
    return () if point.pipeline is None else tuple(_places(point.pipeline))


def _devices(record: PlacedRecord, beside_bytes: float) -> tuple[Share, ...]:
    device_of = {row.group: row.configuration["device"] for row in record.recording.operator_rows()}
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in record.recording.timeline():
        if event.is_computing:
            seconds[event.lane.removeprefix("device ")][0] += event.duration_s
        elif event.group in device_of:
            seconds[device_of[event.group]][1] += event.duration_s
    return tuple(
        Share(f"device {number}", peak + beside_bytes, *seconds[str(number)])
        for number, peak in enumerate(record.info.peak_bytes)
    )


def _places(record: PipelineRecord) -> Iterator[Share]:
    if record.loads is None:
        return
    stages: dict[int, list[str]] = defaultdict(list)
    for row in record.recording.operator_rows():
        stages[int(row.configuration[STAGE_AXIS])].append(row.group.removeprefix("stage "))
    for number, (peak, seconds) in enumerate(zip(record.info.peak_bytes, record.loads, strict=True)):
        own = stages[number]
        title = f"place {number}, stage{'s' if len(own) > 1 else ''} {', '.join(own)}"
        yield Share(title, peak, *seconds)
