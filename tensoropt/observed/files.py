"""The kinds of observed files, and how much of them is read: snapshots, traces (also gzip'd), results of
verify."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.observed.observation import Observation
from tensoropt.observed.pickle_data import MOST_OPCODES, read_pickle
from tensoropt.observed.profile import parse_json, read_profile
from tensoropt.observed.snapshot import read_snapshot
from tensoropt.plan.verified import SCHEMA, verified_from

MOST_BYTES = 2**30
"""The most bytes of a file as it is read, unpacked."""
MOST_MEMBERS = 64
"""The most members of a gzip file."""
ENDINGS = (".pickle", ".pkl", ".json", ".json.gz")
KINDS = (
    "a memory snapshot (.pickle, .pkl), a trace of torch.profiler (.json, .json.gz) or verified.json of "
    "tensoropt verify --save"
)


class ObservationError(TensorOptError):
    """A file that is refused; the message says why."""


def read_observation(path: str | os.PathLike[str]) -> Observation:
    """Return what a file says about real steps.

    Raises:
        TensorOptError: the file cannot be read, is larger than :data:`MOST_BYTES`, or is none of
            :data:`KINDS`.
    """
    file = Path(path)
    try:
        check_name(file.name)
        if (size := file.stat().st_size) > MOST_BYTES:
            raise _too_large(file.name, size, MOST_BYTES)
        content = file.read_bytes()
    except OSError as error:
        raise ObservationError(f"cannot read {file} ({error.strerror or error}); give {KINDS}") from error
    return parse_observation(file.name, content)


def check_name(name: str) -> None:
    """Refuse a file by its name.

    Raises:
        ObservationError: its ending is none of :data:`ENDINGS`.
    """
    if not name.lower().endswith(ENDINGS):
        raise ObservationError(f"'{name}' is not taken; give {KINDS}")


def parse_observation(
    name: str, content: bytes, *, most_bytes: int = MOST_BYTES, most_opcodes: int = MOST_OPCODES
) -> Observation:
    """Return what a file's content says about real steps.

    Args:
        most_bytes: the most bytes that it may have, unpacked.
        most_opcodes: the most instructions that a pickle may have.

    Raises:
        TensorOptError: as in :func:`read_observation`; the message begins with the file's name.
    """
    check_name(name)
    if len(content) > most_bytes:
        raise _too_large(name, len(content), most_bytes)
    try:
        if name.lower().endswith((".pickle", ".pkl")):
            return read_snapshot(read_pickle(content, most_opcodes=most_opcodes))
        if content[:2] == b"\x1f\x8b":
            content = unzipped(name, content, most_bytes)
        return _from_json(parse_json(content))
    except ObservationError:
        raise
    except TensorOptError as error:
        raise ObservationError(f"'{name}': {error}") from error


def _from_json(data: Any) -> Observation:
    if isinstance(data, Mapping) and data.get("schema") == SCHEMA:
        found = verified_from(data)
        if not found:
            raise ObservationError("no plan was verified in this file; run tensoropt verify PLAN --save DIR")
        return Observation("results of verify", verified=found)
    return read_profile(data)


def unzipped(name: str, content: bytes, most_bytes: int) -> bytes:
    """Return the content of a gzip'd file; no more than ``most_bytes`` are ever unpacked.

    Raises:
        ObservationError: the content is larger, or damaged.
    """
    parts: list[bytes] = []
    room = most_bytes + 1
    try:
        while content and room > 0:  # a gzip file may have several members
            if len(parts) == MOST_MEMBERS:
                raise ObservationError(f"'{name}' has more than {MOST_MEMBERS} parts; zip it anew, as one")
            unpacker = zlib.decompressobj(wbits=31)
            parts.append(unpacker.decompress(content, room))
            room -= len(parts[-1])
            if room > 0 and not unpacker.eof:
                raise ObservationError(f"'{name}' breaks off; copy or export it again")
            content = unpacker.unused_data
    except zlib.error as error:
        raise ObservationError(f"'{name}' is damaged ({error}); copy or export it again") from error
    if room <= 0:
        raise ObservationError(
            f"'{name}' unpacks into more than {most_bytes // 2**20} MiB; it is not read further. "
            "Profile fewer steps"
        )
    return b"".join(parts)


def _too_large(name: str, size: int, most_bytes: int) -> ObservationError:
    return ObservationError(
        f"'{name}' has {size / 2**20:.0f} MiB; at most {most_bytes // 2**20} MiB are read. "
        "Record fewer steps, or shorter stacks"
    )
