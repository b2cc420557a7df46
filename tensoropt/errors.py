"""Errors a person can act on.

Every error that a user's input can cause derives from :class:`TensorOptError`; the command line
prints its message (the rule, the values, the remedy) and exits with code 2. Anything else is a
fault of ours and shows a traceback.
"""

from __future__ import annotations


class TensorOptError(Exception):
    """Base of all errors caused by input; the message names the culprit and the remedy."""


class CaptureError(TensorOptError):
    """A model that cannot be turned into an operator graph."""


class ClusterError(TensorOptError, ValueError):
    """A cluster description that does not describe a cluster."""


class MeasurementError(TensorOptError):
    """A measurement that could not be made."""


class PlanError(TensorOptError):
    """A plan that is malformed or does not belong to the model it is given."""


class InfeasibleError(TensorOptError):
    """No strategy satisfies the request; the message says which request could be satisfied."""
