"""Observations of real steps: memory over time, what devices did when, and where steps begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tensoropt.exploration.verified import Verified
from tensoropt.types import Floats

Category = Literal["compute", "communication", "copy"]


@dataclass(frozen=True)
class ObservedMemory:
    """Bytes allocated on a device.

    Attributes:
        times_s: (n,) ascending; without a clock, the numbers of the events.
        bytes: (n,) the bytes from then on.
    """

    device: str
    times_s: Floats
    bytes: Floats

    @property
    def peak_bytes(self) -> float:
        """The most bytes allocated at once."""
        return float(self.bytes.max(initial=0.0))


@dataclass(frozen=True, slots=True)
class ObservedEvent:
    """An action of a device; ``lane`` says where, a stream of a device or a thread."""

    name: str
    lane: str
    category: Category
    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        """The end of the event."""
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True)
class StepMark:
    """A step as the profiler marked it."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Observation:
    """The contents of one file.

    Attributes:
        kind: the kind of file, in words.
        memory: the memory of each device.
        events: the events, ordered by start.
        steps: the steps, ordered by start.
        clocked: whether the times are seconds; otherwise they only count events.
        notes: what a reader must know, as sentences.
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
        return max(self.memory, key=lambda memory: memory.peak_bytes, default=None)

    @property
    def span(self) -> tuple[float, float]:
        """The first and the last time of anything observed."""
        times = [t for memory in self.memory for t in (memory.times_s[:1], memory.times_s[-1:])]
        ends = np.array([e.end_s for e in self.events])
        starts = np.array([e.start_s for e in self.events])
        every = np.concatenate([*times, starts, ends]) if times or self.events else np.zeros(1)
        return float(every.min()), float(every.max())
