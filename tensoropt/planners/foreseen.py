"""Refusals of planners that are known before anything is computed, with their reasons."""

from __future__ import annotations

import importlib.util

from tensoropt.planners.registry import Entry

ON_TWO = "pesto"
NEEDS_ATTENTION = "megatron"


def foreseen_refusal(entry: Entry, devices: int, *, training: bool, attention: bool | None = None) -> str:
    """Return why a planner will refuse; "" if that is not known before it runs.

    Args:
        devices: the number of devices in the cluster.
        attention: whether the model has attention as a single operator; None if that is not known.
    """
    if entry.solves and importlib.util.find_spec("ortools") is None:
        return "needs a solver: pip install 'tensoropt[solvers]'"
    if entry.kind == "pipelined" and not training:
        return "plans training only"
    if entry.kind == "pipelined" and devices < 2:
        return "needs at least 2 devices"
    if entry.name == ON_TWO and devices != 2:
        return f"places on 2 devices, not on {devices}"
    if entry.name == NEEDS_ATTENTION and attention is False:
        return "splits attention heads, and this model has none"
    return ""
