"""All about one point: what it is made of, and what dominates it in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tensoropt.plan.plan import STAGE_AXIS
from tensoropt.report.trace import chrome_trace
from tensoropt.simulate.recording import (
    MEMORY_KINDS,
    EdgeRow,
    MemoryAt,
    OperatorRow,
    StepTime,
    TimelineEvent,
    is_host_bound,
)
from tensoropt.units import format_bytes, format_seconds

BESIDE = ("recomputation", "gradient reduction", "optimizer")
"""What takes time beside single operators."""
AGAIN = "again"
"""The phase of what is computed and gathered a second time."""


@dataclass(frozen=True)
class Share:
    """What of a point's totals is of one operator, or of something beside all operators.

    Attributes:
        memory_bytes: at the peak; of an operator what lasts: parameters, gradients, optimizer state.
        compute_s, communication_s: of one step; without what is computed again, which is a share of its own.
    """

    title: str
    memory_bytes: float
    compute_s: float
    communication_s: float


@dataclass(frozen=True, repr=False)
class Detail:
    """All about one point of a frontier.

    Attributes:
        point: its index in ``all_points``; people count from 1.
        operators, edges: what each group of operators, and each resharding, takes; of a pipeline, each stage,
            whose seconds are those of its schedule, with what it waits for.
        timeline, memory_curve: one rank's step in time.
        overlap: what is assumed to run beside what, in words.
        sources: shares of all seconds by where they come from.
        places: where loads differ, the peak and the seconds of each device of a placed plan, and of a rank of
            each place of a pipeline.
    """

    point: int
    operators: tuple[OperatorRow, ...]
    edges: tuple[EdgeRow, ...]
    timeline: tuple[TimelineEvent, ...]
    memory_curve: tuple[MemoryAt, ...]
    step: StepTime
    overlap: str
    sources: Mapping[str, float]
    places: tuple[Share, ...] = ()

    def __repr__(self) -> str:
        counts = (
            f"{len(self.operators)} operators, {len(self.edges)} reshardings, {len(self.timeline)} events"
        )
        return f"Detail of point {self.point + 1} ({counts})\n{self.headline()}"

    @property
    def peak(self) -> MemoryAt:
        """The moment of the largest memory."""
        return max(self.memory_curve, key=lambda at: at.total)

    @property
    def by_stage(self) -> bool:
        """Whether ``operators`` are the stages of a pipeline."""
        return any(STAGE_AXIS in row.configuration for row in self.operators)

    def shares(self) -> tuple[tuple[Share, ...], tuple[Share, ...]]:
        """(of every operator, of what is beside them): together the step's compute, communication and peak.

        Read off the timeline, so that nothing is counted twice and nothing is left out. Of placed plans and
        pipelines no device has the sums: what each has is in :attr:`places`.
        """
        names = {row.group for row in self.operators}
        seconds: dict[str, list[float]] = {}
        for event in self.timeline:
            if event.phase == AGAIN:
                of = "recomputation"
            elif event.group in names:
                of = event.group
            else:
                of = "optimizer" if event.phase == "optimizer" else "gradient reduction"
            # A group may be called as one of these is: operators are asked for by their own key.
            key = f"operator {of}" if of == event.group and event.phase != AGAIN else of
            spent = seconds.setdefault(key, [0.0, 0.0])
            spent[not event.is_computing] += event.duration_s
        operators = tuple(
            Share(
                row.group,
                row.parameters_bytes + row.gradients_bytes + row.state_bytes,
                *seconds.pop(f"operator {row.group}", (0.0, 0.0)),
            )
            for row in self.operators
        )
        peak = self.peak
        lasting = peak.parameters + peak.gradients + peak.optimizer
        return operators, (
            *(Share(title, 0.0, *seconds[title]) for title in BESIDE if title in seconds),
            Share("other state", lasting - sum(share.memory_bytes for share in operators), 0.0, 0.0),
            Share("kept activations", peak.kept, 0.0, 0.0),
            Share("buffers in flight", peak.transient, 0.0, 0.0),
        )

    def trace(self) -> dict[str, Any]:
        """Chrome's trace format, which Perfetto opens too."""
        return chrome_trace(self.timeline, self.memory_curve, f"point {self.point + 1}", self.overlap)

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
        if top := self.top_words():
            parts[0] += f" ({top})"
        if step.exposed_s:
            parts.append(f"{share * step.exposed_s:.0f} % waiting for communication{self._busiest_lane()}")
        if step.idle_s > 1e-3 * step.total_s:
            waits = "idle"
            if is_host_bound(step):
                # A place of a pipeline waits for others, too.
                waits = "idle, or waiting for the host" if self.places else "waiting for the host"
            parts.append(f"{share * step.idle_s:.0f} % {waits}")
        where = "on the busiest device " if self.places else ""
        text = f"A step of {format_seconds(step.total_s)} is {where}" + ", ".join(parts)
        if step.hidden_s > 1e-6 * step.total_s:  # less is rounding
            text += f"; {format_seconds(step.hidden_s)} of communication are hidden"
        return text + "."

    def top_words(self) -> str:
        """The operator that computes longest, and its share of all computing; "" of a pipeline, whose rows
        are stages, and where none stands out."""
        whole_s = sum(place.compute_s for place in self.places) or self.step.compute_s
        if not self.operators or not whole_s or self.by_stage:
            return ""
        top = max(self.operators, key=lambda row: row.forward_s + row.backward_s)
        share = 100 * (top.forward_s + top.backward_s) / whole_s
        of = "what all devices compute" if self.places else "it"
        return f"most of all {top.group}, {share:.0f} % of {of}" if share >= 1 else ""

    def _busiest_lane(self) -> str:
        lanes: dict[str, float] = {}
        for event in self.timeline:
            if event.phase.startswith("send") or not event.is_computing:
                lanes[event.lane] = lanes.get(event.lane, 0.0) + event.duration_s
        return f" (most of all on {max(lanes, key=lanes.__getitem__)})" if lanes else ""

    def _memory_words(self) -> str:
        peak = self.peak
        sizes = {kind: getattr(peak, kind) for kind in MEMORY_KINDS}
        ordered = sorted(sizes, key=sizes.__getitem__, reverse=True)
        parts = [f"{kind} {100 * sizes[kind] / (peak.total or 1.0):.0f} %" for kind in ordered if sizes[kind]]
        return f"Its memory peaks at {format_bytes(peak.total)}: {', '.join(parts)}."
