"""Read observed files of all kinds: snapshots, traces (also gzip'd), results of verify."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.exploration.verified import SCHEMA, verified_from
from tensoropt.files import MOST_BYTES, unpacked
from tensoropt.observed.observation import Observation
from tensoropt.observed.pickle_data import MOST_OPCODES, read_pickle
from tensoropt.observed.profile import parse_json, read_profile
from tensoropt.observed.snapshot import read_snapshot

_ENDINGS = (".pickle", ".pkl", ".json", ".json.gz")
KINDS = (
    "a memory snapshot (.pickle, .pkl), a trace of torch.profiler (.json, .json.gz) or verified.json of "
    "tensoropt verify --save"
)


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
        raise TensorOptError(f"cannot read {file} ({error.strerror or error}); give {KINDS}") from error
    return parse_observation(file.name, content)


def check_name(name: str) -> None:
    """Refuse a file by its name.

    Raises:
        TensorOptError: its ending is none of :data:`_ENDINGS`.
    """
    if not name.lower().endswith(_ENDINGS):
        raise TensorOptError(f"'{name}' is not taken; give {KINDS}")


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
    is_pickle = name.lower().endswith((".pickle", ".pkl"))
    if not is_pickle and content[:2] == b"\x1f\x8b":
        content = unpacked(content, name, most_bytes, "profile fewer steps, or export it again")
    try:
        if is_pickle:
            return read_snapshot(read_pickle(content, most_opcodes=most_opcodes))
        return _from_json(parse_json(content))
    except TensorOptError as error:
        raise TensorOptError(f"'{name}': {error}") from error


def _from_json(data: Any) -> Observation:
    if isinstance(data, Mapping) and data.get("schema") == SCHEMA:
        verified = verified_from(data)
        if not verified:
            raise TensorOptError("no plan was verified in this file; run tensoropt verify PLAN --save DIR")
        return Observation("results of verify", verified=verified)
    return read_profile(data)


def _too_large(name: str, size: int, most_bytes: int) -> TensorOptError:
    return TensorOptError(
        f"'{name}' has {size / 2**20:.0f} MiB; at most {most_bytes // 2**20} MiB are read. "
        "Record fewer steps, or shorter stacks"
    )
