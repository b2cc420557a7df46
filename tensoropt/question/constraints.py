"""Users' constraints, as an object, data, or a file (``--constraints FILE``, YAML or JSON)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensoropt.files import SETTINGS_FILE, read_document
from tensoropt.sharding.constraints import ConstraintError, Constraints, constraints_from_dict

LARGEST_BYTES = 1 << 20
"""Maximum file size; with name patterns, files written by hand are far smaller (an assumption)."""

_Given = Constraints | Mapping[str, Any] | str | os.PathLike[str] | None
"""Constraints, their content, or their file's path."""


def constraints_of(given: _Given) -> Constraints | None:
    """Return constraints from an object, data or a file.

    Raises:
        ConstraintError: the file cannot be read or understood.
    """
    if given is None or isinstance(given, Constraints):
        return given
    if isinstance(given, Mapping):
        return constraints_from_dict(given)
    return load_constraints(given)


def load_constraints(path: str | os.PathLike[str]) -> Constraints:
    """Read constraints from a file, or from a saved exploration; ``.json`` is JSON, anything else YAML.

    Raises:
        ConstraintError: it cannot be read, or an entry is malformed; names file and entry.
    """
    file = Path(path)
    with contextlib.suppress(OSError):  # reading reports it
        if file.is_file() and file.stat().st_size > LARGEST_BYTES and file.name != SETTINGS_FILE:
            raise ConstraintError(f"constraints file '{file}' is larger than 1 MiB; use patterns (*)")
    data = read_document(file, "constraints", ConstraintError)
    if isinstance(data, dict) and isinstance(settings := data.get("settings"), dict) and "cluster" in data:
        if not settings.get("constraints"):
            raise ConstraintError(f"'{file}' is an exploration without constraints; leave --constraints out")
        data = settings["constraints"]
    try:
        return constraints_from_dict(data)
    except ConstraintError as error:
        raise ConstraintError(f"constraints file '{file}': {error}") from None
