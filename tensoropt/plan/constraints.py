"""A person's constraints: given as such, as data, or as a file (``--constraints FILE``, YAML or JSON)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tensoropt.sharding.constraints import ConstraintError, Constraints, constraints_from_dict

LARGEST_BYTES = 1 << 20
"""No larger file is read. An assumption: what a person writes, with patterns for names, is far smaller."""

KEPT_IN = "exploration.json"
"""The file of an exploration, which keeps the constraints that it was made with, and much more."""

Given = Constraints | Mapping[str, Any] | str | os.PathLike[str] | None
"""Constraints, their content, or the path of their file."""


def constraints_of(given: Given) -> Constraints | None:
    """Constraints however they are given.

    Raises:
        ConstraintError: the file cannot be read, or says nothing that can be understood.
    """
    if given is None or isinstance(given, Constraints):
        return given
    if isinstance(given, Mapping):
        return constraints_from_dict(given)
    return load_constraints(given)


def load_constraints(path: str | os.PathLike[str]) -> Constraints:
    """Read a file of constraints, or those that an exploration's file keeps; ``.json`` is JSON, anything else
    YAML.

    Raises:
        ConstraintError: it cannot be read, or an entry is malformed; names the file and the entry.
    """
    file = Path(path)
    try:
        if file.stat().st_size > LARGEST_BYTES and file.name != KEPT_IN:
            raise ConstraintError(f"constraints file '{file}' is larger than 1 MiB; use patterns (*)")
        text = file.read_text(encoding="utf-8")
        data = json.loads(text) if file.suffix.lower() == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        raise ConstraintError(f"constraints file '{file}' does not exist; correct the path") from None
    except OSError as error:
        raise ConstraintError(f"constraints file '{file}' cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConstraintError):
            raise
        reason = " ".join(str(error).split())
        raise ConstraintError(
            f"constraints file '{file}' is not valid YAML or JSON ({reason}); correct that line"
        ) from None
    if isinstance(data, dict) and isinstance(settings := data.get("settings"), dict) and "cluster" in data:
        if not settings.get("constraints"):
            raise ConstraintError(f"'{file}' is an exploration without constraints; leave --constraints out")
        data = settings["constraints"]
    try:
        return constraints_from_dict(data)
    except ConstraintError as error:
        raise ConstraintError(f"constraints file '{file}': {error}") from None
