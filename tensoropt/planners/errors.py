"""The error that a planner raises if its method does not apply."""

from __future__ import annotations

from tensoropt.errors import TensorOptError


class UnsuitableError(TensorOptError):
    """A planner cannot treat a problem. The message gives the reason and a remedy."""
