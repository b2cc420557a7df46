"""The profile store: what has been measured, kept in one SQLite file.

Write-ahead logging lets many processes read while one writes. Every ``put_many`` is one transaction:
an interruption loses that batch at most, never what was saved before. A store that cannot be read or
is of another version is moved aside, one that cannot be written is replaced by memory; both with a
warning, never a crash, since measurements can be made again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tensoropt.errors import MeasurementError

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
EXPORT_SCHEMA = "tensoropt.profiles/1"
KINDS = ("compute", "collective", "saved", "discovery")
FAILURES = ("error", "failed", "lost")
"""Each the key under which a record says why there is nothing in it (workload, collective, operator)."""
_APPLICATION_ID = 0x54_4F_50_54  # "TOPT": tells our file from any other SQLite file
_BUSY_TIMEOUT_S = 30.0
_KEYS_PER_QUERY = 900  # SQLite's historical limit of variables is 999
_ROWS_PER_BATCH = 10_000
_HASHES = 16**8
"""Values of the first eight digits of a key's hash."""

Record = dict[str, Any]
_Result = TypeVar("_Result")


def default_path() -> Path:
    """``$TENSOROPT_CACHE/profiles.sqlite``, else the same in the user's cache directory."""
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
    """Records drawn from a store that has ``total`` of their kind."""

    records: tuple[tuple[str, Record], ...]
    total: int

    @property
    def words(self) -> str:
        """What was left out; empty where nothing was."""
        drawn = len(self.records)
        return f"a fixed sample of {drawn:,} of {self.total:,} records" if drawn < self.total else ""


class ProfileStore:
    """Small JSON-able records by ``(kind, key)``.

    Args:
        path: the file; :func:`default_path` for None. Missing folders are made.

    Kinds are ``compute``, ``collective``, ``saved`` and ``discovery``. Use it from any number of
    processes and threads; as a context manager it closes itself.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path: Path | None = default_path() if path is None else Path(path)
        self._lock = threading.RLock()
        self._connection = self._open()

    @property
    def persistent(self) -> bool:
        """False when records are kept in memory only, because the file cannot be written."""
        return self.path is not None

    def get(self, key: str, kind: str = "compute") -> Record | None:
        """The record, or None."""
        return self.get_many([key], kind).get(key)

    def get_many(self, keys: Iterable[str], kind: str = "compute") -> dict[str, Record]:
        """Records of those keys that exist."""
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
        """Save records, replacing those of the same keys, in one transaction.

        Raises:
            MeasurementError: a record is not JSON (NaN and infinity are not either).
        """
        _check_kind(kind)
        rows = [(kind, key, _dump(key, record)) for key, record in records.items()]
        if rows:
            self._do(lambda connection: _insert(connection, rows))

    def put(self, key: str, record: Mapping[str, Any], kind: str = "compute") -> None:
        """Save one record."""
        self.put_many({key: record}, kind)

    def delete_many(self, keys: Iterable[str], kind: str = "compute") -> None:
        """Forget records, for example to measure again."""
        _check_kind(kind)
        rows = [(kind, key) for key in keys]

        def remove(connection: sqlite3.Connection) -> None:
            with _transaction(connection):
                connection.executemany("DELETE FROM profiles WHERE kind = ? AND key = ?", rows)

        self._do(remove)

    def forget_failed(self) -> int:
        """Forget what could not be measured or tried, so that it is tried again; returns how many records."""

        def remove(connection: sqlite3.Connection) -> int:
            like = " OR ".join("instr(record, ?)" for _ in FAILURES)
            with _transaction(connection):
                rows = connection.execute(
                    f"SELECT kind, key, record FROM profiles WHERE {like}", [f'"{name}"' for name in FAILURES]
                )
                failed = [(kind, key) for kind, key, text in rows if set(FAILURES) & json.loads(text).keys()]
                connection.executemany("DELETE FROM profiles WHERE kind = ? AND key = ?", failed)
            return len(failed)

        return self._do(remove)

    def items(self, kind: str = "compute", prefix: str = "") -> Iterator[tuple[str, Record]]:
        """All ``(key, record)`` of a kind whose key begins with ``prefix``, by key."""
        _check_kind(kind)
        last: str | None = None
        while True:
            rows = self._do(lambda connection, last=last: _page(connection, kind, prefix, last))  # type: ignore[misc]
            for key, record in rows:
                yield key, json.loads(record)
            if len(rows) < _ROWS_PER_BATCH:
                return
            last = rows[-1][0]

    def sample(self, most: int, kind: str = "compute") -> RecordSample:
        """About ``most`` records of a kind, the same each time; all where there are fewer.

        Keys end with a hash after the last slash; a sample are those whose hash begins below a limit, under
        every prefix the same, so that nothing else has to be read.
        """
        total = self.count(kind)
        if total <= most:
            return RecordSample(tuple(self.items(kind)), total)
        limit = f"{round(_HASHES * most / total):08x}"
        rows = self._do(lambda connection: _below(connection, kind, limit))
        return RecordSample(tuple((key, json.loads(record)) for key, record in rows), total)

    def count(self, kind: str | None = None) -> int:
        """Number of records, of one kind or of all."""
        where, values = ("", ()) if kind is None else (" WHERE kind = ?", (kind,))
        return self._do(
            lambda connection: connection.execute(f"SELECT COUNT(*) FROM profiles{where}", values).fetchone()[
                0
            ]
        )

    def export_file(self, path: str | os.PathLike[str]) -> int:
        """Write everything to a JSON-lines file, beside it first and then renamed; returns the count."""
        target = Path(path)
        written = 0
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                    stream.write(json.dumps({"schema": EXPORT_SCHEMA}) + "\n")
                    for kind in KINDS:
                        for key, record in self.items(kind):
                            stream.write(json.dumps({"kind": kind, "key": key, "record": record}) + "\n")
                            written += 1
                os.replace(temporary, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            raise MeasurementError(f"profiles cannot be written to '{target}' ({error.strerror})") from None
        return written

    def import_file(self, path: str | os.PathLike[str]) -> int:
        """Add the records of an exported file, which replace those of the same keys; all or nothing.

        Returns:
            How many were read.

        Raises:
            MeasurementError: the file is missing or no export; nothing is imported then.
        """
        try:
            with open(path, encoding="utf-8") as stream:
                rows = _exported_rows(stream, path)
        except (OSError, UnicodeDecodeError) as error:
            raise MeasurementError(f"profiles cannot be read from '{os.fspath(path)}' ({error})") from None
        self._do(lambda connection: _insert(connection, rows))
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
            return _connect(None)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return _connect(self.path)
        except _NotOursError as error:
            reason = str(error)
        except sqlite3.DatabaseError as error:
            if _cannot_write(error):
                return self._fall_back(str(error))
            if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                return self._fall_back(f"{error}: another process has been writing for {_BUSY_TIMEOUT_S:g} s")
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
            for ending in ("-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(f"{self.path}{ending}", f"{aside}{ending}")
            connection = _connect(self.path)
        except (OSError, sqlite3.DatabaseError, _NotOursError) as error:
            return self._fall_back(f"{reason}; it could not be moved aside either: {error}")
        logger.warning(
            "The profile store %s could not be used (%s). It was moved to %s and a new one was begun; "
            "measurements are made again where needed.",
            self.path,
            reason,
            aside,
        )
        return connection

    def _fall_back(self, reason: str) -> sqlite3.Connection:
        """Go on in memory, with what the file holds where it can at least be read."""
        assert self.path is not None
        known = _read_only_rows(self.path)
        logger.warning(
            "The profile store %s cannot be written (%s). Its %d records are used; new measurements are kept "
            "in memory and lost at the end. Set TENSOROPT_CACHE to a folder that can be written.",
            self.path,
            reason,
            len(known),
        )
        self.path = None
        connection = _connect(None)
        _insert(connection, known)
        return connection

    def _do(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """Run one action; a file found corrupt or read-only on the way is replaced and the action retried."""
        with self._lock:
            try:
                return action(self._connection)
            except sqlite3.DatabaseError as error:
                if self.path is None or isinstance(error, sqlite3.ProgrammingError | sqlite3.IntegrityError):
                    raise
                corrupt = not isinstance(error, sqlite3.OperationalError)
                if not corrupt and not _cannot_write(error):
                    raise MeasurementError(
                        f"the profile store {self.path} did not answer ({error}); try again"
                    ) from error
                with contextlib.suppress(sqlite3.Error):
                    self._connection.close()
                self._connection = self._replace(str(error)) if corrupt else self._fall_back(str(error))
                return action(self._connection)


class _NotOursError(Exception):
    """A file of another version, or of something else."""


def _cannot_write(error: sqlite3.DatabaseError) -> bool:
    text = str(error)
    return any(
        part in text for part in ("readonly", "read-only", "unable to open", "disk is full", "disk I/O")
    )


def _connect(path: Path | None) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path or ":memory:", timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _read_only_rows(path: Path) -> list[tuple[str, str, str]]:
    # "immutable" needs neither locks nor the -shm file, which a read-only file system cannot give.
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    except sqlite3.Error:
        return []
    try:
        _check_owner(connection)
        return connection.execute("SELECT kind, key, record FROM profiles").fetchall()
    except (sqlite3.Error, _NotOursError):
        return []
    finally:
        connection.close()


def _prepare(connection: sqlite3.Connection) -> None:
    """Check whose file it is, then make the tables; several processes may do so at once."""
    _check_owner(connection)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    if connection.execute("PRAGMA application_id").fetchone()[0] == _APPLICATION_ID:
        return
    with _transaction(connection):
        _check_owner(connection)
        connection.execute("CREATE TABLE IF NOT EXISTS schema (version INTEGER NOT NULL)")
        if not connection.execute("SELECT COUNT(*) FROM schema").fetchone()[0]:
            connection.execute("INSERT INTO schema VALUES (?)", (SCHEMA_VERSION,))
        connection.execute(
            "CREATE TABLE IF NOT EXISTS profiles (kind TEXT NOT NULL, key TEXT NOT NULL,"
            " record TEXT NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID"
        )
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")


def _check_owner(connection: sqlite3.Connection) -> None:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return
    if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
        raise _NotOursError("it is a database of something else")
    row = connection.execute("SELECT version FROM schema").fetchone() if "schema" in tables else None
    if row is None or row[0] != SCHEMA_VERSION:
        raise _NotOursError(f"it has schema version {row and row[0]}, not {SCHEMA_VERSION}")
    if "profiles" not in tables:
        raise _NotOursError("its table of profiles is missing")


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")  # takes the writer's lock at once, so that waiting works
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _insert(connection: sqlite3.Connection, rows: list[tuple[str, str, str]]) -> None:
    with _transaction(connection):
        connection.executemany("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?)", rows)


def _page(connection: sqlite3.Connection, kind: str, prefix: str, last: str | None) -> list[tuple[str, str]]:
    # Page by key instead of holding a cursor: a reader never blocks the writer's checkpoints.
    conditions, values = ["kind = ?"], [kind]
    if last is not None:
        conditions, values = [*conditions, "key > ?"], [*values, last]
    if prefix:
        following = prefix[:-1] + chr(ord(prefix[-1]) + 1)  # the first key after all with the prefix
        conditions, values = [*conditions, "key >= ?", "key < ?"], [*values, prefix, following]
    rows = connection.execute(
        f"SELECT key, record FROM profiles WHERE {' AND '.join(conditions)} ORDER BY key LIMIT ?",
        (*values, _ROWS_PER_BATCH),
    )
    return rows.fetchall()


def _below(connection: sqlite3.Connection, kind: str, limit: str) -> list[tuple[str, str]]:
    """Records whose key's last part sorts before ``limit``, prefix by prefix."""
    found: list[tuple[str, str]] = []
    after = ""
    while True:
        row = connection.execute(
            "SELECT key FROM profiles WHERE kind = ? AND key >= ? ORDER BY key LIMIT 1", (kind, after)
        ).fetchone()
        if row is None:
            return found
        prefix = row[0].rpartition("/")[0] + "/" if "/" in row[0] else ""
        found += connection.execute(
            "SELECT key, record FROM profiles WHERE kind = ? AND key >= ? AND key < ? ORDER BY key",
            (kind, prefix, prefix + limit),
        ).fetchall()
        if not prefix:
            return found
        after = prefix[:-1] + chr(ord("/") + 1)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise MeasurementError(f"unknown kind of record '{kind}'; valid: {', '.join(KINDS)}")


def _dump(key: str, record: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(record), separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise MeasurementError(f"the record of '{key}' is not JSON ({error}): {record!r}") from None


def _exported_rows(lines: Iterable[str], path: str | os.PathLike[str]) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    number = 0
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if number == 1:
                if entry["schema"] != EXPORT_SCHEMA:
                    raise MeasurementError(
                        f"'{os.fspath(path)}' has schema {entry['schema']!r}, not {EXPORT_SCHEMA};"
                        " export it again"
                    )
                continue
            kind, key, record = entry["kind"], entry["key"], entry["record"]
            if not isinstance(key, str) or not isinstance(record, dict):
                raise TypeError("key or record has the wrong type")
        except (ValueError, KeyError, TypeError) as error:
            raise MeasurementError(
                f"'{os.fspath(path)}' is not a file of profiles:"
                f" line {number} ({type(error).__name__}: {error})"
            ) from None
        _check_kind(kind)
        rows.append((kind, key, _dump(key, record)))
    if number == 0:
        raise MeasurementError(f"'{os.fspath(path)}' is empty, not a file of profiles; export it again")
    return rows
