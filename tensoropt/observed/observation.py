"""What was observed of real steps: memory in time, what devices did when, and where steps begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tensoropt.plan.verified import Verified
from tensoropt.types import Floats

Category = Literal["compute", "communication", "copy"]


@dataclass(frozen=True)
class ObservedMemory:
    """Bytes allocated on a device.

    Attributes:
        times_s: (n,) ascending; where there was no clock the numbers of the events.
        bytes: (n,) from then on.
    """

    device: str
    times_s: Floats
    bytes: Floats

    @property
    def peak_bytes(self) -> float:
        """The most at once."""
        return float(self.bytes.max(initial=0.0))


@dataclass(frozen=True, slots=True)
class ObservedEvent:
    """Something that a device did; ``lane`` says where, a stream of a device or a thread."""

    name: str
    lane: str
    category: Category
    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        """When it was over."""
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True)
class StepMark:
    """A step as the profiler marked it."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Observation:
    """One file, read.

    Attributes:
        kind: in words.
        memory: per device.
        events: by start.
        steps: by start.
        clocked: the times are seconds; else they only count events.
        notes: what a reader must know, in sentences.
        verified: what ``tensoropt verify --save`` kept.
    """

    kind: str
    memory: tuple[ObservedMemory, ...] = ()
    events: tuple[ObservedEvent, ...] = ()
    steps: tuple[StepMark, ...] = ()
    clocked: bool = True
    notes: tuple[str, ...] = ()
    verified: tuple[Verified, ...] = ()

    @property
    def fullest(self) -> ObservedMemory | None:
        """The memory of the device with the highest peak, the first of several."""
        return max(self.memory, key=lambda one: one.peak_bytes, default=None)

    @property
    def span(self) -> tuple[float, float]:
        """From when to when anything was observed."""
        times = [t for one in self.memory for t in (one.times_s[:1], one.times_s[-1:])]
        ends = np.array([e.end_s for e in self.events])
        starts = np.array([e.start_s for e in self.events])
        every = np.concatenate([*times, starts, ends]) if times or self.events else np.zeros(1)
        return float(every.min()), float(every.max())
