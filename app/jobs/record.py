"""A job's record: a small JSON file in its folder, written whole or not at all."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import psutil

from tensoropt.files import write_text

FILE = "job.json"
LOG = "job.log"
_ACTIVE = ("queued", "running")
_LOG_TAIL = 20_000
"""Maximum number of log characters on a page."""
State = Literal["queued", "running", "done", "failed", "cancelled", "interrupted"]


@dataclass(frozen=True)
class Stage:
    """The latest progress report of one stage of a job."""

    name: str
    done: int
    total: int
    what: str


@dataclass(frozen=True)
class Job:
    """A job's record.

    Attributes:
        id: the generated name of its folder.
        arguments: the arguments of the equivalent ``tensoropt`` command.
        measures: whether it times this machine's ranks, so that it runs alone.
        question: the question (:meth:`tensoropt.question.question.Question.data`); empty if it was not saved.
        error: the reason of a failure, in a sentence.
        created, started, ended: seconds since the epoch.
        server: (process id, start time) of the dashboard that runs it.
    """

    id: str
    title: str
    arguments: tuple[str, ...]
    state: State = "queued"
    measures: bool = False
    stages: tuple[Stage, ...] = ()
    error: str = ""
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    server: tuple[int, float] = (0, 0.0)
    question: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The equivalent command line, for copying."""
        return shlex.join(["tensoropt", *self.arguments])

    @property
    def active(self) -> bool:
        """Whether the job is waiting or running."""
        return self.state in _ACTIVE

    def progressed(self, stage: str, done: int, total: int, what: str) -> Job:
        """Return the job with a progress report added."""
        others = (s for s in self.stages if s.name != stage)
        return replace(self, stages=(*others, Stage(stage, done, total, what)))

    def save(self, folder: Path) -> None:
        """Write the record into its folder. Raises :class:`~tensoropt.errors.TensorOptError`."""
        write_text(folder / FILE, json.dumps(asdict(self)) + "\n")


def read_job(folder: Path) -> Job | None:
    """Return the job in a folder; None if it has no readable record."""
    try:
        data = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return _job(data) if isinstance(data, Mapping) and data.get("id") == folder.name else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _job(data: Mapping[str, Any]) -> Job:
    # Not by pydantic, which refuses file names that are not UTF-8.
    values = {f.name: data[f.name] for f in fields(Job) if f.name in data}
    values["arguments"] = tuple(map(str, values["arguments"]))
    stages = values.get("stages", ())
    values["stages"] = tuple(Stage(**{f.name: stage[f.name] for f in fields(Stage)}) for stage in stages)
    values["server"] = tuple(values.get("server", (0, 0.0)))
    if values.get("state") not in get_args(State):
        raise ValueError(f"state {values.get('state')!r}")
    return Job(**values)


def this_server() -> tuple[int, float]:
    """Return (process id, start time) of this process, which no later process shares."""
    return os.getpid(), psutil.Process().create_time()


def is_alive(server: tuple[int, float]) -> bool:
    """Return whether the dashboard that wrote a job still runs."""
    try:
        # Process ids are reused; the start time distinguishes processes. The tolerance is an assumption: ids
        # are not reused that soon.
        return abs(psutil.Process(server[0]).create_time() - server[1]) < 1.0
    except (psutil.Error, ValueError, OverflowError):
        return False


def tail(folder: Path) -> str:
    """Return the end of a job's log."""
    try:
        text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text[-_LOG_TAIL:]
