"""Errors a person can act on.

Every error that a user's input can cause derives from :class:`TensorOptError`; the command line
prints its message (the rule, the values, the remedy) and exits with code 2. Anything else is a
fault of ours and shows a traceback.
"""

from __future__ import annotations

import importlib
from typing import Any


class TensorOptError(Exception):
    """Base of all errors caused by input; the message names the culprit and the remedy."""


class CaptureError(TensorOptError):
    """A model that cannot be turned into an operator graph."""


class UnsupportedError(TensorOptError):
    """A model has a part that cannot be explored; the message names stage, operator and line."""


class ClusterError(TensorOptError, ValueError):
    """A cluster description that does not describe a cluster."""


class MeasurementError(TensorOptError):
    """A measurement that could not be made."""


class PlanError(TensorOptError):
    """A plan that is malformed or does not belong to the model it is given."""


class InfeasibleError(TensorOptError):
    """No strategy satisfies the request; the message says which request could be satisfied."""


class MissingExtraError(TensorOptError, ImportError):
    """A package is needed that only an extra brings, and that is not installed."""


def import_extra(module: str, extra: str, needed_by: str) -> Any:
    """The module ``module``, which can be imported where the extra ``extra`` is installed.

    Raises:
        MissingExtraError: it, or a package that it imports, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            f"{needed_by} needs the package {(missing.name or module).partition('.')[0]}, which is not "
            f"installed; pip install 'tensoropt[{extra}]'"
        ) from missing
