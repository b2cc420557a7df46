"""What a point's detail is made of: rows of operators and reshardings, a timeline, a memory curve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tensoropt.plan.exploration import MEMORY_KINDS
from tensoropt.plan.trace import chrome_trace
from tensoropt.units import format_bytes, format_seconds

COMPUTE = "compute"


@dataclass(frozen=True)
class OperatorRow:
    """A group of operators; bytes of one rank, seconds of one step (all micro-batches).

    ``transient_bytes`` is the larger of forward's and backward's own peak. ``communication_s`` is what the
    group waits for: its inputs, its parameters, its kernels. ``source``: of its compute seconds.
    ``recomputed``: its forward runs twice, and what it keeps lives only while its region's backward runs.
    """

    group: str
    members: tuple[str, ...]
    module: str
    configuration: Mapping[str, str]
    options: tuple[str, ...]
    parameters_bytes: int
    gradients_bytes: int
    state_bytes: int
    kept_bytes: int
    transient_bytes: int
    forward_s: float
    backward_s: float
    communication_s: float
    source: str
    recomputed: bool = False


@dataclass(frozen=True)
class EdgeRow:
    """A resharding; ``bytes`` of one rank and ``seconds`` per step, forward and backward, copies included."""

    tensor: str
    kind: str
    producer: str
    consumer: str
    source: tuple[str, ...]
    target: tuple[str, ...]
    collectives: tuple[str, ...]
    bytes: int
    seconds: float


@dataclass(frozen=True)
class TimelineEvent:
    """Something that takes time. ``lane``: ``compute``, or ``link`` and the mesh axes of a collective; in a
    placed plan ``device`` and its number, or ``link`` and what a message occupies."""

    name: str
    lane: str
    start_s: float
    duration_s: float
    phase: str
    group: str


@dataclass(frozen=True)
class MemoryAt:
    """Bytes alive from ``time_s`` on, by kind."""

    time_s: float
    parameters: float
    gradients: float
    optimizer: float
    kept: float
    transient: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.kept + self.transient


@dataclass(frozen=True)
class StepTime:
    """``total_s = compute_s + exposed_s + idle_s``; ``hidden_s`` is communication beside something else."""

    total_s: float
    compute_s: float
    exposed_s: float
    hidden_s: float
    idle_s: float


@dataclass(frozen=True)
class Detail:
    """All about one point. ``overlap``: what is assumed to run beside what, in words."""

    point: int
    operators: tuple[OperatorRow, ...]
    edges: tuple[EdgeRow, ...]
    timeline: tuple[TimelineEvent, ...]
    memory_curve: tuple[MemoryAt, ...]
    step: StepTime
    overlap: str
    sources: Mapping[str, float]

    @property
    def peak(self) -> MemoryAt:
        return max(self.memory_curve, key=lambda at: at.total)

    def trace(self) -> dict[str, Any]:
        """Chrome's trace format, which Perfetto opens too."""
        return chrome_trace(self.timeline, self.memory_curve, f"point {self.point}", self.overlap)

    def to_dict(self) -> dict[str, Any]:
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
            parts.append(f"{share * step.idle_s:.0f} % idle")
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
