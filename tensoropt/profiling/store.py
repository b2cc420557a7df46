"""The profile store: one SQLite file with all measurements, and a cache of results that can be recomputed.

Every ``put`` is one transaction, with write-ahead logging. A damaged file, or one with another schema
version, is renamed and a new file is begun. If the file cannot be written, records are kept in memory, with a
warning. No content of the file is ever executed. Measurements can be exported as JSON lines: the first line
names the schema, each further line is one record with its kind and key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tensoropt.errors import MeasurementError
from tensoropt.files import pack, unpack, written_whole

_SCHEMA_VERSION = 1
_BUSY_TIMEOUT_S = 30.0
"""The longest wait, in seconds, for another process's transaction; an assumption."""
_MOST_VALUE_BYTES = 256 << 20
"""The largest size, in bytes, of one compressed value; an assumption."""
_MOST_CACHED_BYTES = 2 << 30
"""The largest total size, in bytes, of cached values; an assumption."""
_MOST_UNUSED_S = 90 * 86400.0
"""The time without use, in seconds, after which a cached value is removed; an assumption."""
_USED_WITHIN_S = 3600.0
"""The resolution, in seconds, of the stored time of a value's last use."""
_LOG_BYTES = 64 << 20
_APPLICATION_ID = 0x54_4F_50_54  # "TOPT": distinguishes our file from other SQLite files


class _NotOursError(Exception):
    """The file has another schema version, or belongs to another program."""


def _cannot_write(error: sqlite3.DatabaseError) -> bool:
    # SQLite has codes for these errors, but one code (SQLITE_CANTOPEN, SQLITE_IOERR) stands for many causes.
    text = str(error)
    return any(
        part in text for part in ("readonly", "read-only", "unable to open", "disk is full", "disk I/O")
    )


def connect(path: Path | None) -> sqlite3.Connection:
    """Open a store's file, which is created if it does not exist; without a path, open a database in memory.

    Raises:
        _NotOursError: the file has another schema version, or belongs to another program.
        sqlite3.DatabaseError: the file cannot be read or written.
    """
    # Without an isolation level, sqlite3 begins no transactions by itself; only `_transaction` does. The
    # store's own lock serialises threads, so sqlite3's thread check is not needed.
    connection = sqlite3.connect(
        path or ":memory:", timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    # Before anything is written: another program's database must not be switched to WAL mode.
    complete = _check_owner(connection)
    connection.execute("PRAGMA journal_mode = WAL")
    # In WAL mode NORMAL cannot corrupt the file; a power failure may lose the last commits, which are then
    # measured again.
    connection.execute("PRAGMA synchronous = NORMAL")
    # The log of a large value would otherwise stay as large.
    connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
    if complete:
        return
    with _transaction(connection):
        # Checked once more under the writer's lock: another process may have created the file in the
        # meantime.
        _check_owner(connection)
        connection.execute("CREATE TABLE IF NOT EXISTS schema (version INTEGER NOT NULL)")
        if not connection.execute("SELECT COUNT(*) FROM schema").fetchone()[0]:
            connection.execute("INSERT INTO schema VALUES (?)", (_SCHEMA_VERSION,))
        connection.execute(
            "CREATE TABLE IF NOT EXISTS profiles (kind TEXT NOT NULL, key TEXT NOT NULL,"
            " record TEXT NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID"
        )
        # A separate table, because older files have only profiles; older versions can use files with both.
        connection.execute(
            "CREATE TABLE IF NOT EXISTS cache (kind TEXT NOT NULL, key TEXT NOT NULL, used_s REAL NOT NULL,"
            " value BLOB NOT NULL, PRIMARY KEY (kind, key))"
        )
        # In one transaction with the tables, so that every file with our id has the tables.
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")


def _check_owner(connection: sqlite3.Connection) -> bool:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    # An empty file, whether newly created or left by an interruption, may be used.
    if not tables:
        return False
    if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
        raise _NotOursError("it is another program's database")
    row = connection.execute("SELECT version FROM schema").fetchone() if "schema" in tables else None
    if row is None or row[0] != _SCHEMA_VERSION:
        raise _NotOursError(f"it has schema version {row and row[0]}, not {_SCHEMA_VERSION}")
    if "profiles" not in tables:
        raise _NotOursError("its table of profiles is missing")
    return "cache" in tables


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


def _read_cached(connection: sqlite3.Connection, kind: str, key: str, now_s: float) -> bytes | None:
    row = connection.execute(
        "SELECT value, used_s FROM cache WHERE kind = ? AND key = ?", (kind, key)
    ).fetchone()
    # Not at every use, because SQLite writes the whole row. A failure to store the time does not matter.
    if row is not None and row[1] < now_s - _USED_WITHIN_S:
        connection.execute("PRAGMA busy_timeout = 0")
        with contextlib.suppress(sqlite3.OperationalError):
            connection.execute("UPDATE cache SET used_s = ? WHERE kind = ? AND key = ?", (now_s, kind, key))
        connection.execute(f"PRAGMA busy_timeout = {int(_BUSY_TIMEOUT_S * 1000)}")
    return None if row is None else row[0]


def _write_cached(connection: sqlite3.Connection, kind: str, key: str, value: bytes, now_s: float) -> None:
    with _transaction(connection):
        connection.execute("INSERT OR REPLACE INTO cache VALUES (?, ?, ?, ?)", (kind, key, now_s, value))
    with _transaction(connection):  # a separate one, so that others may write in between
        connection.execute(
            "DELETE FROM cache WHERE used_s < ? OR rowid IN (SELECT rowid FROM (SELECT rowid,"
            " SUM(LENGTH(value)) OVER (ORDER BY used_s DESC, rowid DESC) AS bytes FROM cache)"
            " WHERE bytes > ?)",
            (now_s - _MOST_UNUSED_S, _MOST_CACHED_BYTES),
        )


_EXPORT_SCHEMA = "tensoropt.profiles/1"


def _read_export(path: str | os.PathLike[str]) -> list[tuple[str, str, dict[str, Any]]]:
    path = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as stream:
            lines = stream.readlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MeasurementError(f"profiles cannot be read from '{path}' ({error})") from None
    if not lines:
        raise MeasurementError(f"'{path}' is empty, not a file of profiles; export it again")
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if number == 1:
                if entry["schema"] != _EXPORT_SCHEMA:
                    raise MeasurementError(
                        f"'{path}' has schema {entry['schema']!r}, not {_EXPORT_SCHEMA}; export it again"
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
    return entries


_logger = logging.getLogger(__name__)

KINDS = ("compute", "collective", "saved", "discovery", "calibration")
_CACHED = ("tables", "frontiers", "explorations", "captures")
"""The kinds of cached values; each value can be recomputed."""
_FAILURES = ("error", "failed", "lost")
"""The names of the record fields that hold the reason of a failed measurement."""

_KEYS_PER_QUERY = 900  # SQLite's historical limit of variables is 999

_Record = dict[str, Any]
_Result = TypeVar("_Result")


def default_path() -> Path:
    """Return ``$TENSOROPT_CACHE/profiles.sqlite``, or the same file in the user's cache directory."""
    override = os.environ.get("TENSOROPT_CACHE")
    if override:
        return Path(override).expanduser() / "profiles.sqlite"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tensoropt" / "profiles.sqlite"


@dataclass(frozen=True)
class RecordSample:
    """A sample of a store's records of one kind, of which the store has ``total``."""

    records: tuple[tuple[str, _Record], ...]
    total: int

    @property
    def words(self) -> str:
        """A note that says how many records were left out, or "" if none were."""
        drawn = len(self.records)
        return f"a fixed sample of {drawn:,} of {self.total:,} records" if drawn < self.total else ""


class ProfileStore:
    """A store of small JSON-compatible records by ``(kind, key)``, for many processes and threads, but not
    for forks of the process that opened it.

    Records (:data:`KINDS`) are never removed; cached values (:data:`_CACHED`) are removed when unused.

    Args:
        path: the file; by default :func:`default_path`. Missing folders are created.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path: Path | None = default_path() if path is None else Path(path)
        self._lock = threading.RLock()
        self._connection = self._open()

    @property
    def persistent(self) -> bool:
        """Whether records are in a file; otherwise they are in memory only."""
        return self.path is not None

    def get(self, key: str, kind: str = "compute") -> Any:
        """Return the record or cached value of a key, or None if the store has none."""
        if kind not in _CACHED:
            return self.get_many([key], kind).get(key)

        def read(connection: sqlite3.Connection) -> bytes | None:
            # Nothing that is cached is worth moving the measurements aside, or waiting for.
            with contextlib.suppress(sqlite3.DatabaseError):
                return _read_cached(connection, kind, key, time.time())
            return None

        content = self._do(read)
        # A damaged value is as good as none, and damage may surface as any error.
        with contextlib.suppress(Exception):
            return None if content is None else unpack(content)
        return None

    def get_many(self, keys: Iterable[str], kind: str = "compute") -> dict[str, _Record]:
        _check_kind(kind)
        wanted = list(dict.fromkeys(keys))

        def read(connection: sqlite3.Connection) -> dict[str, _Record]:
            records_read: dict[str, _Record] = {}
            for start in range(0, len(wanted), _KEYS_PER_QUERY):
                part = wanted[start : start + _KEYS_PER_QUERY]
                marks = ",".join("?" * len(part))
                rows = connection.execute(
                    f"SELECT key, record FROM profiles WHERE kind = ? AND key IN ({marks})", (kind, *part)
                )
                records_read.update((key, json.loads(record)) for key, record in rows)
            return records_read

        return self._do(read)

    def put_many(self, records: Mapping[str, Mapping[str, Any]], kind: str = "compute") -> None:
        """Save records in one transaction, replacing equal keys; MeasurementError if a record is not JSON."""
        _check_kind(kind)
        rows = [(kind, key, _dump(key, record)) for key, record in records.items()]
        if rows:
            self._do(lambda connection: _insert(connection, rows))

    def put(self, key: str, record: Mapping[str, Any], kind: str = "compute") -> None:
        """Save a record, or a cached value, which may have arrays and is discarded by a store in memory.

        Raises:
            TensorOptError: the value is not plain data, is too large, or cannot be written.
        """
        if kind not in _CACHED:
            return self.put_many({key: record}, kind)
        if not self.persistent:
            return None
        try:
            content = pack(record)
        except (TypeError, ValueError) as error:
            raise MeasurementError(f"the value of {key} is not plain data: {error}") from error
        if len(content) > _MOST_VALUE_BYTES:
            raise MeasurementError(f"a value of {len(content) >> 20} MiB is too large to be cached")

        def write(connection: sqlite3.Connection) -> None:
            # No reason to keep measurements, which are small, in memory only.
            try:
                _write_cached(connection, kind, key, content, time.time())
            except sqlite3.DatabaseError as error:  # a full disk, damage among what is cached
                raise MeasurementError(f"{self.path} cannot be written ({error})") from error

        return self._do(write)

    def forget_failed(self) -> int:
        """Remove the records of failed measurements, so that these are repeated; return their number."""

        def remove(connection: sqlite3.Connection) -> int:
            # The text search only narrows: a record may contain the word elsewhere, so each is parsed before
            # it is deleted.
            like = " OR ".join("instr(record, ?)" for _ in _FAILURES)
            with _transaction(connection):
                rows = connection.execute(
                    f"SELECT kind, key, record FROM profiles WHERE {like}",
                    [f'"{name}"' for name in _FAILURES],
                )
                failed = [(kind, key) for kind, key, text in rows if set(_FAILURES) & json.loads(text).keys()]
                connection.executemany("DELETE FROM profiles WHERE kind = ? AND key = ?", failed)
            return len(failed)

        return self._do(remove)

    def items(self, kind: str = "compute") -> Iterator[tuple[str, _Record]]:
        """Yield ``(key, record)`` pairs of a kind, in key order."""
        _check_kind(kind)
        query = "SELECT key, record FROM profiles WHERE kind = ? ORDER BY key"
        for key, record in self._do(lambda connection: connection.execute(query, [kind]).fetchall()):
            yield key, json.loads(record)

    def sample(self, most: int, kind: str = "compute") -> RecordSample:
        """Return at most ``most`` records of a kind, always the same of equal stores: those with the least
        hashes at the end of their keys."""
        query = "SELECT key, record FROM profiles WHERE kind = ? ORDER BY substr(key, -32) LIMIT ?"
        rows = self._do(lambda connection: connection.execute(query, (kind, most)).fetchall())
        records = sorted((key, json.loads(record)) for key, record in rows)
        return RecordSample(tuple(records), self.count(kind))

    def count(self, kind: str | None = None) -> int:
        where, values = ("", ()) if kind is None else (" WHERE kind = ?", (kind,))
        query = f"SELECT COUNT(*) FROM profiles{where}"
        return self._do(lambda connection: connection.execute(query, values).fetchone()[0])

    def digest(self) -> str:
        """Return a hash of all records, except those of kind ``saved``, which can be computed again."""
        digest = hashlib.sha256()

        def read(connection: sqlite3.Connection) -> None:
            query = "SELECT kind, key, record FROM profiles WHERE kind != 'saved' ORDER BY kind, key"
            for row in connection.execute(query):
                digest.update("\0".join(map(str, row)).encode())

        self._do(read)
        return digest.hexdigest()

    def export_file(self, path: str | os.PathLike[str]) -> int:
        """Write all records to a file of JSON lines; return the number of records."""
        written = 0
        with written_whole(path) as temporary, open(temporary, "w", encoding="utf-8") as stream:
            stream.write(json.dumps({"schema": _EXPORT_SCHEMA}) + "\n")
            for kind, key, record in ((each, *item) for each in KINDS for item in self.items(each)):
                stream.write(json.dumps({"kind": kind, "key": key, "record": record}) + "\n")
                written += 1
        return written

    def import_file(self, path: str | os.PathLike[str]) -> int:
        """Add the records of an exported file, replacing equal keys; return the number of records.

        Raises:
            MeasurementError: the file is missing, or is not an export. Nothing is imported then.
        """
        rows = []
        for kind, key, record in _read_export(path):
            _check_kind(kind)
            rows.append((kind, key, _dump(key, record)))
        self._do(lambda connection: _insert(connection, rows))
        return len(rows)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def __enter__(self) -> ProfileStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ProfileStore({str(self.path) if self.path else 'in memory'})"

    def _open(self) -> sqlite3.Connection:
        if self.path is None:
            return connect(None)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return connect(self.path)
        except _NotOursError as error:
            reason = str(error)
        except sqlite3.DatabaseError as error:
            if _cannot_write(error):
                return self._fall_back(str(error))
            # A lock is not damage: the file stays where it is.
            if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                return self._fall_back(f"{error}: another process has been writing for {_BUSY_TIMEOUT_S:g} s")
            reason = str(error)
        except OSError as error:
            return self._fall_back(error.strerror or str(error))
        return self._replace(reason)

    def _replace(self, reason: str) -> sqlite3.Connection:
        """Rename the store's file and begin a new one; return the connection."""
        assert self.path is not None
        aside = self.path.with_name(f"{self.path.name}.aside-{time.time_ns()}")
        try:
            # The log first: SQLite could take the old log for that of the new file.
            for ending in ("-wal", "-shm", ""):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(f"{self.path}{ending}", f"{aside}{ending}")
            connection = connect(self.path)
        except (OSError, sqlite3.DatabaseError, _NotOursError) as error:
            return self._fall_back(f"{reason}; it could not be moved aside either: {error}")
        _logger.warning(
            "The profile store %s could not be used (%s). It was moved to %s, and a new one was begun: "
            "measurements are made again where they are needed.",
            self.path,
            reason,
            aside,
        )
        return connection

    def _fall_back(self, reason: str) -> sqlite3.Connection:
        """Continue with an empty store in memory; return the connection."""
        _logger.warning(
            "The profile store %s cannot be written (%s). Measurements are kept in memory instead, "
            "and lost at the end of the process. Set TENSOROPT_CACHE to a folder that can be written.",
            self.path,
            reason,
        )
        self.path = None
        return connect(None)

    def _do(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """Run one action; if the file is corrupt, replace it, if it is read-only, use memory, then retry."""
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
                if not corrupt and not _cannot_write(error):
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
