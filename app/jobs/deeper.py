"""Jobs that explore a change of an exploration: the command line's ``why --deep``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .record import Job

VERB, _DEEP = "why", "--deep"


@dataclass(frozen=True)
class Deeper:
    """A change of a saved exploration, explored from its operator graph; no model is opened.

    Attributes:
        folder: the exploration's folder.
        label: people's name for it.
        key, words: the change's key and its description.
        local: whether its cluster is this machine's ranks.
    """

    folder: Path
    label: str
    key: str
    words: str
    local: bool

    @property
    def title(self) -> str:
        """The job's title: the exploration, and the change."""
        return f"{self.label}: {self.words}"

    @property
    def measures(self) -> bool:
        """Whether this machine's own ranks are timed."""
        return self.local

    def arguments(self, folder: Path) -> list[str]:
        """Return the arguments of ``tensoropt``; the result is written to ``folder``."""
        return [VERB, str(self.folder), _DEEP, self.key, "--out", str(folder)]


def deeper_jobs(jobs: Sequence[Job], folder: Path) -> dict[str, Job]:
    """Return, for each change, the newest job that explores it for the exploration in a folder.

    Args:
        jobs: newest first.
    """
    by_change: dict[str, Job] = {}
    for job in jobs:
        words = job.arguments
        if len(words) > 3 and words[:3] == (VERB, str(folder), _DEEP):
            by_change.setdefault(words[3], job)
    return by_change
