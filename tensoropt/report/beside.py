"""Observations of a plan's real steps beside its prediction: curves on one time axis, figures with ratios.

The words for how far a prediction is off a measurement, by the size of the miss, are the same in every place
that shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensoropt.cluster.local import BUSY
from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.rates import for_gpus
from tensoropt.exploration.verified import Verified
from tensoropt.observed.observation import Observation, ObservedEvent, ObservedMemory
from tensoropt.report.step_parts import Detail
from tensoropt.simulate.recording import TimelineEvent
from tensoropt.simulate.timeline import joined, length_s
from tensoropt.types import Floats
from tensoropt.units import format_bytes, format_seconds

_OFF, _FAR = 1.25, 1.5
"""The ratios, in either direction, above which a prediction is off, and far off; smaller ones also occur
between runs. Assumptions."""


def _miss_of(measured: float, predicted: float) -> str:
    """Return ``far off``, ``off``, or "" for a prediction that came true."""
    if not measured or not predicted:
        return "far off" if measured != predicted else ""
    ratio = max(measured / predicted, predicted / measured) * (1 - 1e-9)
    return "far off" if ratio > _FAR else "off" if ratio > _OFF else ""


def _change_words(measured: float, predicted: float) -> str:
    """Format a change: ``+1 %``; ``+333 %, far off``; "" if nothing was predicted."""
    if not predicted:
        return ""
    change = f"{100 * (measured / predicted - 1):+.0f} %".replace("-", "−")
    miss = _miss_of(measured, predicted)
    return f"{'±0 %' if change in ('+0 %', '−0 %') else change}{f', {miss}' if miss else ''}"


def _ran_elsewhere(verified: Verified, cluster: Mapping[str, Any]) -> bool:
    """Return whether a plan for GPUs ran on CPU ranks, whose seconds nobody predicted."""
    return for_gpus(cluster) and "CPU ranks" in verified.checked_on


def busy_words(cores_busy: float | None) -> str:
    """Say that a machine was busy with something else while steps were timed: ``the machine was busy: other
    programs had 1.7 cores in use``; "" if it was not, or if that is not known."""
    if cores_busy is None or cores_busy < BUSY:
        return ""
    return f"the machine was busy: other programs had {cores_busy:.1f} cores in use"


def ran_words(
    verified: Verified,
    cluster: Mapping[str, Any],
    memory: Callable[[float], str] = format_bytes,
    seconds: Callable[[float], str] = format_seconds,
) -> str:
    """Return ``73.2 MiB tracked (72.3 MiB predicted, +1 %); 352 ms measured (...); numbers as of the unsplit
    model``.

    Args:
        cluster: the cluster that the plan is for.
        memory, seconds: the functions that format figures.
    """
    if verified.error:
        return f"did not run: {verified.error}"
    parts = []
    for word, measured, predicted, text in (
        ("tracked", verified.memory_tracked_bytes, verified.memory_predicted_bytes, memory),
        ("measured", verified.time_measured_s, verified.time_predicted_s, seconds),
    ):
        if measured is None:
            continue
        words = [f"{text(predicted)} predicted", _change_words(measured, predicted)]
        if word == "measured" and _ran_elsewhere(verified, cluster):
            words = [f"{text(predicted)} predicted, for other devices than these"]
        elif word == "measured":
            words.append(busy_words(verified.cores_busy))
        parts.append(f"{text(measured)} {word} ({', '.join(filter(None, words))})")
    if verified.loss_difference is None:
        parts.append(f"collectives {'as' if verified.ok else 'NOT as'} predicted")
    else:
        equal = "as of" if verified.ok else "NOT those of"
        parts.append(f"numbers {equal} the unsplit model")
    return "; ".join(parts)


def miss_sentences(verified: Verified, cluster: Mapping[str, Any]) -> list[str]:
    """Say which figures of a run were far off their prediction, a sentence each; seconds only if the devices
    are those of ``cluster``, which the plan is for."""
    sentences = []
    seconds = None if _ran_elsewhere(verified, cluster) else verified.time_measured_s
    for name, measured, predicted, text in (
        ("memory", verified.memory_tracked_bytes, verified.memory_predicted_bytes, format_bytes),
        ("a step", seconds, verified.time_predicted_s, format_seconds),
    ):
        if (
            not verified.error
            and measured is not None
            and predicted
            and _miss_of(measured, predicted) == "far off"
        ):
            times = f"{measured / predicted:.2g} times what was predicted"
            busy = busy_words(verified.cores_busy) if name == "a step" else ""
            sentences.append(
                f"The prediction of {name} is far off: {text(measured)} in the run, {times} "
                f"({text(predicted)}). "
                + (
                    f"{busy[:1].upper()}{busy[1:]}; verify again when it is idle."
                    if busy
                    else "Trust this plan's figures accordingly."
                )
            )
    return sentences


PEAK, WHOLE = "peak", "whole"
"""Ways to align an observation with the predicted step, beside the names of its steps."""


@dataclass(frozen=True)
class MeasuredFigure:
    """A figure, predicted and measured; bytes or seconds by ``unit`` (``bytes``, ``s``).

    Attributes:
        measured: the measured value; None if the file does not contain it.
    """

    name: str
    unit: str
    predicted: float
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """The measured divided by the predicted value; None if there is none."""
        return self.measured / self.predicted if self.measured is not None and self.predicted else None

    def words(
        self,
        memory: Callable[[float], str] = format_bytes,
        time: Callable[[float], str] = format_seconds,
    ) -> tuple[str, str, str, str]:
        """Return its cells for people: name, predicted, measured, ratio with the change in words."""
        form = memory if self.unit == "bytes" else time
        measured = "not told" if self.measured is None else form(self.measured)
        return self.name, form(self.predicted), measured, self.ratio_words

    @property
    def ratio_words(self) -> str:
        """Format the ratio: ``1.02 (+2 %)``; ``4.33 (+333 %, far off)``; "" without a ratio."""
        if self.measured is None or (ratio := self.ratio) is None:
            return ""
        return f"{ratio:.2f} ({_change_words(self.measured, self.predicted)})"


@dataclass(frozen=True)
class Beside:
    """A prediction with what was observed, on the predicted step's time axis.

    Attributes:
        kind: the kind of file, in words.
        align: how the two were aligned; one of ``alignments``.
        scale: predicted seconds per observed one (per event, if there was no clock).
        times_s, bytes: (n,) the observed memory curve; empty if there is none.
        device: the device whose memory that is.
        events: the device's actions, with ``stream`` lanes; ``phase`` is compute, communication or copy.
        figures: the figures, predicted and measured.
        notes: what a reader must know, as sentences.
    """

    kind: str
    align: str
    alignments: tuple[str, ...]
    scale: float
    times_s: Floats
    bytes: Floats
    device: str
    events: tuple[TimelineEvent, ...]
    figures: tuple[MeasuredFigure, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data."""
        figures = [{**vars(figure), "ratio": figure.ratio} for figure in self.figures]
        curve = [self.times_s.tolist(), self.bytes.tolist()]
        return {
            "kind": self.kind, "align": self.align, "alignments": self.alignments, "scale": self.scale,
            "device": self.device, "curve": curve, "events": [vars(e) for e in self.events],
            "figures": figures, "notes": self.notes,
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Return a table for a terminal, and what to know about it."""
        cells = [("", "predicted", "measured", "ratio"), *(figure.words() for figure in self.figures)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        title = f"beside a {self.kind}, {self.align_words}:"
        rows = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        return [title, *rows, *(f"({note})" for note in self.notes)]

    @property
    def align_words(self) -> str:
        """Describe the alignment in words."""
        return {PEAK: "aligned by the peaks", WHOLE: "the whole recording as one step"}.get(
            self.align, f"the step {self.align}"
        )


def alignments(observation: Observation) -> tuple[str, ...]:
    """Return the ways in which an observation can be aligned with a step, the default first."""
    steps = tuple(mark.name for mark in reversed(observation.steps))
    if not observation.memory and not observation.events:
        return (WHOLE,)
    # The last step: in the first steps caches are cold, and optimizers create their state.
    by_peak = (PEAK,) if observation.memory else ()
    return (*steps, *by_peak, WHOLE) if observation.clocked else (*steps, WHOLE, *by_peak)


def beside(
    exploration: Exploration, detail: Detail, observation: Observation, align: str | None = None
) -> Beside:
    """Return a point's prediction with what was observed.

    Args:
        detail: the point's detail (:func:`tensoropt.report.detail.detail`).
        align: one of :func:`alignments`: the name of a step, ``peak`` or ``whole``.

    Raises:
        TensorOptError: there is no such alignment, or the results of verify are for other plans.
    """
    ways = alignments(observation)
    align = align or ways[0]
    if align not in ways:
        raise TensorOptError(f"the file cannot be aligned by '{align[:60]}'; choose from {', '.join(ways)}")
    if observation.verified:
        return _verified(exploration, detail, observation, ways)
    start, end, scale = _window(observation, detail, align)
    memory = observation.fullest
    times, sizes = _curve(memory, start, end, scale) if memory else (np.zeros(0), np.zeros(0))
    events = [e for e in _of_one_device(observation.events) if start <= e.start_s < end]
    mark = next((m for m in observation.steps if m.name == align), None)
    step_s = mark.end_s - mark.start_s if mark else None
    notes = list(observation.notes)
    if len(observation.memory) > 1 and memory:
        notes.append(f"of {len(observation.memory)} devices the fullest is shown, {memory.device}")
    return Beside(
        observation.kind,
        align,
        ways,
        scale,
        times,
        sizes,
        memory.device if memory else "",
        tuple(
            TimelineEvent(e.name, e.lane, (e.start_s - start) * scale, e.duration_s * scale, e.category, "")
            for e in events
        ),
        (_peak(detail, float(sizes.max()) if len(sizes) else None), *_times(detail, events, step_s)),
        tuple(notes),
    )


def _peak(detail: Detail, measured: float | None) -> MeasuredFigure:
    return MeasuredFigure("peak memory", "bytes", detail.peak.total, measured)


def _times(
    detail: Detail, events: Sequence[ObservedEvent], step_s: float | None
) -> tuple[MeasuredFigure, ...]:
    step = detail.step
    predicted = (step.time_s, step.compute_s, step.exposed_s + step.hidden_s, step.exposed_s)
    measured: tuple[float | None, ...] = (step_s, None, None, None)
    if events:
        computing = [(e.start_s, e.end_s) for e in events if e.category == "compute"]
        sending = [(e.start_s, e.end_s) for e in events if e.category == "communication"]
        computed = length_s(joined(computing))
        both = length_s(joined([*computing, *sending]))
        measured = step_s, computed, length_s(sending), both - computed
    names = ("step", "computing", "communication, all", "communication, exposed")
    return tuple(MeasuredFigure(n, "s", p, m) for n, p, m in zip(names, predicted, measured, strict=True))


def _verified(
    exploration: Exploration, detail: Detail, observation: Observation, ways: tuple[str, ...]
) -> Beside:
    run: Verified | None = next(
        (candidate for candidate in observation.verified if candidate.is_of(exploration, detail.index)), None
    )
    if run is None:
        raise TensorOptError(
            f"none of the {len(observation.verified)} verified plans in the file is point {detail.index + 1} "
            "of this exploration; verify this point's plan"
        )
    notes = [f"checked on {run.checked_on}", *([f"it did not run: {run.error}"] if run.error else [])]
    notes += filter(None, [busy_words(run.cores_busy)])
    nothing = np.zeros(0)
    figures = _peak(detail, run.memory_tracked_bytes), *_times(detail, (), run.time_measured_s)
    return Beside(
        observation.kind, ways[0], ways, 1.0, nothing, nothing, "", (), figures, (*notes, *observation.notes)
    )


def _window(observation: Observation, detail: Detail, align: str) -> tuple[float, float, float]:
    """Return the (start, end) in observed time that correspond to the predicted step, and predicted seconds
    per observed one."""
    step_s = detail.step.time_s
    first, last = observation.span
    mark = next((m for m in observation.steps if m.name == align), None)
    if mark is not None:
        first, last = mark.start_s, mark.end_s
    whole = step_s / (last - first) if last > first else 1.0
    if align != PEAK:
        # The very last change is part of the whole.
        return first, np.nextafter(last, np.inf) if mark is None else last, whole
    memory = observation.fullest
    assert memory is not None, "there is no alignment by peaks without memory"
    scale = 1.0 if observation.clocked else whole
    start = float(memory.times_s[int(memory.bytes.argmax())]) - detail.peak.time_s / scale
    return start, start + step_s / scale, scale


def _curve(memory: ObservedMemory, start: float, end: float, scale: float) -> tuple[Floats, Floats]:
    """Return the part of a curve in a window, beginning with what is there as it begins."""
    # The first event's state also holds before it.
    first = int(np.searchsorted(memory.times_s, start, side="right")) - 1
    last = int(np.searchsorted(memory.times_s, end, side="left"))
    times, sizes = memory.times_s[max(first, 0) : last], memory.bytes[max(first, 0) : last]
    return (np.maximum(times, start) - start) * scale, sizes


def _of_one_device(events: Sequence[ObservedEvent]) -> list[ObservedEvent]:
    """Return the events of the busiest device; a trace of one process mostly has only one."""
    busy: dict[str, float] = {}
    for event in events:
        device = event.lane.partition(" stream ")[0] if " stream " in event.lane else ""
        busy[device] = busy.get(device, 0.0) + event.duration_s
    if not busy:
        return []
    most = max(busy, key=lambda device: busy[device])
    return [e for e in events if not most or e.lane.startswith(f"{most} stream ")]


def thinned(times_s: Floats, values: Floats, most: int = 4000) -> tuple[Floats, Floats]:
    """Return a curve of at most about ``most`` points: the first, the highest and the lowest in each part of
    it."""
    parts = most // 3
    if len(times_s) <= most:
        return times_s, values
    kept = set()
    for part in np.array_split(np.arange(len(times_s)), parts):
        kept |= {int(part[0]), int(part[values[part].argmax()]), int(part[values[part].argmin()])}
    at = np.array(sorted(kept))
    return times_s[at], values[at]
