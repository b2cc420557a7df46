"""Files that are whole or not there: written beside, flushed, then renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tensoropt.errors import TensorOptError


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside ``path`` that replaces it when the block ends well.

    Raises:
        TensorOptError: the file cannot be written (no space, no permission); what was there is kept.
    """
    target = Path(path)
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise TensorOptError(f"cannot write {target}: {error.strerror or error}; nothing was changed") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
