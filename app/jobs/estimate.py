"""Estimates of an exploration's duration, from jobs finished on this machine.

Nothing is extrapolated: seconds depend on the model's operators, the number of meshes, and what has been
timed before. Without a similar run there is no estimate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REPEATED = 12
"""Number of newest similar runs whose range is shown; older ones may be of another version."""


@dataclass(frozen=True)
class RequestKey:
    """A job's request. ``core``: model, cluster and planners; ``whole``: everything."""

    core: str
    whole: str


@dataclass(frozen=True)
class CompletedJob:
    """A finished job's request and seconds."""

    request: RequestKey
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """The seconds of similar runs.

    Attributes:
        last_s: seconds of the newest run.
        low_s, high_s: the range.
        runs: the number of runs.
        same: whether the runs had exactly this request, not only the same model, cluster and planners.
    """

    last_s: float
    low_s: float
    high_s: float
    runs: int
    same: bool


def request_key(question: Mapping[str, Any]) -> RequestKey:
    """Return a question's request; settings other than the mode only affect how thorough its search is.

    Args:
        question: the question as jobs store it (:meth:`tensoropt.question.question.Question.data`).
    """
    whole = {**question, "constraints_file": ""}
    core = {**whole, "settings": whole["settings"]["mode"], "seed": 0, "anew": False}
    return RequestKey(_text(core), _text(whole))


def _text(data: object) -> str:
    return json.dumps(data, sort_keys=True)


def estimate(wanted: RequestKey, runs: Sequence[CompletedJob]) -> Estimate | None:
    """Return the duration of runs with the same request, else of runs with other search settings.

    Args:
        runs: finished runs, newest first.
    """
    for same in (True, False):
        alike = [r.seconds for r in runs if (r.request == wanted if same else r.request.core == wanted.core)]
        if alike:
            shown = alike[:REPEATED]
            return Estimate(alike[0], min(shown), max(shown), len(alike), same)
    return None
