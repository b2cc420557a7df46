"""The record of a job in its folder: a small JSON file that is written whole or not at all."""

from __future__ import annotations

import json
import os
import shlex
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
"""The number of characters of a log that a page shows."""


@dataclass(frozen=True)
class Stage:
    """The latest report of one stage of the work."""

    name: str
    done: int
    total: int
    what: str


@dataclass(frozen=True)
class Job:
    """One job.

    Attributes:
        id: the generated name of its folder.
        arguments: the arguments of ``tensoropt`` that do the same.
        question: what is explored (:meth:`tensoropt.question.question.Question.data`); None if the job does
            something else, or is from an earlier version.
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
    def line(self) -> str:
        """The command line that does the same, to copy."""
        return shlex.join(["tensoropt", *self.arguments])

    @property
    def active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in _ACTIVE

    def progressed(self, stage: str, done: int, total: int, what: str) -> Job:
        """Return the job after a progress report."""
        others = (s for s in self.stages if s.name != stage)
        return replace(self, stages=(*others, Stage(stage, done, total, what)))

    def save(self, folder: Path) -> None:
        """Write it into its folder. Raises :class:`~tensoropt.errors.TensorOptError`."""
        write_text(folder / FILE, json.dumps(asdict(self)) + "\n")


def read_job(folder: Path) -> Job | None:
    """Return the job in a folder; None if the folder has no readable one."""
    try:
        data = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return _job(data) if isinstance(data, Mapping) and data.get("id") == folder.name else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


_OF_STAGE = [field.name for field in fields(Stage)]


def _job(data: Mapping[str, Any]) -> Job:
    values = {f.name: data[f.name] for f in fields(Job) if f.name in data}
    values["arguments"] = tuple(map(str, values["arguments"]))
    values["stages"] = tuple(Stage(**{name: s[name] for name in _OF_STAGE}) for s in values.get("stages", ()))
    values["server"] = tuple(values.get("server", (0, 0.0)))
    if values.get("state") not in _STATES:
        raise ValueError(f"state {values.get('state')!r}")
    return Job(**values)


def this_server() -> tuple[int, float]:
    """Return (process id, start time) of this process: a pair that no later process has."""
    return os.getpid(), psutil.Process().create_time()


def is_alive(server: tuple[int, float]) -> bool:
    """Return whether the dashboard that wrote a job still runs."""
    try:
        # Process ids are used again; the start time tells another process apart. The tolerance is an
        # assumption: an id comes round later than that.
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
