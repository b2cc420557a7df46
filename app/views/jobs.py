"""Jobs as texts for cards, and what the fields of the form *Plan it* offer."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..jobs.estimate import Estimate
from ..jobs.manager import Growing
from ..jobs.record import Job
from .units import digits, plural, time_unit, unit_for

_SWEEPS = ("clusters", "batches")
"""Stages of progress whose units are whole explorations."""


@dataclass(frozen=True)
class JobCard:
    """A job with its progress at time ``now`` (seconds since the epoch).

    Attributes:
        results: the library keys of its explorations; empty while it runs.
        found: a summary of its frontier, if it has a single one.
        growing: the points found so far, while it runs.
        first: what it says of the usual strategies before its search, while it runs.
        log: the end of its log.
    """

    job: Job
    now: float
    results: tuple[str, ...] = ()
    found: str = ""
    growing: Growing | None = None
    first: str = ""
    log: str = ""

    @property
    def words(self) -> str:
        """The job's state, duration, time of submission, and what it has found."""
        job, words = self.job, str(self.job.state)
        if job.state == "queued":
            words = "waiting for its turn"
        if job.started is not None:
            words += f" · {duration((job.ended or self.now) - job.started)}"
        when = time.strftime("%d %b %H:%M", time.localtime(job.created))
        return " · ".join(filter(None, (words, when, self.found)))

    @property
    def share(self) -> float:
        """The finished share of the job's current stage, 0 to 1."""
        stage = self.job.stages[-1] if self.job.stages else None
        return stage.done / stage.total if stage is not None and stage.total else 0.0

    @property
    def at_work(self) -> str:
        """What a running job does now, with its stage, and in a sweep the exploration; "" for other jobs."""
        if self.job.state != "running":
            return ""
        if not self.job.stages:
            return "opening PyTorch"
        stage = self.job.stages[-1]
        words = f"{stage.what or 'starting'} ({stage.name})"
        sweeps = (s for s in self.job.stages if s.name in _SWEEPS and s.done < s.total)
        return ": ".join((*(f"{s.what}, {s.done + 1} of {s.total}" for s in sweeps), words))


def found_words(memory: Sequence[float], time_s: Sequence[float], count: int) -> str:
    """Return ``300 plans, 0.400 to 6.00 MiB, 1.60 to 18.0 ms``; "" for none.

    Args:
        memory, time_s: the figures of some plans, in ascending memory, from the leanest to the fastest plan.
        count: the number of all plans.
    """
    if not count:
        return ""
    ranges = (
        f"{digits(unit.of(low))} to {unit.text(high)}" if high > low else unit.text(low)
        for unit, low, high in (
            (unit_for(memory[-1]), memory[0], memory[-1]),
            (time_unit(time_s[0]), time_s[-1], time_s[0]),
        )
    )
    return ", ".join((plural(count, "plan"), *ranges))


def sketch(memory: Sequence[float], time_s: Sequence[float]) -> str:
    """Return a small plot of points as a ``data:`` URL: log memory to the right, log time upwards."""
    dots = []
    for x, y in zip(_places(memory, 4, 156), _places(time_s, 76, 4), strict=True):
        dots.append(f"%3Ccircle cx='{x:.0f}' cy='{y:.0f}' r='2.5'/%3E")
    head = "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 160 80' preserveAspectRatio='none'%3E"
    return f"data:image/svg+xml,{head}{''.join(dots)}%3C/svg%3E"


def _places(values: Sequence[float], low: float, high: float) -> list[float]:
    logs = [math.log(max(value, 1e-12)) for value in values]
    span = max(logs) - min(logs) or 1.0
    return [low + (high - low) * (log - min(logs)) / span for log in logs]


def duration(seconds: float) -> str:
    """Format a duration: ``4.2 s``, ``3 min 20 s``, ``1 h 05 min``."""
    seconds = max(seconds, 0.0)
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def models(uploads: Mapping[str, tuple[Any, str]]) -> list[dict[str, Any]]:
    """Return uploaded models and the zoo's models by size, as grouped options of a field."""
    from tensoropt.zoo import list_models

    groups: dict[str, list[str]] = {"Uploaded": list(dict.fromkeys(label for _, label in uploads.values()))}
    for entry in list_models():
        group = "Zoo, laptop size" if entry.size == "laptop" else "Zoo, the papers' size"
        groups.setdefault(group, []).append(entry.name)
    return [{"group": group, "items": items} for group, items in groups.items() if items]


def clusters(uploads: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return uploaded cluster files, this machine and the presets, as grouped options of a field."""
    from tensoropt.cluster import list_clusters

    groups = (
        ("Uploaded", list(dict.fromkeys(file.label for file in uploads.values()))),
        ("CPU ranks of this machine", ["local"]),
        ("Presets", [name for name in list_clusters() if not name.endswith("xN")]),
    )
    return [{"group": group, "items": items} for group, items in groups if items]


def estimate_words(estimated: Estimate | None) -> str:
    """Return the expected duration in words, with the runs that it is based on."""
    if estimated is None:
        return "No estimate yet: no similar run has finished."
    span = duration(estimated.low_s)
    if estimated.high_s > 1.1 * estimated.low_s:
        span += f" to {duration(estimated.high_s)}"
    if estimated.same:
        times = "" if estimated.runs == 1 else f" in {plural(estimated.runs, 'run')}"
        return f"The same took {span}{times}; saved results are reused."
    request = "this model on these devices, with other settings,"
    if estimated.runs == 1:
        return f"About {duration(estimated.last_s)}: {request} took that last time."
    return f"About {duration(estimated.last_s)}: {request} took {span} in {plural(estimated.runs, 'run')}."


def model_words(name: str) -> str:
    """Return a line on a zoo model; "" for other models."""
    from tensoropt.question.zoo_table import figures
    from tensoropt.zoo import list_models

    entry = next((entry for entry in list_models() if entry.name == name), None)
    if entry is None:
        return ""
    size = figures()[name]
    parameters = f"{digits(size.parameters / 1e6)} million parameters"
    words = (entry.description, f"batch {entry.batch}", parameters, plural(size.operators, "operator"))
    return " · ".join(words)
