"""Files that are whole or not there: written beside, flushed, then renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensoropt.errors import TensorOptError


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
