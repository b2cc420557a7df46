"""A change of an exploration as a job: the command line's ``why --deep``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .record import Job

VERB, _DEEP = "why", "--deep"


@dataclass(frozen=True)
class Deeper:
    """One thing changed about a saved exploration, explored from its operator graph; no model is opened.

    Attributes:
        folder: of the exploration.
        label: what people call it.
        key, words: of the change.
        local: whether its cluster is this machine's ranks.
    """

    folder: Path
    label: str
    key: str
    words: str
    local: bool

    @property
    def title(self) -> str:
        """What people read: the exploration, and what is changed."""
        return f"{self.label}: {self.words}"

    @property
    def measures(self) -> bool:
        """Whether this machine's own ranks are timed."""
        return self.local

    def arguments(self, folder: Path) -> list[str]:
        """The words after ``tensoropt``; the result lands in ``folder``."""
        return [VERB, str(self.folder), _DEEP, self.key, "--out", str(folder)]


def deeper_jobs(jobs: Sequence[Job], folder: Path) -> dict[str, Job]:
    """By change the newest job that explores it of the exploration in a folder.

    Args:
        jobs: newest first.
    """
    by_change: dict[str, Job] = {}
    for job in jobs:
        words = job.arguments
        if len(words) > 3 and words[:3] == (VERB, str(folder), _DEEP):
            by_change.setdefault(words[3], job)
    return by_change
