"""The basis of an exploration's figures, and what is proven about a point, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensoropt.plan.exploration import Exploration
from tensoropt.plan.point import Point


def settings_rows(exploration: Exploration) -> tuple[tuple[str, str], ...]:
    """Return (label, words) of the settings of an exploration, and of the basis of its figures."""
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
    """Format a share: ``12 %``; small shares keep a figure, so that nothing reads as zero that isn't."""
    if share == 0:
        return "0 %"
    if abs(share) < LEAST:
        return "under 0.001 %"
    return f"{100 * share:.0f} %" if abs(share) >= 0.0095 else f"{100 * share:.1g} %"


LEAST = 1e-5
"""Smaller shares are distinguished from zero, but not from each other."""


def bound_words(share: float) -> str:
    """Format a bound, for ``within ...``: ``0.001 %`` stands for all smaller ones."""
    return share_words(max(share, LEAST)) if share else "0 %"


def batch_words(exploration: Exploration) -> str:
    """Say the global batch, as far as it is known."""
    model = exploration.model
    return str(model.batch or _first_size(model.call) or "the model's own")


def proof_words(point: Point, memory: str, time: str) -> str:
    """Say what is proven about a point: the proof concerns the sums that the search uses; about placed plans
    nothing is proven.

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
    """Return the first size of the first tensor that the model was called with."""
    if not isinstance(call, Mapping):
        return None
    for value in [*call.get("args", []), *dict(call.get("kwargs", {})).values()]:
        if isinstance(value, Mapping) and value.get("tensor"):
            return int(value["tensor"][0])
    return None
