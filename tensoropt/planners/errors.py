"""The error that a planner raises if its method does not apply."""

from __future__ import annotations

from tensoropt.errors import TensorOptError


class UnsuitableError(TensorOptError):
    """A planner's method does not apply to a problem; the message says why, and usually what to change."""
