"""Profiles as a file of JSON lines, for transfer from one machine's store to another's.

The first line names the schema; each further line is a record with its kind and key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from tensoropt.errors import MeasurementError
from tensoropt.files import written_whole

EXPORT_SCHEMA = "tensoropt.profiles/1"

Entry = tuple[str, str, dict[str, Any]]
"""Kind, key and record."""


def write_export(path: str | os.PathLike[str], entries: Iterable[Entry]) -> int:
    """Write entries to a file (first to a file next to it, which is then renamed) and return their number.

    Raises:
        TensorOptError: the file cannot be written; its previous content is then preserved.
    """
    written = 0
    with written_whole(path) as temporary, open(temporary, "w", encoding="utf-8") as stream:
        stream.write(json.dumps({"schema": EXPORT_SCHEMA}) + "\n")
        for kind, key, record in entries:
            stream.write(json.dumps({"kind": kind, "key": key, "record": record}) + "\n")
            written += 1
    return written


def read_export(path: str | os.PathLike[str]) -> list[Entry]:
    """Return the entries of a file that :func:`write_export` wrote.

    Raises:
        MeasurementError: the file is missing, is not an export, or has another schema.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            return _entries(stream, os.fspath(path))
    except (OSError, UnicodeDecodeError) as error:
        raise MeasurementError(f"profiles cannot be read from '{os.fspath(path)}' ({error})") from None


def _entries(lines: Iterable[str], path: str) -> list[Entry]:
    entries: list[Entry] = []
    number = 0
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if number == 1:
                if entry["schema"] != EXPORT_SCHEMA:
                    raise MeasurementError(
                        f"'{path}' has schema {entry['schema']!r}, not {EXPORT_SCHEMA}; export it again"
                    )
                continue
            kind, key, record = entry["kind"], entry["key"], entry["record"]
            if not isinstance(key, str) or not isinstance(record, dict):
                raise TypeError("key or record has the wrong type")
        except (ValueError, KeyError, TypeError) as error:
            raise MeasurementError(
                f"'{path}' is not a file of profiles: line {number} ({type(error).__name__}: {error})"
            ) from None
        entries.append((kind, key, record))
    if number == 0:
        raise MeasurementError(f"'{path}' is empty, not a file of profiles; export it again")
    return entries
