"""The detail of a point without indices, placed or pipelined: the recording that it carries."""

from __future__ import annotations

from tensoropt.placement.points import OVERLAP
from tensoropt.plan.point import Point
from tensoropt.report.rows import Detail
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
        step=StepTime(point.time_s, point.compute_s, point.exposed_s, point.hidden_s, point.idle_s),
        overlap=record.get("overlap", OVERLAP),
        sources=dict(point.sources),
    )
