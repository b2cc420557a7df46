"""Files that are whole or not there: written beside, flushed, then renamed."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tensoropt.errors import TensorOptError

MOST_BYTES = 2**30
"""Unpacked, of a file of an exploration: about a hundred times what the largest of ours holds. A small file
that was made to unpack into more than a machine's memory must not take the process with it."""


def unpacked(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a gzip'd file.

    Raises:
        TensorOptError: it is larger than ``most_bytes``; it is not read further.
        OSError, EOFError, zlib.error: it cannot be read, or is damaged.
    """
    with gzip.open(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise TensorOptError(f"{path} unpacks into more than {most_bytes // 2**20} MiB; it is not read")
    return content


def check_size(path: Path, most_bytes: int = MOST_BYTES) -> None:
    """Refuse a file of more than ``most_bytes``, counting what a zip archive unpacks into.

    Raises:
        TensorOptError: it is larger.
        OSError, zipfile.BadZipFile: it cannot be read, or is damaged.
    """
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    if size > most_bytes:
        raise TensorOptError(f"{path} holds more than {most_bytes // 2**20} MiB; it is not read")


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside ``path`` that replaces it when the block ends well.

    Raises:
        TensorOptError: the file cannot be written (no space, no permission); what was there is kept.
    """
    with written_together([path]) as temporary:
        yield temporary[0]


@contextlib.contextmanager
def written_together(paths: Sequence[str | os.PathLike[str]]) -> Iterator[list[Path]]:
    """Temporary paths, each beside its own of ``paths``, that replace them when the block ends well.

    No file is replaced before all of them are on the disk, so that files that belong together stay so.

    Raises:
        TensorOptError: a file cannot be written; what was there is kept.
    """
    temporary: list[Path] = []
    target = Path()
    try:
        for target in map(Path, paths):
            target.parent.mkdir(parents=True, exist_ok=True)
            # In the same folder: os.replace is atomic only within one file system.
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            os.close(handle)
            temporary.append(Path(name))
        yield temporary
        for written, target in zip(temporary, map(Path, paths), strict=True):  # noqa: B007 (the error names it)
            with open(written, "rb") as file:
                # Before the rename: a crash between the two may otherwise leave a new name on an empty file.
                os.fsync(file.fileno())
            # mkstemp makes files that only their owner may read.
            written.chmod(0o644)
        for written, target in zip(temporary, map(Path, paths), strict=True):
            os.replace(written, target)
    except OSError as error:
        raise TensorOptError(
            f"cannot write {target}: {error.strerror or error}; nothing was changed"
        ) from error
    finally:
        for written in temporary:
            written.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, whole or not at all.

    Raises:
        TensorOptError: the file cannot be written; what was there is kept.
    """
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_document(path: Path, what: str, refused: type[TensorOptError]) -> Any:
    """The values in a file that a person wrote: ``.json`` is JSON, anything else YAML.

    Args:
        what: the file's kind, for errors.

    Raises:
        refused: it is not there, cannot be read, or is neither.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        return json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        raise refused(f"{what} file '{path}' does not exist; correct the path") from None
    except OSError as error:
        raise refused(f"{what} file '{path}' cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise refused(
            f"{what} file '{path}' is not valid YAML or JSON ({reason}); correct that line"
        ) from None
