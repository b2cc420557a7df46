"""The rows about one point: its parts, and what dominates it in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tensoropt.plan.plan import STAGE_AXIS
from tensoropt.plan.point import Point
from tensoropt.report.spent import is_of_group
from tensoropt.report.step_parts import (
    AGAIN,
    COMPUTING,
    COPIES,
    OPTIMIZER,
    RECOMPUTATION,
    WAITING,
    Part,
    largest_words,
)
from tensoropt.report.trace import chrome_trace
from tensoropt.simulate.recording import (
    MEMORY_KINDS,
    EdgeRow,
    MemoryAt,
    OperatorRow,
    TimelineEvent,
    is_host_bound,
)
from tensoropt.units import format_bytes, format_seconds

_WHOLES = ("computing", "waiting for communication")
"""Parts that are the whole of their kind, as nothing is distinguished."""
REDUCTION = "gradient reduction"
BESIDE = (RECOMPUTATION, COPIES, REDUCTION, OPTIMIZER)
"""The parts that take time beside single operators."""


@dataclass(frozen=True)
class Share:
    """The share of a point's totals that belongs to an operator, or to something beside all operators.

    Attributes:
        memory_bytes: bytes at the peak; for an operator, what lasts: parameters, gradients, optimizer state.
        compute_s, communication_s: seconds of one step; without recomputation, which is a share of its own.
    """

    title: str
    memory_bytes: float
    compute_s: float
    communication_s: float


@dataclass(frozen=True, repr=False)
class Detail:
    """Everything about one point of a frontier.

    Attributes:
        point: the point's index in ``all_points``; people count from 1.
        operators, edges: what each group of operators, and each resharding, takes; for a pipeline, each
            stage, whose seconds are those of its schedule, including its waits.
        timeline, memory_curve: one rank's step over time.
        step: the point itself, for the seconds of its step.
        parts: the parts of the step, the longest first; they add up to it, on the busiest device if loads
            differ (:mod:`.step_parts`).
        overlap: what is assumed to overlap what, in words.
        sources: shares of all seconds by their sources.
        places: if loads differ, the peak and the seconds of each device of a placed plan, and of a rank of
            each place of a pipeline.
    """

    point: int
    operators: tuple[OperatorRow, ...]
    edges: tuple[EdgeRow, ...]
    timeline: tuple[TimelineEvent, ...]
    memory_curve: tuple[MemoryAt, ...]
    step: Point
    overlap: str
    sources: Mapping[str, float]
    parts: tuple[Part, ...] = ()
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
        """Return (the shares of every operator, those of what is beside them): together the step's compute,
        communication and peak.

        They are read off the timeline, so that nothing is counted twice and nothing is left out. In placed
        plans and pipelines no single device has the sums: :attr:`places` says what each has.
        """
        names = {row.group for row in self.operators}
        seconds: dict[str, list[float]] = {}
        for event in self.timeline:
            if event.phase == AGAIN:
                of = RECOMPUTATION
            elif is_of_group(event, names):
                continue  # in its row
            elif event.phase == OPTIMIZER:
                of = OPTIMIZER
            else:
                of = COPIES if event.is_computing else REDUCTION
            seconds.setdefault(of, [0.0, 0.0])[not event.is_computing] += event.duration_s
        operators = tuple(
            Share(
                row.group,
                row.parameters_bytes + row.gradients_bytes + row.state_bytes,
                row.compute_s,
                row.communication_s,
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
        """Return the step in Chrome's trace format, which Perfetto opens too."""
        return chrome_trace(self.timeline, self.memory_curve, f"point {self.point + 1}", self.overlap)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data; of the step its seconds alone."""
        names = ("compute_s", "exposed_s", "hidden_s", "idle_s", "host_s")
        step = {"total_s": self.step.time_s, **{name: getattr(self.step, name) for name in names}}
        return {**asdict(replace(self, step=None)), "step": step}  # type: ignore[arg-type]

    def headline(self) -> str:
        """Say what dominates, in two sentences."""
        return f"{self._time_words()} {self._memory_words()}"

    def _time_words(self) -> str:
        step = self.step
        share = 100 / (step.time_s or 1.0)
        told = [f"{share * step.compute_s:.0f} % compute{self._most_of(COMPUTING)}"]
        if step.exposed_s:
            told.append(f"{share * step.exposed_s:.0f} % waiting for communication{self._most_of(WAITING)}")
        if step.idle_s > 1e-3 * step.time_s:
            waits = "idle"
            if is_host_bound(step):
                # A place of a pipeline waits for others, too.
                waits = "idle, or waiting for the host" if self.places else "waiting for the host"
            told.append(f"{share * step.idle_s:.0f} % {waits}")
        where = "on the busiest device " if self.places else ""
        text = f"A step of {format_seconds(step.time_s)} is {where}" + ", ".join(told)
        if step.hidden_s > 1e-6 * step.time_s:  # less is rounding
            text += f"; {format_seconds(step.hidden_s)} of communication are hidden"
        return text + "."

    def _most_of(self, key: str) -> str:
        """Name the largest part of a kind with its share of the step, in brackets; "" if there is only
        one."""
        told = [part for part in self.parts if part.key == key and part.title not in _WHOLES]
        words = largest_words(told).replace("waiting for ", "")
        return f" (most of all {words} of the step)" if words else ""

    def _memory_words(self) -> str:
        peak = self.peak
        sizes = {kind: getattr(peak, kind) for kind in MEMORY_KINDS}
        ordered = sorted(sizes, key=sizes.__getitem__, reverse=True)
        parts = [f"{kind} {100 * sizes[kind] / (peak.total or 1.0):.0f} %" for kind in ordered if sizes[kind]]
        return f"Its memory peaks at {format_bytes(peak.total)}: {', '.join(parts)}."
