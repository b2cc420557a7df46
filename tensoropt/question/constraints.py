"""Functions that read users' constraints on plans from an object, a dictionary, or a YAML or JSON file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensoropt.files import read_document
from tensoropt.sharding.constraints import ConstraintError, Constraints, constraints_from_dict

_Given = Constraints | Mapping[str, Any] | str | os.PathLike[str] | None
"""Constraints, their content, or the path of their file."""


def constraints_of(given: _Given) -> Constraints | None:
    """Return constraints given as an object, as a dictionary, or as the path of a file.

    Raises:
        ConstraintError: the file cannot be read or understood.
    """
    if given is None or isinstance(given, Constraints):
        return given
    if isinstance(given, Mapping):
        return constraints_from_dict(given)
    return _load_constraints(given)


def _load_constraints(path: str | os.PathLike[str]) -> Constraints:
    """Return the constraints in a file (``.json`` is JSON, anything else YAML) or in a saved exploration.

    Raises:
        ConstraintError: the file cannot be read, or an entry is malformed; the message names file and entry.
    """
    file = Path(path)
    data = read_document(file, "constraints", ConstraintError)
    if isinstance(data, dict) and isinstance(settings := data.get("settings"), dict) and "cluster" in data:
        if not settings.get("constraints"):
            raise ConstraintError(f"'{file}' is an exploration without constraints; leave --constraints out")
        data = settings["constraints"]
    try:
        return constraints_from_dict(data)
    except ConstraintError as error:
        raise ConstraintError(f"constraints file '{file}': {error}") from None
