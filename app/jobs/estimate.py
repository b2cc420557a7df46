"""How long an exploration will take, said before it starts, from jobs that came to their end here.

Nothing is extrapolated: seconds depend on the model's operators, on how many meshes there are, and on what
has been timed before, so that a figure for what has never run would be a guess. Then there is no estimate.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

KEPT_APART = ("--cluster", "--devices", "--planners", "--mode", "--batch", "--dim")
"""Options that make a run another one; all others change how thoroughly the same thing is searched."""
REPEATED = 12
"""Of the newest runs alike, whose range is shown; older ones may be of another version."""


@dataclass(frozen=True)
class Asked:
    """What a command line asked for: ``core`` is what, on what and beside what; ``whole`` is all of it."""

    core: tuple[str, ...]
    whole: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """A job that came to its end, and the seconds it took."""

    asked: Asked
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """Seconds that runs alike took.

    Attributes:
        last_s: of the newest one.
        low_s, high_s: the range.
        runs: how many there were.
        same: whether they asked for exactly this, and not for the same with other settings of the search.
    """

    last_s: float
    low_s: float
    high_s: float
    runs: int
    same: bool


def asked(words: Sequence[str], folder: Path) -> Asked:
    """What a command line asks for, whatever folder it was started in.

    Args:
        words: those after ``tensoropt``.
        folder: the job's own; files in it (an edited cluster, constraints) count by their content.
    """
    whole = tuple(_content(word, folder) for word in words)
    core = [*whole[:2]]
    for name, value in itertools.pairwise(whole[2:]):
        if name in KEPT_APART:
            core += [name, value]
    return Asked(tuple(core), whole)


def _content(word: str, folder: Path) -> str:
    if word == str(folder):
        return ""
    if not word.startswith(f"{folder}/"):
        return word
    try:
        return hashlib.sha256(Path(word).read_bytes()).hexdigest()[:16]
    except OSError:
        return word.removeprefix(str(folder))


def estimate(wanted: Asked, runs: Sequence[Run]) -> Estimate | None:
    """What runs alike took: those that asked the same, else those that differ in settings of the search.

    Args:
        runs: newest first.
    """
    for same in (True, False):
        alike = [
            run.seconds for run in runs if (run.asked == wanted if same else run.asked.core == wanted.core)
        ]
        if alike:
            shown = alike[:REPEATED]
            return Estimate(alike[0], min(shown), max(shown), len(alike), same)
    return None
