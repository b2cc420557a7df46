"""What the figures of an exploration rest on, and what is proven of a point, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensoropt.plan.exploration import Exploration
from tensoropt.plan.point import Point


def settings_rows(exploration: Exploration) -> tuple[tuple[str, str], ...]:
    """(label, words) of what was chosen about an exploration, and of what its figures are."""
    settings = exploration.settings
    rows = [
        ("mode", str(settings.get("mode", "train"))),
        ("optimizer", str(settings.get("optimizer", "adam"))),
        ("computes in", str(settings.get("dtype", "float32"))),
        ("recompute", _recompute(settings.get("recompute", "auto"))),
        ("micro-batches", _micro(settings.get("micro_batches"))),
        ("allowed gap", share_words(float(settings.get("epsilon") or 0.0))),
        ("time", "one simulated step: compute, communication it waits for, idle"),
        ("memory", "simulated peak of the largest device; inputs and buffers left out"),
    ]
    return tuple(rows)


def share_words(share: float) -> str:
    """``12 %``; small shares keep a figure, so that nothing reads as zero that isn't."""
    if share == 0:
        return "0 %"
    if abs(share) < LEAST:
        return "under 0.001 %"
    return f"{100 * share:.0f} %" if abs(share) >= 0.0095 else f"{100 * share:.1g} %"


LEAST = 1e-5
"""Shares below it are told apart from nothing, not from each other."""


def bound_words(share: float) -> str:
    """A bound, for ``within ...``: ``0.001 %`` stands for all smaller ones."""
    return share_words(max(share, LEAST)) if share else "0 %"


def batch_words(exploration: Exploration) -> str:
    """The global batch, as far as it is known."""
    model = exploration.model
    return str(model.batch or _first_size(model.call) or "the model's own")


def proof_words(point: Point, memory: str, time: str) -> str:
    """What is proven of a point, which is of the sums that the search adds up; of placed plans nothing is.

    Args:
        memory, time: these sums, in words.
    """
    if point.gap is None:
        return "nothing: its planner is a heuristic, or the search was one here"
    if point.exact:
        better = "no plan searched is faster with no more memory, nor leaner and no slower"
    else:
        better = (
            f"it takes at most {bound_words(point.gap)} longer than any plan searched with no more memory"
        )
    return (
        f"{better}, by the sums that the search adds up ({memory} and {time} for this one). The figures "
        "above are simulated: peaks and waits are in them, and nothing is proven of them."
    )


def _micro(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "1, 2, 4, 8 where they divide the batch" if value == "auto" else str(value)


def _recompute(value: Any) -> str:
    return "repeated blocks may run again in backward" if value == "auto" else str(value)


def _first_size(call: Any) -> int | None:
    """The first size of the first tensor the model was called with."""
    if not isinstance(call, Mapping):
        return None
    for value in [*call.get("args", []), *dict(call.get("kwargs", {})).values()]:
        if isinstance(value, Mapping) and value.get("tensor"):
            return int(value["tensor"][0])
    return None
