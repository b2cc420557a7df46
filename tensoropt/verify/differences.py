"""The comparison of results: how far what was computed is from what it should be.

NaN and infinity count as results. If either side has one, the other must have the same in the same place:
otherwise the difference is infinite, which is within no tolerance and, unlike NaN, survives ``max``. If both
have the same, nothing else can be said about those places; :func:`not_finite` reports that the unsplit model
gives such values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

LEAST_SCALE = 1e-30
"""The least value that differences are relative to, so that zeros can be compared."""
LEAST_OUTPUT = 1e-12
"""The same for a model's outputs and its loss, whose magnitudes are those that people read."""


def difference(
    got: torch.Tensor, want: torch.Tensor, whole: torch.Tensor | None = None, floor: float = 0.0
) -> float:
    """Return the largest difference of any value, relative to the largest finite one of ``whole``, or to
    ``floor``.

    Args:
        got: what was computed.
        want: what it should be, of the same shape.
        whole: the tensor that ``want`` is a piece of; itself by default.

    Returns:
        0 for equal and for empty tensors; inf if one is NaN or infinite and the other is not the same, and
        for tensors of different shapes.
    """
    if got.shape != want.shape:
        return math.inf
    if not want.numel():
        return 0.0
    # The expected value may be on the CPU, where the unsplit model's results are kept.
    found, wanted = _wide(got), _wide(want.to(got.device))
    finite = wanted.isfinite()
    # NaN equals nothing, itself included.
    alike = (found == wanted) | (found.isnan() & wanted.isnan())
    if bool(((~finite | ~found.isfinite()) & ~alike).any()):
        return math.inf
    # If both have the same infinity, the difference would be NaN, which `max` passes on.
    apart = torch.where(finite, found - wanted, 0.0).abs().max()
    return float(apart) / max(largest(want if whole is None else whole), floor, LEAST_SCALE)


def outputs_difference(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of any output, each relative to its largest value."""
    assert len(got) == len(want), (len(got), len(want))
    pairs = zip(got, want, strict=True)
    return max((difference(one, other, floor=LEAST_OUTPUT) for one, other in pairs), default=0.0)


def named_difference(
    got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], floor: float = 0.0
) -> float:
    """Return the largest :func:`difference` of any tensor of ``got`` from the one of its name."""
    return max((difference(value, want[name], floor=floor) for name, value in got.items()), default=0.0)


class Worst(NamedTuple):
    """The largest of several differences, with its name."""

    size: float
    name: str


def worst(differences: Mapping[str, float]) -> Worst:
    """Return the largest difference; 0 without a name if there are none."""
    name = max(differences, key=differences.__getitem__, default="")
    return Worst(differences[name], name) if name else Worst(0.0, "")


def largest(value: torch.Tensor) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    if not value.numel():
        return 0.0
    wide = _wide(value)
    return float(torch.where(wide.isfinite(), wide, 0.0).abs().max())


def largest_of(values: Iterable[torch.Tensor]) -> float:
    """Return the largest finite absolute value of several tensors; 0 if there is none."""
    return max(map(largest, values), default=0.0)


def not_finite(named: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return, by name, how many values are NaN or infinite; only for tensors that have some."""
    counts = {name: int((~_wide(value).isfinite()).sum()) for name, value in named.items()}
    return {name: count for name, count in counts.items() if count}


def _wide(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in double precision, with complex numbers as pairs of real ones."""
    value = value.detach()
    # A lazily conjugated tensor has no real view before it is resolved.
    return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).double()
