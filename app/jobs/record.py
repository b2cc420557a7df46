"""A job as its folder remembers it: a small JSON file that is whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import psutil

from tensoropt.files import write_text

FILE = "job.json"
LOG = "job.log"
_ACTIVE = ("queued", "running")
_STATES = (*_ACTIVE, "done", "failed", "cancelled", "interrupted")
_LOG_TAIL = 20_000
"""Characters of a log that a page shows."""


@dataclass(frozen=True)
class Stage:
    """Progress of one stage of the pipeline; ``began`` and ``last`` (its latest report) since the epoch.

    ``spent_s``: what it took in earlier parts of a sweep, each of which passes all stages.
    """

    name: str
    done: int
    total: int
    what: str
    began: float
    last: float
    spent_s: float = 0.0


@dataclass(frozen=True)
class Job:
    """One job.

    Attributes:
        id: its folder's name, generated.
        arguments: the words after ``tensoropt`` that do the same.
        question: what is explored (:meth:`tensoropt.question.question.Question.data`); None where a job does
            something else, or is an earlier version's.
        state: one of :data:`_STATES`.
        error: why it failed, in a sentence.
        created, started, ended: seconds since the epoch.
        server: (process id, start time) of the dashboard that runs it.
    """

    id: str
    title: str
    arguments: tuple[str, ...]
    state: str = "queued"
    measures: bool = False
    stages: tuple[Stage, ...] = ()
    error: str = ""
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    server: tuple[int, float] = (0, 0.0)
    question: Mapping[str, Any] | None = None

    @property
    def active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in _ACTIVE

    def progressed(self, stage: str, done: int, total: int, what: str, now: float) -> Job:
        """The job after a report of its pipeline; a stage that comes again goes on, or begins anew where it
        was over: then other stages ran meanwhile, whose time is not its own."""
        earlier = [s for s in self.stages if s.name != stage]
        began, spent = now, 0.0
        for known in self.stages:
            if known.name == stage:
                again = known is not self.stages[-1] and (known.done >= known.total or done < known.done)
                began = now if again else known.began
                spent = known.spent_s + (known.last - known.began if again else 0.0)
        return replace(self, stages=(*earlier, Stage(stage, done, total, what, began, now, spent)))

    def save(self, folder: Path) -> None:
        """Write it into its folder; raises :class:`TensorOptError` if that fails."""
        write_text(folder / FILE, json.dumps(asdict(self)) + "\n")


def read_job(folder: Path) -> Job | None:
    """The job of a folder, None if it holds none that can be read."""
    try:
        data = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return _job(data) if isinstance(data, Mapping) and data.get("id") == folder.name else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _job(data: Mapping[str, Any]) -> Job:
    known = {f.name: data[f.name] for f in fields(Job) if f.name in data}
    known["arguments"] = tuple(map(str, known["arguments"]))
    known["stages"] = tuple(Stage(**s) for s in known.get("stages", ()))
    known["server"] = tuple(known.get("server", (0, 0.0)))
    if known.get("state") not in _STATES:
        raise ValueError(f"state {known.get('state')!r}")
    return Job(**known)


def this_server() -> tuple[int, float]:
    """(process id, start time): a pair no later process has."""
    return os.getpid(), psutil.Process().create_time()


def is_alive(server: tuple[int, float]) -> bool:
    """Whether the dashboard that wrote a job still runs."""
    try:
        # Process ids are used again; the start time tells another process apart. The tolerance is an
        # assumption: an id comes round later than that.
        return abs(psutil.Process(server[0]).create_time() - server[1]) < 1.0
    except (psutil.Error, ValueError, OverflowError):
        return False


def tail(folder: Path) -> str:
    """The end of a job's log."""
    try:
        text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text[-_LOG_TAIL:]
