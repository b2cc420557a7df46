"""Estimates of an exploration's duration, from jobs finished on this machine.

Nothing is extrapolated, as durations depend on the model's operators, the number of meshes, and which
operators have been timed before. Without a similar run there is no estimate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REPEATED = 12
"""Number of newest similar runs whose range is shown; older runs may be of another version."""


@dataclass(frozen=True)
class RequestKey:
    """A request as text, to find similar ones. ``core``: model, cluster, planners; ``whole``: everything."""

    core: str
    whole: str


@dataclass(frozen=True)
class CompletedJob:
    """The request of a finished job, and its duration in seconds."""

    request: RequestKey
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """The durations of similar runs, in seconds.

    Attributes:
        last_s: the duration of the newest run.
        low_s, high_s: the shortest and the longest duration.
        runs: the number of these runs.
        same: whether the runs had exactly this request, not only the same model, cluster and planners.
    """

    last_s: float
    low_s: float
    high_s: float
    runs: int
    same: bool


def request_key(question: Mapping[str, Any]) -> RequestKey:
    """Return a question (what to explore) as text, to find similar ones. ``core`` lacks all settings but the
    mode, as they only affect how thorough the search is.

    Args:
        question: the question as jobs store it (:meth:`tensoropt.question.question.Question.data`).
    """
    whole = {**question, "constraints_file": ""}
    core = {**whole, "settings": whole["settings"]["mode"], "seed": 0, "anew": False}
    return RequestKey(_text(core), _text(whole))


def _text(data: object) -> str:
    return json.dumps(data, sort_keys=True)


def estimate(wanted: RequestKey, runs: Sequence[CompletedJob]) -> Estimate | None:
    """Return the durations of runs with the same request, else of runs with other settings; None for neither.

    Args:
        runs: finished runs, newest first.
    """
    for same in (True, False):
        alike = [r.seconds for r in runs if (r.request == wanted if same else r.request.core == wanted.core)]
        if shown := alike[:REPEATED]:
            return Estimate(shown[0], min(shown), max(shown), len(shown), same)
    return None
