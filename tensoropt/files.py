"""Files that are written whole or not at all (to a temporary file, flushed, renamed), and content that is
only data; and functions in people's files, which are code.

The command line imports this module before it knows what is requested, so NumPy is imported where it is used.
"""

from __future__ import annotations

import contextlib
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
"""The most bytes that an exploration's file may unpack into: about a hundred times the largest of ours. A
small file made to unpack into more than a machine's memory must not take the process with it."""
DOCUMENT_BYTES = 2**20
"""The most bytes of a file that a person writes, which is parsed at once."""
_MOST_MEMBERS = 64
"""The most members of a gzip file."""
_ARRAY = "ndarray"
_RENAMES = ".renames"
SETTINGS_FILE = "exploration.json"
"""The file of a saved exploration that holds its settings, including the constraints."""


def unpacked(
    content: bytes, name: object, most_bytes: int = _MOST_BYTES, remedy: str = "explore again"
) -> bytes:
    """Return the content of a gzip'd file; at most ``most_bytes`` are ever unpacked.

    Args:
        name: the file's name in errors.
        remedy: the end of errors.

    Raises:
        TensorOptError: the content is larger, or damaged.
    """
    parts: list[bytes] = []
    room = most_bytes + 1
    try:
        while content and room > 0:  # a gzip file may have several members
            if len(parts) == _MOST_MEMBERS:
                raise TensorOptError(f"'{name}' has more than {_MOST_MEMBERS} parts; {remedy}")
            unpacker = zlib.decompressobj(wbits=31)
            parts.append(unpacker.decompress(content, room))
            room -= len(parts[-1])
            if room > 0 and not unpacker.eof:
                raise TensorOptError(f"'{name}' is incomplete; {remedy}")
            content = unpacker.unused_data
    except zlib.error as error:
        raise TensorOptError(f"'{name}' is damaged ({error}); {remedy}") from error
    if room <= 0:
        raise TensorOptError(
            f"'{name}' unpacks into more than {most_bytes // 2**20} MiB; it is not read further; {remedy}"
        )
    return b"".join(parts)


def check_size(path: Path, most_bytes: int = _MOST_BYTES) -> None:
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


def pack(value: Any) -> bytes:
    """Return JSON data, in which arrays may occur, as compressed bytes; only data can be read back from them.

    Raises:
        TypeError, ValueError: a part is neither JSON nor an array of plain numbers.
        TensorOptError: it is too large to be read back.
    """
    import numpy as np

    chunks: list[bytes] = []
    size = 0

    def listed(array: Any) -> dict[str, Any]:
        nonlocal size
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            raise TypeError(f"{type(array).__name__} is not data")
        if size + array.nbytes > _MOST_BYTES:
            mib = (size + array.nbytes) >> 20
            raise TensorOptError(f"{mib} MiB of arrays are more than can be read back")
        order: Literal["F", "C"] = "F" if array.flags.fnc else "C"
        described = [array.dtype.str, array.shape, order, size]
        chunks.append(array.tobytes(order))
        size += array.nbytes
        return {_ARRAY: described}

    text = json.dumps(value, default=listed, separators=(",", ":")).encode()
    if size + len(text) + 8 > _MOST_BYTES:
        raise TensorOptError(f"{(size + len(text)) >> 20} MiB are more than can be read back")
    # Costs of equal layers repeat: the fastest level leaves a fortieth of the bytes, in a second per 500 MB.
    return gzip.compress(b"".join([len(text).to_bytes(8, "big"), text, *chunks]), 1, mtime=0)


def unpack(content: bytes) -> Any:
    """Return the value given to :func:`pack`, with lists for tuples.

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
        return array.reshape(shape, order=order).copy("K")  # aligned, and may be written to

    return json.loads(raw[8:first], object_hook=array_of)


def plain(record: Any) -> dict[str, Any]:
    """Return the fields of a record, a dataclass or a pydantic model, as they stand: the ``default`` with
    which :func:`json.dumps` writes records in records. A ``TypeAdapter`` of their class reads them back.
    """
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
    """Yield temporary paths, one for each of ``paths``, all in one folder, that replace them if the block
    succeeds: all of them or none, even if the process is killed meanwhile (see :func:`settled`).

    Raises:
        TensorOptError: a file cannot be written; the previous files are kept.
    """
    temporary: list[Path] = []
    target, *others = map(Path, paths)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for target in (target, *others):  # noqa: B020
            # In the same folder: os.replace is atomic only within one file system.
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            os.close(handle)
            temporary.append(Path(name))
        yield temporary
        for written, target in zip(temporary, map(Path, paths), strict=True):  # noqa: B007 (the error names it)
            _flush(written)
            # mkstemp makes files that only their owner may read.
            written.chmod(0o644)
        renames = {written.name: Path(path).name for written, path in zip(temporary, paths, strict=True)}
        with settled(target.parent, writing=True):
            if others:
                # From its rename on, whoever opens the folder next goes through with the others.
                journal = target.parent / f"{temporary[0].name}{_RENAMES}"
                draft = journal.with_suffix(".draft")
                temporary.append(draft)
                draft.write_text(json.dumps(renames), encoding="utf-8")
                _flush(draft)
                os.replace(draft, journal)
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
    # Before the rename: a crash between the two may otherwise leave a new name on an empty file.
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _finish(journal: Path) -> None:
    for written, target in json.loads(journal.read_text(encoding="utf-8")).items():
        with contextlib.suppress(FileNotFoundError):  # renamed before its process was killed
            os.replace(journal.parent / written, journal.parent / target)
    journal.unlink()


@contextlib.contextmanager
def settled(folder: Path, *, writing: bool = False) -> Iterator[None]:
    """Hold a folder's lock, shared by readers, after finishing what a killed writer of several files began.

    Without locks (some network file systems) or rights to rename, files are read as they are.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
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
    """Return the values in YAML or JSON that a person typed.

    Raises:
        ValueError: it is neither, or small text that stands for much; the message has the line.
    """
    try:
        if text.lstrip().startswith(("{", "[")):
            with contextlib.suppress(ValueError):
                return json.loads(text)  # YAML reads 5e-06 as a word
        # Written out, a text says no more than its size; a dozen nested aliases would stand for gigabytes.
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ValueError("aliases (*name) are not accepted here; write the values out")
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        why = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ValueError(f"{line}{why}") from None


def read_document(path: Path, kind: str, refused: type[TensorOptError]) -> Any:
    """Return the values in a file that a person wrote: JSON in ``.json``, otherwise YAML.

    Args:
        kind: the kind of file, for errors.

    Raises:
        refused: the file is missing, cannot be read, or is neither.
    """
    try:
        if path.stat().st_size > DOCUMENT_BYTES and path.name != SETTINGS_FILE:
            raise refused(f"{kind} file '{path}' is larger than 1 MiB; is it the right one?")
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
    """Return the function that ``package.module:function`` or ``path/file.py:function`` names.

    Args:
        source: the name.
        signature: what stands behind the function's name where it is missing and has to be defined.

    Raises:
        TensorOptError: there is none.
    """
    place, separator, name = source.rpartition(":")
    if not separator or not place or not name:
        raise TensorOptError(
            f"'{source}' names no function; write package.module:function or path/file.py:function"
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
            # As ``python path/file.py`` does, so that it can import the files beside it.
            if (folder := str(path.resolve().parent)) not in sys.path[:1]:
                sys.path.insert(0, folder)
            spec = importlib.util.spec_from_file_location(f"_tensoropt_model_{path.stem}", path)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            # Before it runs: dataclasses and pickle look up the module of a class by name.
            sys.modules[spec.name] = module
            # Not by its loader, which takes kept bytecode for a file of the same second and size.
            exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
            return module
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            # As ``python -m`` does; a console script has its own folder there instead.
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    except TensorOptError:
        raise
    except (Exception, SystemExit) as error:
        raise TensorOptError(
            f"{source}: importing {place} failed with {type(error).__name__}: {error}"
        ) from error
