"""All about one point: what it is made of, and what dominates it in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tensoropt.report.trace import chrome_trace
from tensoropt.simulate.recording import (
    COMPUTE,
    MEMORY_KINDS,
    EdgeRow,
    MemoryAt,
    OperatorRow,
    StepTime,
    TimelineEvent,
    is_host_bound,
)
from tensoropt.units import format_bytes, format_seconds


@dataclass(frozen=True, repr=False)
class Detail:
    """All about one point of a frontier.

    Attributes:
        point: its number.
        operators, edges: what each group of operators, and each resharding, takes.
        timeline, memory_curve: one rank's step in time.
        overlap: what is assumed to run beside what, in words.
        sources: shares of all seconds by where they come from.
    """

    point: int
    operators: tuple[OperatorRow, ...]
    edges: tuple[EdgeRow, ...]
    timeline: tuple[TimelineEvent, ...]
    memory_curve: tuple[MemoryAt, ...]
    step: StepTime
    overlap: str
    sources: Mapping[str, float]

    def __repr__(self) -> str:
        counts = (
            f"{len(self.operators)} operators, {len(self.edges)} reshardings, {len(self.timeline)} events"
        )
        return f"Detail of point {self.point} ({counts})\n{self.headline()}"

    @property
    def peak(self) -> MemoryAt:
        """The moment of the largest memory."""
        return max(self.memory_curve, key=lambda at: at.total)

    def trace(self) -> dict[str, Any]:
        """Chrome's trace format, which Perfetto opens too."""
        return chrome_trace(self.timeline, self.memory_curve, f"point {self.point}", self.overlap)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain data."""
        return asdict(self)

    def headline(self) -> str:
        """What dominates, in two sentences."""
        return f"{self._time_words()} {self._memory_words()}"

    def _time_words(self) -> str:
        step = self.step
        share = 100 / (step.total_s or 1.0)
        parts = [f"{share * step.compute_s:.0f} % compute"]
        if self.operators and step.compute_s:
            top = max(self.operators, key=lambda row: row.forward_s + row.backward_s)
            part = 100 * (top.forward_s + top.backward_s) / step.compute_s
            parts[0] += f" (most of all {top.group}, {part:.0f} % of it)"
        if step.exposed_s:
            parts.append(f"{share * step.exposed_s:.0f} % waiting for communication{self._busiest_lane()}")
        if step.idle_s > 1e-3 * step.total_s:
            waits = "waiting for the host" if is_host_bound(step) else "idle"
            parts.append(f"{share * step.idle_s:.0f} % {waits}")
        text = f"A step of {format_seconds(step.total_s)} is " + ", ".join(parts)
        if step.hidden_s > 1e-6 * step.total_s:  # less is rounding
            text += f"; {format_seconds(step.hidden_s)} of communication are hidden"
        return text + "."

    def _busiest_lane(self) -> str:
        lanes: dict[str, float] = {}
        for event in self.timeline:
            if event.phase.startswith("send") or (
                event.lane != COMPUTE and not event.lane.startswith("device")
            ):
                lanes[event.lane] = lanes.get(event.lane, 0.0) + event.duration_s
        return f" (most of all on {max(lanes, key=lanes.__getitem__)})" if lanes else ""

    def _memory_words(self) -> str:
        peak = self.peak
        sizes = {kind: getattr(peak, kind) for kind in MEMORY_KINDS}
        ordered = sorted(sizes, key=sizes.__getitem__, reverse=True)
        parts = [f"{kind} {100 * sizes[kind] / (peak.total or 1.0):.0f} %" for kind in ordered if sizes[kind]]
        return f"Its memory peaks at {format_bytes(peak.total)}: {', '.join(parts)}."
