"""Estimates of an exploration's duration before it starts, from jobs that finished on this machine.

Nothing is extrapolated: seconds depend on the model's operators, on the number of meshes, and on what has
already been timed, so a figure for something that has never run would be a guess. In that case there is no
estimate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REPEATED = 12
"""The number of newest similar runs whose range is shown; older ones may be of another version."""


@dataclass(frozen=True)
class RequestKey:
    """The request of a job; ``core``: the model, the cluster and the planners; ``whole``: everything."""

    core: str
    whole: str


@dataclass(frozen=True)
class CompletedJob:
    """A finished job, and its seconds."""

    request: RequestKey
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """The seconds of similar runs.

    Attributes:
        last_s: those of the newest run.
        low_s, high_s: the range.
        runs: the number of runs.
        same: whether they had exactly this request, rather than the same with other search settings.
    """

    last_s: float
    low_s: float
    high_s: float
    runs: int
    same: bool


def request_key(question: Mapping[str, Any]) -> RequestKey:
    """Return the request in a question; all settings except the mode only affect how thoroughly it is
    searched.

    Args:
        question: its data, as jobs keep it (:meth:`tensoropt.question.question.Question.data`).
    """
    whole = {**question, "constraints_file": ""}
    core = {**whole, "settings": whole["settings"]["mode"], "seed": 0, "anew": False}
    return RequestKey(_text(core), _text(whole))


def key_of_words(words: Sequence[str], folder: str) -> RequestKey:
    """Return the request in the command line of any other job, whatever the folder of its result."""
    text = _text([word for word in words if word != folder])
    return RequestKey(text, text)


def _text(data: object) -> str:
    return json.dumps(data, sort_keys=True)


def estimate(wanted: RequestKey, runs: Sequence[CompletedJob]) -> Estimate | None:
    """Return the duration of similar runs: those with the same request, otherwise those with other search
    settings.

    Args:
        runs: newest first.
    """
    for same in (True, False):
        alike = [r.seconds for r in runs if (r.request == wanted if same else r.request.core == wanted.core)]
        if alike:
            shown = alike[:REPEATED]
            return Estimate(alike[0], min(shown), max(shown), len(alike), same)
    return None
