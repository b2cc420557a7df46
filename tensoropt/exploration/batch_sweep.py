"""Batch sweeps: explorations of one model on one cluster, one for each global batch size.

Steps of different batches differ in their amount of computation, so they are compared in time per sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tensoropt.errors import InfeasibleError
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.rates import StepWork

_BATCH_FOLDER = "batch-"


def folder_of_batch(batch: int) -> str:
    """Return the name of a batch size's folder within its sweep's folder."""
    return f"{_BATCH_FOLDER}{batch}"


def batch_in(name: str) -> int | None:
    """Return the batch size in a folder name that :func:`folder_of_batch` made; None for other names."""
    number = name.removeprefix(_BATCH_FOLDER)
    return int(number) if name != number and number.isdecimal() else None


def next_batch(tried: Mapping[int, bool], first: int) -> int | None:
    """Return the next batch size to try in the search for the largest that fits; None when the search ends.

    The size is doubled until one does not fit, or halved until one fits. Then one size halfway between the
    largest that fits and the next larger one is tried.

    Args:
        tried: whether each batch size tried so far fits.
        first: the batch size to begin with.
    """
    fitting = [batch for batch, fits in tried.items() if fits]
    others = [batch for batch, fits in tried.items() if not fits]
    if not tried:
        return first
    if not others:
        return 2 * max(fitting)
    if not fitting:
        return min(others) // 2 or None
    below, above = max(fitting), min(batch for batch in others if batch > max(fitting))
    between = (below + above) // 2
    # The two are a factor of four apart or more: try one between them.
    return between if above >= 2 * below and between not in tried and between > below else None


def fastest_batch(sweep: Sequence[Exploration], limits: Mapping[str, Any]) -> Exploration:
    """Return the exploration of the batch size with the least step time per sample within limits.

    Args:
        limits: arguments of :meth:`~tensoropt.exploration.exploration.Exploration.index`.

    Raises:
        InfeasibleError: no plan is within the limits; the message is that for the leanest batch size.
    """
    paces: list[tuple[float, int]] = []
    for place, found in enumerate(sweep):
        with suppress(InfeasibleError):
            point = found.all_points[found.index(**limits)]
            paces.append((point.time_s / (StepWork.of(found).samples or 1), place))
    if not paces:
        leanest = min(sweep, key=lambda found: float(found.needs.min()))
        leanest.index(**limits)  # raises
    return sweep[min(paces)[1]]
