"""Functions that write files whole or not at all, read files of pure data, and load users' functions.

The command line always imports this module, so NumPy is imported on use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import importlib
import importlib.util
import json
import math
import os
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tensoropt.errors import TensorOptError

_MOST_BYTES = 2**30
"""The largest unpacked size of an exploration's file, about a hundred times the largest known: a small file
made to unpack into more than a machine's memory must not kill the process."""
DOCUMENT_BYTES = 2**20
"""The largest size of a user's text file, which is parsed at once."""
_ARRAY = "ndarray"
_RENAMES = ".renames"
SETTINGS_FILE = "exploration.json"
"""The name of a saved exploration's file with its settings and constraints."""


def unpacked(content: bytes, name: object) -> bytes:
    """Return the content of a gzip'd file, of which at most :data:`_MOST_BYTES` are unpacked.

    Args:
        name: the file's name, for error messages.

    Raises:
        TensorOptError: the content is larger, or damaged.
    """
    unpacker = zlib.decompressobj(wbits=31)
    try:
        found = unpacker.decompress(content, _MOST_BYTES + 1)
    except zlib.error as error:
        raise TensorOptError(f"'{name}' is damaged ({error}); explore again") from error
    if len(found) > _MOST_BYTES:
        raise TensorOptError(f"'{name}' unpacks into more than {_MOST_BYTES >> 20} MiB; explore again")
    if not unpacker.eof or unpacker.unused_data:
        raise TensorOptError(f"'{name}' is incomplete; explore again")
    return found


def check_size(path: Path) -> None:
    """Raise an error for a file larger than :data:`_MOST_BYTES`; for a zip archive its unpacked size counts.

    Raises:
        TensorOptError: the file is larger.
        OSError, zipfile.BadZipFile: the file cannot be read, or is damaged.
    """
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    if size > _MOST_BYTES:
        raise TensorOptError(
            f"{path} holds more than {_MOST_BYTES >> 20} MiB, the limit for reading; give a smaller file"
        )


def pack(value: Any) -> bytes:
    """Return JSON data, possibly with NumPy arrays in it, as compressed bytes; reading them runs no code.

    Raises:
        TypeError, ValueError: a part is neither JSON nor an array of numbers.
        TensorOptError: the data are too large to be read back.
    """
    import numpy as np

    chunks: list[bytes] = []
    size = 0

    def listed(array: Any) -> dict[str, Any]:
        nonlocal size
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            raise TypeError(f"{type(array).__name__} is not an array of numbers")
        if size + array.nbytes > _MOST_BYTES:
            mib = (size + array.nbytes) >> 20
            raise TensorOptError(f"{mib} MiB of arrays exceed the limit for reading them back")
        order: Literal["F", "C"] = "F" if array.flags.fnc else "C"
        described = [array.dtype.str, array.shape, order, size]
        chunks.append(array.tobytes(order))
        size += array.nbytes
        return {_ARRAY: described}

    text = json.dumps(value, default=listed, separators=(",", ":")).encode()
    if size + len(text) + 8 > _MOST_BYTES:
        raise TensorOptError(f"{(size + len(text)) >> 20} MiB exceed the limit for reading them back")
    # Costs of equal layers repeat: the fastest level shrinks them to a fortieth, in a second per 500 MB.
    return gzip.compress(b"".join([len(text).to_bytes(8, "big"), text, *chunks]), 1, mtime=0)


def unpack(content: bytes) -> Any:
    """Return the data that :func:`pack` compressed; tuples come back as lists.

    Raises:
        TensorOptError, ValueError, TypeError: the content is damaged.
    """
    import numpy as np

    raw = unpacked(content, "content")
    first = 8 + int.from_bytes(raw[:8], "big")

    def array_of(data: dict[str, Any]) -> Any:
        if data.keys() != {_ARRAY}:
            return data
        dtype, shape, order, at = data[_ARRAY]
        array = np.frombuffer(raw, np.dtype(dtype), math.prod(shape), first + at)
        return array.reshape(shape, order=order).copy("K")  # aligned and writable

    return json.loads(raw[8:first], object_hook=array_of)


def plain(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass or pydantic model by name: a ``default`` function for
    :func:`json.dumps`. A ``TypeAdapter`` of the class reads the JSON back."""
    if is_dataclass(record):
        return {field.name: getattr(record, field.name) for field in fields(record)}
    return dict(record)


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` if the block succeeds.

    Raises:
        TensorOptError: the file cannot be written (no space, no permission); the previous file is kept.
    """
    with written_together([path]) as temporary:
        yield temporary[0]


@contextlib.contextmanager
def written_together(paths: Sequence[str | os.PathLike[str]]) -> Iterator[list[Path]]:
    """Yield, for each of ``paths``, a temporary path in the same folder. If the block succeeds, the temporary
    files replace all of ``paths`` or none, even if the process is killed (see :func:`folder_lock`).

    Raises:
        TensorOptError: a file cannot be written; the previous files are kept.
    """
    temporary: list[Path] = []
    target, *others = map(Path, paths)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for target in (target, *others):  # noqa: B020
            if target.is_dir():  # no file replaces it, which must not show among renames
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            # In the same folder: os.replace is atomic only within one file system.
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            os.close(handle)
            temporary.append(Path(name))
        yield temporary
        for written, target in zip(temporary, map(Path, paths), strict=True):  # noqa: B007 (the error names it)
            _flush(written)
            # mkstemp makes files readable only by their owner.
            written.chmod(0o644)
        renames = {written.name: Path(path).name for written, path in zip(temporary, paths, strict=True)}
        with folder_lock(target.parent, writing=True):
            if others:
                # Once it is renamed, whoever opens the folder next completes the other renames.
                journal = target.parent / f"{temporary[0].name}{_RENAMES}"
                draft = journal.with_suffix(".draft")
                temporary.append(draft)
                draft.write_text(json.dumps(renames), encoding="utf-8")
                _flush(draft)
                os.replace(draft, journal)
                temporary.clear()  # the journal's from now on
                _finish(journal)
            else:
                os.replace(temporary[0], target)
    except OSError as error:
        raise TensorOptError(
            f"cannot write {target}: {error.strerror or error}; nothing was changed"
        ) from error
    finally:
        for written in temporary:
            written.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    # Before the rename: a crash in between may otherwise leave the new name on an empty file.
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _finish(journal: Path) -> None:
    for written, target in json.loads(journal.read_text(encoding="utf-8")).items():
        with contextlib.suppress(FileNotFoundError):  # already renamed when its process was killed
            # Names alone: a folder from elsewhere must not move files of others.
            os.replace(journal.parent / Path(written).name, journal.parent / Path(target).name)
    journal.unlink()


@contextlib.contextmanager
def folder_lock(folder: Path, *, writing: bool = False) -> Iterator[None]:
    """Lock a folder during the block, for one writer or for several readers.

    If a writer was killed between renames of its files, the other renames are made first. Without locks (some
    network file systems) or permission to rename, files are read as they are.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        # A journal that is none, of a folder from elsewhere, is left alone.
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            fcntl.flock(handle, fcntl.LOCK_EX)
            for journal in folder.glob(f".*{_RENAMES}"):
                _finish(journal)
            if not writing:
                fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, whole or not at all.

    Raises:
        TensorOptError: the file cannot be written; the previous file is kept.
    """
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def parse_typed(text: str) -> Any:
    """Return the values in a text in YAML or JSON that a user typed into a form or an option.

    Raises:
        ValueError: the text is neither, or uses aliases; the message has the line.
    """
    try:
        if text.lstrip().startswith(("{", "[")):
            with contextlib.suppress(ValueError):
                return json.loads(text)  # YAML reads 5e-06 as a word
        # Without aliases a text holds no more than its size; a dozen nested aliases could expand to
        # gigabytes.
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ValueError("aliases (*name) are not accepted here; write the values out")
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        why = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ValueError(f"{line}{why}") from None


def read_document(path: Path, kind: str, refused: type[TensorOptError]) -> Any:
    """Return the values in a user's file, which is JSON if its name ends with ``.json``, otherwise YAML.

    Args:
        kind: what the file contains, for error messages: ``cluster``, ``constraints``.
        refused: the class of the errors to raise.

    Raises:
        refused: the file is missing, cannot be read, or is neither.
    """
    try:
        if path.stat().st_size > DOCUMENT_BYTES and path.name != SETTINGS_FILE:
            raise refused(f"{kind} file '{path}' is larger than 1 MiB; check the path")
        text = path.read_text(encoding="utf-8-sig")
        return json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except refused:
        raise
    except FileNotFoundError:
        raise refused(f"{kind} file '{path}' does not exist; correct the path") from None
    except OSError as error:
        raise refused(f"{kind} file '{path}' cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise refused(
            f"{kind} file '{path}' is not valid YAML or JSON ({reason}); correct that line"
        ) from None


def named_function(source: str, signature: str) -> Callable[..., Any]:
    """Import and return the function named by ``package.module:function`` or ``path/file.py:function``.

    Args:
        source: the name.
        signature: the signature that the function should have, for error messages.

    Raises:
        TensorOptError: there is no such function.
    """
    place, separator, name = source.rpartition(":")
    if not separator or not place or not name:
        raise TensorOptError(
            f"'{source}' is not a function; write package.module:function or path/file.py:function"
        )
    function = getattr(_module(place, source), name, None)
    if not callable(function):
        raise TensorOptError(f"{place} has no function '{name}'; define {name}{signature}")
    found: Callable[..., Any] = function
    return found


def _module(place: str, source: str) -> Any:
    try:
        if place.endswith(".py"):
            path = Path(place)
            if not path.is_file():
                raise TensorOptError(f"{source}: there is no file {place}; check the path")
            # As ``python path/file.py`` does, for imports from its folder.
            if (folder := str(path.resolve().parent)) not in sys.path[:1]:
                sys.path.insert(0, folder)
            spec = importlib.util.spec_from_file_location(f"_tensoropt_model_{path.stem}", path)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            # Before it runs: dataclasses and pickle look up a class's module by name.
            sys.modules[spec.name] = module
            # Not by its loader, which would use cached bytecode for a file of the same second and size.
            exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
            return module
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            # As ``python -m`` does; a console script has its own folder there.
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    except TensorOptError:
        raise
    except (Exception, SystemExit) as error:
        raise TensorOptError(
            f"{source}: importing {place} failed with {type(error).__name__}: {error}"
        ) from error
