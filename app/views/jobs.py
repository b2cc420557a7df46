"""Jobs in words for people."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensoropt.console import without_eta
from tensoropt.exploration.exploration_files import Costs

from ..jobs.estimate import Estimate
from ..jobs.record import Job, Stage
from ..jobs.refill import can_refill
from .units import digits, plural, time_unit, unit_for

STATE_WORDS = {
    "queued": "waiting for its turn",
    "running": "running",
    "done": "done",
    "failed": "failed",
    "cancelled": "cancelled",
    "interrupted": "interrupted",
}


@dataclass(frozen=True)
class StageLine:
    """A stage: its name, how far it is (0 to 1), and the same in words."""

    name: str
    share: float
    words: str


@dataclass(frozen=True)
class JobCard:
    """A job with its progress by stage.

    Attributes:
        command: the line that does the same without the dashboard.
        results: the keys of its explorations, none while it runs.
        can_refill: whether the form can be filled from it.
    """

    id: str
    title: str
    state: str
    words: str
    stages: tuple[StageLine, ...]
    error: str
    command: str
    results: tuple[str, ...]
    active: bool
    can_refill: bool = False


def found_words(costs: Costs) -> str:
    """Return ``300 plans, 0.400 to 6.00 MiB, 1.60 to 18.0 ms``; "" for none."""
    if not len(costs.memory):
        return ""
    memory, time_s = unit_for(costs.memory[-1]), time_unit(costs.time[0])
    ranges = (
        f"{digits(unit.of(low))} to {unit.text(high)}" if high > low else unit.text(low)
        for unit, low, high in (
            (memory, costs.memory[0], costs.memory[-1]),
            (time_s, costs.time[-1], costs.time[0]),
        )
    )
    return ", ".join((plural(len(costs.memory), "plan"), *ranges))


def job_card(job: Job, now: float, results: tuple[str, ...] = (), found: str = "") -> JobCard:
    """Return the card of a job at the moment ``now`` (seconds since the epoch).

    Args:
        results: the keys of what it left.
        found: that in words, if it is one frontier.
    """
    spent = (job.ended or now) - (job.started or job.ended or now)
    when = time.strftime("%d %b %H:%M", time.localtime(job.created))
    words = STATE_WORDS[job.state]
    if job.started is not None:
        words += f" · {duration(spent)}"
    last = job.stages[-1] if job.stages else None
    lines = [_stage_line(job, stage, now, last=stage is last) for stage in job.stages]
    return JobCard(
        id=job.id,
        title=job.title,
        state=job.state,
        words=" · ".join(filter(None, (words, when, found))),
        stages=tuple(lines),
        error=job.error,
        command=job.line,
        results=results,
        active=job.active,
        can_refill=can_refill(job),
    )


def _stage_line(job: Job, stage: Stage, now: float, *, last: bool) -> StageLine:
    """Return one stage of a job; remaining time is shown only for the stage at work, as it was when it was
    reported."""
    at_work = job.state == "running" and last and stage.done < stage.total
    # Only the clock of what is at work continues; others stopped at their last report.
    spent = duration(stage.spent_s + (now if at_work else stage.last) - stage.began)
    share = 1.0 if stage.total <= 0 else min(stage.done / stage.total, 1.0)
    count = f"{stage.done} of {stage.total}"
    words = stage.what if at_work else without_eta(stage.what)
    if job.state == "done":
        # What is left of a search that ended early was not needed.
        share, count = 1.0, "done"
    elif not job.active and last and share < 1.0:
        count = f"{STATE_WORDS[job.state]} at {count}"
    return StageLine(stage.name, share, " · ".join(filter(None, (count, spent, words))))


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
    """Return the zoo by size, and the uploads, as grouped options of a select."""
    from tensoropt.zoo import list_models

    groups: dict[str, list[dict[str, str]]] = {"Uploaded": []}
    for token, (_, label) in reversed(list(uploads.items())):
        groups["Uploaded"].append({"value": token, "label": label})
    for entry in list_models():
        group = "Zoo, laptop size" if entry.size == "laptop" else "Zoo, the papers' size"
        groups.setdefault(group, []).append({"value": f"zoo:{entry.name}", "label": entry.name})
    return [{"group": group, "items": items} for group, items in groups.items() if items]


def presets() -> list[str]:
    """Return the presets that stand for one cluster each."""
    from tensoropt.cluster import list_clusters

    return [name for name in list_clusters() if not name.endswith("xN")]


def clusters(uploads: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return this machine, uploaded cluster files by token, and the presets, as grouped options of a
    select."""
    uploaded = [{"value": token, "label": file.label} for token, file in reversed(list(uploads.items()))]
    named = [{"value": name, "label": name} for name in presets()]
    groups = (
        ("Here", [{"value": "local", "label": "local: CPU ranks of this machine"}]),
        ("Uploaded", uploaded),
        ("Presets", named),
    )
    return [{"group": group, "items": items} for group, items in groups if items]


def estimate_words(estimated: Estimate | None) -> str:
    """Say how long it will take, and from what that is known."""
    if estimated is None:
        return "No estimate yet: no similar run has finished."
    span = duration(estimated.low_s)
    if estimated.high_s > 1.1 * estimated.low_s:
        span += f" to {duration(estimated.high_s)}"
    request = "the same" if estimated.same else "this model there, with other settings,"
    if estimated.runs == 1:
        return f"About {duration(estimated.last_s)}: {request} took that last time."
    return f"About {duration(estimated.last_s)}: {request} took {span} in {plural(estimated.runs, 'run')}."


def model_words(source: str) -> str:
    """Describe a model of the zoo in a sentence; "" for one that is not of the zoo."""
    from tensoropt.zoo import list_models
    from tensoropt.zoo.figures import figures

    name = source.removeprefix("zoo:")
    entry = next((e for e in list_models() if e.name == name and source.startswith("zoo:")), None)
    if entry is None:
        return ""
    words = [entry.description, f"batch {entry.batch}"]
    size = figures().get(name)
    if size is not None:
        words += [f"{digits(size.parameters / 1e6)} million parameters", plural(size.operators, "operator")]
    words += [f"options {'&'.join(f'{key}={value}' for key, value in entry.overrides.items())}"]
    return " · ".join(words)
