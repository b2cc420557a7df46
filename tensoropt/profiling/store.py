"""The profile store: all measurements, and what was computed and can be again, in one SQLite file.

Every ``put`` is one transaction: an interruption loses at most that batch, never anything saved before. A
store that cannot be read or is of another version is moved aside, with what can be read taken along, and one
that cannot be written is replaced by memory; both with a warning, never a crash, because measurements can be
repeated. Nothing that is read is ever run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tensoropt.errors import MeasurementError
from tensoropt.files import pack, unpack
from tensoropt.profiling.database import (
    BUSY_TIMEOUT_S,
    NotOursError,
    cached_keys,
    cannot_write,
    connect,
    insert,
    page,
    read_cached,
    readable_rows,
    transaction,
    write_cached,
)
from tensoropt.profiling.export import read_export, write_export

logger = logging.getLogger(__name__)

KINDS = ("compute", "collective", "saved", "discovery")
CACHED = ("tables", "frontiers", "explorations", "captures")
"""The kinds of values that can be computed again, which the store may therefore lose."""
FAILURES = ("error", "failed", "lost")
"""The keys under which a record says why it is empty (of a workload, a collective, an operator)."""
_ROWS_PER_BATCH = 10_000  # an assumption: some megabytes of records at a time
_KEYS_PER_QUERY = 900  # SQLite's historical limit of variables is 999
_HASHES = 16**8
"""The number of values of the first eight digits of a key's hash."""

Record = dict[str, Any]
_Result = TypeVar("_Result")


def default_path() -> Path:
    """``$TENSOROPT_CACHE/profiles.sqlite``, or the same file in the user's cache directory."""
    override = os.environ.get("TENSOROPT_CACHE")
    if override:
        return Path(override).expanduser() / "profiles.sqlite"
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tensoropt" / "profiles.sqlite"


@dataclass(frozen=True)
class RecordSample:
    """Records drawn from a store that has ``total`` records of their kind."""

    records: tuple[tuple[str, Record], ...]
    total: int

    @property
    def words(self) -> str:
        """A note on what was left out; empty if nothing was."""
        drawn = len(self.records)
        return f"a fixed sample of {drawn:,} of {self.total:,} records" if drawn < self.total else ""


class ProfileStore:
    """A store of small JSON-compatible records by ``(kind, key)``.

    Args:
        path: the file; :func:`default_path` if None. Missing folders are created.

    Kinds of records are ``compute``, ``collective``, ``saved`` and ``discovery``, which it never removes; of
    the kinds in :data:`CACHED` it holds values for as long as they are used. It may be used from any number
    of processes and threads, but not from both sides of a fork; as a context manager it closes itself.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path: Path | None = default_path() if path is None else Path(path)
        self._lock = threading.RLock()
        self._connection = self._open()

    @property
    def persistent(self) -> bool:
        """False if records are kept only in memory, because the file cannot be written."""
        return self.path is not None

    def get(self, key: str, kind: str = "compute") -> Any:
        """The record, or the cached value with lists for tuples; None if there is none."""
        if kind not in CACHED:
            return self.get_many([key], kind).get(key)
        content = self._do(lambda connection: read_cached(connection, kind, key, time.time()))
        # A damaged value is as good as none, and damage may surface as any error.
        with contextlib.suppress(Exception):
            return None if content is None else unpack(content)
        return None

    def get_many(self, keys: Iterable[str], kind: str = "compute") -> dict[str, Record]:
        """The records of those keys that exist."""
        _check_kind(kind)
        wanted = list(dict.fromkeys(keys))

        def read(connection: sqlite3.Connection) -> dict[str, Record]:
            found: dict[str, Record] = {}
            for start in range(0, len(wanted), _KEYS_PER_QUERY):
                part = wanted[start : start + _KEYS_PER_QUERY]
                marks = ",".join("?" * len(part))
                rows = connection.execute(
                    f"SELECT key, record FROM profiles WHERE kind = ? AND key IN ({marks})", (kind, *part)
                )
                found.update((key, json.loads(record)) for key, record in rows)
            return found

        return self._do(read)

    def put_many(self, records: Mapping[str, Mapping[str, Any]], kind: str = "compute") -> None:
        """Save records in one transaction, replacing those with the same keys.

        Raises:
            MeasurementError: a record is not JSON (NaN and infinity are not allowed either).
        """
        _check_kind(kind)
        rows = [(kind, key, _dump(key, record)) for key, record in records.items()]
        if rows:
            self._do(lambda connection: insert(connection, rows))

    def put(self, key: str, record: Mapping[str, Any], kind: str = "compute") -> None:
        """Save one record, or a value of a kind in :data:`CACHED`, in which arrays may stand; a store in
        memory caches nothing.

        Raises:
            TensorOptError: a record is not JSON, or a value is too large or cannot be written.
        """
        if kind not in CACHED:
            return self.put_many({key: record}, kind)
        if not self.persistent:
            return None
        content = pack(record)

        def write(connection: sqlite3.Connection) -> None:
            # No reason to keep measurements, which are small, in memory only.
            try:
                write_cached(connection, kind, key, content, time.time())
            except (sqlite3.OperationalError, sqlite3.DataError) as error:  # a full disk, a value too large
                raise MeasurementError(f"{self.path} cannot be written ({error})") from error

        return self._do(write)

    def cached(self, kind: str, prefix: str) -> list[str]:
        """The keys of the cached values of a kind that begin with ``prefix``."""
        return self._do(lambda connection: cached_keys(connection, kind, prefix))

    def forget_failed(self) -> int:
        """Forget what could not be measured or tried, so it is tried again; return the number of records."""

        def remove(connection: sqlite3.Connection) -> int:
            # The text search only narrows: a record may contain the word elsewhere, so each is parsed before
            # it is deleted.
            like = " OR ".join("instr(record, ?)" for _ in FAILURES)
            with transaction(connection):
                rows = connection.execute(
                    f"SELECT kind, key, record FROM profiles WHERE {like}", [f'"{name}"' for name in FAILURES]
                )
                failed = [(kind, key) for kind, key, text in rows if set(FAILURES) & json.loads(text).keys()]
                connection.executemany("DELETE FROM profiles WHERE kind = ? AND key = ?", failed)
            return len(failed)

        return self._do(remove)

    def items(self, kind: str = "compute", prefix: str = "") -> Iterator[tuple[str, Record]]:
        """All ``(key, record)`` pairs of a kind whose key begins with ``prefix``, in key order."""
        _check_kind(kind)
        last: str | None = None
        while True:
            read = partial(page, kind=kind, prefix=prefix, last=last, most=_ROWS_PER_BATCH)
            rows = self._do(read)
            for key, record in rows:
                # Outside the lock, so that a slow consumer never blocks other threads.
                yield key, json.loads(record)
            if len(rows) < _ROWS_PER_BATCH:
                return
            last = rows[-1][0]

    def sample(self, most: int, kind: str = "compute") -> RecordSample:
        """About ``most`` records of a kind, the same each time; all of them if there are fewer.

        Keys end with a hash after the last slash. The sample consists of those whose hash begins below a
        limit, whatever is before it.
        """
        total = self.count(kind)
        if total <= most:
            return RecordSample(tuple(self.items(kind)), total)
        # Hashes are uniform, so the share of them below the limit is the share of records.
        limit = f"{round(_HASHES * most / total):08x}"
        query = "SELECT key, record FROM profiles WHERE kind = ? AND last_part(key) < ? ORDER BY key"
        rows = self._do(lambda connection: connection.execute(query, (kind, limit)).fetchall())
        return RecordSample(tuple((key, json.loads(record)) for key, record in rows), total)

    def count(self, kind: str | None = None) -> int:
        """The number of records, of one kind or of all."""
        where, values = ("", ()) if kind is None else (" WHERE kind = ?", (kind,))
        return self._do(
            lambda connection: connection.execute(f"SELECT COUNT(*) FROM profiles{where}", values).fetchone()[
                0
            ]
        )

    def digest(self) -> str:
        """A hash of all records except facts of CPU kernels, which follow from their workloads."""
        found = hashlib.sha256()
        where = "kind != 'saved' OR key NOT LIKE 'facts-%'"

        def read(connection: sqlite3.Connection) -> None:
            query = f"SELECT kind, key, record FROM profiles WHERE {where} ORDER BY kind, key"
            for row in connection.execute(query):
                found.update("\0".join(map(str, row)).encode())

        self._do(read)
        return found.hexdigest()

    def export_file(self, path: str | os.PathLike[str]) -> int:
        """Write everything to a file of JSON lines (:mod:`tensoropt.profiling.export`); return the count."""
        return write_export(path, ((kind, *item) for kind in KINDS for item in self.items(kind)))

    def import_file(self, path: str | os.PathLike[str]) -> int:
        """Add the records of an exported file, replacing those with the same keys; return the count.

        Raises:
            MeasurementError: the file is missing or is not an export; nothing is then imported.
        """
        rows = []
        for kind, key, record in read_export(path):
            _check_kind(kind)
            rows.append((kind, key, _dump(key, record)))
        self._do(lambda connection: insert(connection, rows))
        return len(rows)

    def close(self) -> None:
        """Close the file; further use is an error."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> ProfileStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ProfileStore({str(self.path) if self.path else 'in memory'})"

    def _open(self) -> sqlite3.Connection:
        if self.path is None:
            return connect(None)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return connect(self.path)
        except NotOursError as error:
            reason = str(error)
        except sqlite3.DatabaseError as error:
            if cannot_write(error):
                return self._fall_back(str(error))
            # A lock is not damage: the file stays where it is.
            if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                return self._fall_back(f"{error}: another process has been writing for {BUSY_TIMEOUT_S:g} s")
            reason = str(error)
        except OSError as error:
            return self._fall_back(error.strerror or str(error))
        return self._replace(reason)

    def _replace(self, reason: str) -> sqlite3.Connection:
        """Move the file aside and begin an empty one."""
        assert self.path is not None
        aside = self.path.with_name(f"{self.path.name}.aside-{time.time_ns()}")
        try:
            os.replace(self.path, aside)
            # The log belongs to the old file; SQLite could take it for the new one's.
            for ending in ("-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(f"{self.path}{ending}", f"{aside}{ending}")
            connection = connect(self.path)
            rows = readable_rows(aside)
            insert(connection, rows)
        except (OSError, sqlite3.DatabaseError, NotOursError) as error:
            return self._fall_back(f"{reason}; it could not be moved aside either: {error}")
        logger.warning(
            "The profile store %s could not be used (%s). It was moved to %s, and a new one was begun with "
            "the %d records that could be read; other measurements are made again where needed.",
            self.path,
            reason,
            aside,
            len(rows),
        )
        return connection

    def _fall_back(self, reason: str) -> sqlite3.Connection:
        """Continue in memory, with the contents of the file if it can at least be read."""
        assert self.path is not None
        known = readable_rows(self.path)
        logger.warning(
            "The profile store %s cannot be written (%s). Its %d records are used; new measurements are kept "
            "in memory and lost at the end. Set TENSOROPT_CACHE to a folder that can be written.",
            self.path,
            reason,
            len(known),
        )
        self.path = None
        connection = connect(None)
        insert(connection, known)
        return connection

    def _do(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """Run one action; if the file turns out corrupt or read-only, replace it and retry the action."""
        with self._lock:
            try:
                return action(self._connection)
            except sqlite3.DatabaseError as error:
                # Our own errors, which a retry would only repeat.
                if self.path is None or isinstance(error, sqlite3.ProgrammingError | sqlite3.IntegrityError):
                    raise
                # sqlite3 raises plain DatabaseError for "malformed" and "not a database", OperationalError
                # for locks and disks.
                corrupt = not isinstance(error, sqlite3.OperationalError)
                if not corrupt and not cannot_write(error):
                    raise MeasurementError(
                        f"the profile store {self.path} did not answer ({error}); try again"
                    ) from error
                with contextlib.suppress(sqlite3.Error):
                    self._connection.close()
                self._connection = self._replace(str(error)) if corrupt else self._fall_back(str(error))
                return action(self._connection)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise MeasurementError(f"unknown kind of record '{kind}'; valid: {', '.join(KINDS)}")


def _dump(key: str, record: Mapping[str, Any]) -> str:
    try:
        # NaN and infinity are not JSON, and other readers of an export would refuse the whole file.
        return json.dumps(dict(record), separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise MeasurementError(f"the record of '{key}' is not JSON ({error}): {record!r}") from None
