"""How long an exploration will take, said before it starts, from jobs that came to their end here.

Nothing is extrapolated: seconds depend on the model's operators, on how many meshes there are, and on what
has been timed before, so that a figure for what has never run would be a guess. Then there is no estimate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REPEATED = 12
"""Of the newest runs alike, whose range is shown; older ones may be of another version."""


@dataclass(frozen=True)
class Asked:
    """What a job asked for: ``core`` is what, on what and beside what; ``whole`` is all of it."""

    core: str
    whole: str


@dataclass(frozen=True)
class CompletedJob:
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


def asked(question: Mapping[str, Any]) -> Asked:
    """What a question asks for; all settings but the mode only say how thoroughly it is searched.

    Args:
        question: its data, as jobs keep it (:meth:`tensoropt.plan.question.Question.data`).
    """
    whole = {**question, "constraints_file": ""}
    core = {**whole, "settings": whole["settings"]["mode"], "seed": 0, "anew": False}
    return Asked(_text(core), _text(whole))


def asked_in_words(words: Sequence[str], folder: str) -> Asked:
    """What the command line of any other job asks for, whatever folder its result lands in."""
    text = _text([word for word in words if word != folder])
    return Asked(text, text)


def _text(data: object) -> str:
    return json.dumps(data, sort_keys=True)


def estimate(wanted: Asked, runs: Sequence[CompletedJob]) -> Estimate | None:
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
