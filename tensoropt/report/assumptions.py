"""The basis of an exploration's figures, and what is proven about a point, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensoropt.plan.exploration import Exploration
from tensoropt.plan.point import Point
from tensoropt.plan.settings import settings_fields
from tensoropt.units import LEAST_SHARE, share_words


def settings_rows(exploration: Exploration) -> tuple[tuple[str, str], ...]:
    """(label, words) of what was chosen about an exploration, and of what its figures are.

    Of settings that say little at their default there is a row where something else was chosen.
    """
    chosen = exploration.settings
    rows = []
    for setting in settings_fields():
        value = chosen.get(setting.name, setting.default)
        if (setting.assumed or value != setting.default) and setting.name != "constraints":
            rows.append((setting.label[:1].lower() + setting.label[1:], setting.row(value)))
    return (
        *rows,
        ("time", "one simulated step: compute, communication it waits for, idle"),
        ("memory", "simulated peak of the largest device; inputs and buffers left out"),
    )


def bound_words(share: float) -> str:
    """A bound, for ``within ...``: ``0.001 %`` stands for all smaller ones."""
    return share_words(max(share, LEAST_SHARE)) if share else "0 %"


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


def _first_size(call: Any) -> int | None:
    """Return the first size of the first tensor that the model was called with."""
    if not isinstance(call, Mapping):
        return None
    for value in [*call.get("args", []), *dict(call.get("kwargs", {})).values()]:
        if isinstance(value, Mapping) and value.get("tensor"):
            return int(value["tensor"][0])
    return None
