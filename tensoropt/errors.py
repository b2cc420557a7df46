"""The errors that a user's input can cause.

They derive from :class:`TensorOptError`; the command line prints the message (rule, values, remedy) and exits
with code 2. Any other error is a bug and shows a traceback.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

_MOST_NAMES = 100
"""The most names (operators of a model, for example) that are listed in full."""


class TensorOptError(Exception):
    """The base of all errors caused by input; the message says what is wrong and what to do."""


class CaptureError(TensorOptError):
    """The error if a model cannot be turned into an operator graph."""


class UnsupportedError(TensorOptError):
    """The error if a part of a model cannot be explored; the message names the operator and its line."""


class ClusterError(TensorOptError, ValueError):
    """The error if a cluster description is invalid."""


class MeasurementError(TensorOptError):
    """The error if a measurement could not be made."""


class PlanError(TensorOptError):
    """The error if a plan is malformed, or does not belong to the given model."""


class InfeasibleError(TensorOptError):
    """The error if no strategy satisfies the request; the message says why, and usually what to change."""


class MissingExtraError(TensorOptError, ImportError):
    """The error if a package of an optional extra is missing."""


def import_extra(module: str, extra: str, needed_by: str) -> Any:
    """Import a module that comes with the optional extra ``extra``, and return it.

    Raises:
        MissingExtraError: the module, or a package that it imports, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            f"{needed_by} needs the package {(missing.name or module).partition('.')[0]}, which is not "
            f"installed; pip install 'tensoropt[{extra}]'"
        ) from missing


def closest(name: object, valid: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """Return up to ``most`` valid names spelled much like ``name``, the most similar first, ignoring case."""
    lowered = {text.lower(): text for text in valid}
    # An assumed cutoff, below difflib's own 0.6: more hints, some of them wrong.
    near = difflib.get_close_matches(str(name).lower(), list(lowered), n=most, cutoff=0.5)
    return tuple(lowered[text] for text in near)


def suggest(name: object, valid: Iterable[str]) -> str:
    """Return the end of a message on an unknown name: ``did you mean 'a' or 'b'? Valid: a, b, c``."""
    names = sorted(set(valid))
    near = closest(name, names)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else ""
    if len(names) <= _MOST_NAMES:
        return f"{hint} Valid: {', '.join(names)}".lstrip()
    return hint or f"there are {', '.join(names[:8])}, ... ({len(names)} in all)"
