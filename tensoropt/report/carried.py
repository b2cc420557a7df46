"""The detail of a point without indices, placed or pipelined: the recording that it carries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tensoropt.placement.points import OVERLAP
from tensoropt.plan.plan import STAGE_AXIS
from tensoropt.plan.point import Point
from tensoropt.report.rows import Detail, Share
from tensoropt.simulate.recording import MemoryAt, OperatorRow, StepTime, TimelineEvent


def carried_detail(point: Point, index: int) -> Detail:
    """The detail of a placed or pipelined point, from what it carries."""
    record = point.carried or {}
    return Detail(
        point=index,
        operators=tuple(
            OperatorRow(**{**row, "members": tuple(row["members"]), "options": tuple(row["options"])})
            for row in record["rows"]
        ),
        edges=(),
        timeline=tuple(TimelineEvent(*event) for event in record["events"]),
        memory_curve=tuple(MemoryAt(*at) for at in record["curve"]),
        step=StepTime(
            point.time_s, point.compute_s, point.exposed_s, point.hidden_s, point.idle_s, point.host_s
        ),
        overlap=record.get("overlap", OVERLAP),
        sources=dict(point.sources),
        places=places_of(point),
    )


def places_of(point: Point) -> tuple[Share, ...]:
    """Each device of a placed plan, or a rank of each place of a pipeline: its peak and its seconds.

    None of pipelines that were explored before these were kept, and of points that carry no recording.
    """
    record = point.carried or {}
    if point.placed is not None:
        return _devices(record, sum(point.terms.values()))
    if point.pipeline is not None and "loads" in record:
        return _places(record)
    return ()


def _devices(record: Mapping[str, Any], beside_bytes: float) -> tuple[Share, ...]:
    device_of = {row["group"]: row["configuration"]["device"] for row in record.get("rows", ())}
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in (TimelineEvent(*event) for event in record.get("events", ())):
        if event.is_computing:
            seconds[event.lane.removeprefix("device ")][0] += event.duration_s
        elif event.group in device_of:
            seconds[device_of[event.group]][1] += event.duration_s
    return tuple(
        Share(f"device {number}", peak + beside_bytes, *seconds[str(number)])
        for number, peak in enumerate(record["placed"].get("peak_bytes", ()))
    )


def _places(record: Mapping[str, Any]) -> tuple[Share, ...]:
    stages: dict[int, list[str]] = defaultdict(list)
    for row in record["rows"]:
        stages[int(row["configuration"][STAGE_AXIS])].append(row["group"].removeprefix("stage "))
    found = []
    for number, (peak, seconds) in enumerate(
        zip(record["pipeline"]["peak_bytes"], record["loads"], strict=True)
    ):
        own = stages[number]
        title = f"place {number}, stage{'s' if len(own) > 1 else ''} {', '.join(own)}"
        found.append(Share(title, peak, *seconds))
    return tuple(found)
