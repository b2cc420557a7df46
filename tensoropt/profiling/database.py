"""The SQLite file of the profile store: opening it, recognising it as ours, reading and writing its rows.

Write-ahead logging lets many processes read while one writes.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from itertools import product
from pathlib import Path

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 30.0
"""How long a process waits for another one's transaction; a transaction takes milliseconds, so this is an
assumption on the safe side."""
MOST_CACHED_BYTES = 2 << 30
"""The most bytes of values that can be computed again; an assumption."""
MOST_UNUSED_S = 90 * 86400.0
"""A value that was not used for so long is removed; an assumption."""
USED_WITHIN_S = 3600.0
"""How exactly it is known when a value was used."""
_LOG_BYTES = 64 << 20
_APPLICATION_ID = 0x54_4F_50_54  # "TOPT": distinguishes our file from other SQLite files


class NotOursError(Exception):
    """Raised for a file of another version, or of another program."""


def cannot_write(error: sqlite3.DatabaseError) -> bool:
    """Whether an error means that the file cannot be written, whatever it contains."""
    # SQLite has codes for these errors, but one code (SQLITE_CANTOPEN, SQLITE_IOERR) stands for many causes.
    text = str(error)
    return any(
        part in text for part in ("readonly", "read-only", "unable to open", "disk is full", "disk I/O")
    )


def connect(path: Path | None) -> sqlite3.Connection:
    """Open a store, creating it if there is none; None: in memory.

    Raises:
        NotOursError: the file is of another version, or of another program.
        sqlite3.DatabaseError: it cannot be read or written.
    """
    # Without an isolation level, sqlite3 begins no transactions by itself; only :func:`transaction` does. The
    # store's own lock serialises threads, so sqlite3's thread check is not needed.
    connection = sqlite3.connect(
        path or ":memory:", timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    connection.create_function("last_part", 1, lambda key: key.rpartition("/")[2], deterministic=True)
    try:
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def readable_rows(path: Path) -> list[tuple[str, str, str]]:
    """The kind, key and record of all rows that can be read in a store that cannot be used."""
    records: dict[tuple[str, str], str] = {}
    # "immutable" needs neither locks nor the -shm file, which a read-only file system cannot provide, but
    # does not see what is still in the log.
    modes = ("ro", "ro&immutable=1") if Path(f"{path}-wal").exists() else ("ro&immutable=1",)
    # Damage ends a reading; one from the other end sees what lies behind it.
    for mode, order in product(modes, ("", "DESC")):
        uri = f"{path.absolute().as_uri()}?mode={mode}"
        query = f"SELECT kind, key, record FROM profiles ORDER BY kind {order}, key {order}"
        with contextlib.suppress(sqlite3.Error, NotOursError, ValueError):
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
                _check_owner(connection)
                for kind, key, record in connection.execute(query):
                    json.loads(record)
                    records[kind, key] = record
            break
    return [(*key, record) for key, record in records.items()]


def _prepare(connection: sqlite3.Connection) -> None:
    """Check that the file is ours, then create the tables; several processes may do so at once."""
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
    with transaction(connection):
        # Checked once more under the writer's lock: another process may have created the file in the
        # meantime.
        _check_owner(connection)
        connection.execute("CREATE TABLE IF NOT EXISTS schema (version INTEGER NOT NULL)")
        if not connection.execute("SELECT COUNT(*) FROM schema").fetchone()[0]:
            connection.execute("INSERT INTO schema VALUES (?)", (SCHEMA_VERSION,))
        connection.execute(
            "CREATE TABLE IF NOT EXISTS profiles (kind TEXT NOT NULL, key TEXT NOT NULL,"
            " record TEXT NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID"
        )
        # A table of its own, as files from before it have only the other: versions of before can use both.
        connection.execute(
            "CREATE TABLE IF NOT EXISTS cache (kind TEXT NOT NULL, key TEXT NOT NULL, used_s REAL NOT NULL,"
            " value BLOB NOT NULL, PRIMARY KEY (kind, key))"
        )
        # In one transaction with the tables, so that a file with our id has them.
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")


def _check_owner(connection: sqlite3.Connection) -> bool:
    """Whether the file has all tables."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    # An empty file, whether newly created or left by an interruption, may be used.
    if not tables:
        return False
    if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
        raise NotOursError("it is a database of something else")
    row = connection.execute("SELECT version FROM schema").fetchone() if "schema" in tables else None
    if row is None or row[0] != SCHEMA_VERSION:
        raise NotOursError(f"it has schema version {row and row[0]}, not {SCHEMA_VERSION}")
    if "profiles" not in tables:
        raise NotOursError("its table of profiles is missing")
    return "cache" in tables


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Save everything that is done inside, or nothing of it."""
    connection.execute("BEGIN IMMEDIATE")  # takes the writer's lock at once, so that waiting works
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def insert(connection: sqlite3.Connection, rows: list[tuple[str, str, str]]) -> None:
    """Save rows of kind, key and record in one transaction, replacing those with the same keys."""
    with transaction(connection):
        connection.executemany("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?)", rows)


def page(
    connection: sqlite3.Connection, kind: str, prefix: str, last: str | None, most: int
) -> list[tuple[str, str]]:
    """Up to ``most`` keys with their records, in key order: those with the prefix that come after
    ``last``."""
    # Pages by key instead of an open cursor: a reader never blocks the writer's checkpoints.
    conditions, values = ["kind = ?"], [kind]
    if last is not None:
        conditions, values = [*conditions, "key > ?"], [*values, last]
    if prefix:
        # A range of keys uses the primary key's index, which LIKE would use only with case-sensitive
        # collation.
        following = prefix[:-1] + chr(ord(prefix[-1]) + 1)  # the first key after all those with the prefix
        conditions, values = [*conditions, "key >= ?", "key < ?"], [*values, prefix, following]
    rows = connection.execute(
        f"SELECT key, record FROM profiles WHERE {' AND '.join(conditions)} ORDER BY key LIMIT ?",
        (*values, most),
    )
    return rows.fetchall()


def read_cached(connection: sqlite3.Connection, kind: str, key: str, now_s: float) -> bytes | None:
    """The value of a key, which counts as used now; None if there is none."""
    row = connection.execute(
        "SELECT value, used_s FROM cache WHERE kind = ? AND key = ?", (kind, key)
    ).fetchone()
    # Not at every use, as SQLite writes the whole row; and whether it can be written decides nothing here.
    if row is not None and row[1] < now_s - USED_WITHIN_S:
        with contextlib.suppress(sqlite3.OperationalError):
            connection.execute("UPDATE cache SET used_s = ? WHERE kind = ? AND key = ?", (now_s, kind, key))
    return None if row is None else row[0]


def write_cached(connection: sqlite3.Connection, kind: str, key: str, value: bytes, now_s: float) -> None:
    """Save a value, and remove what is more than may be cached: what was unused for longest."""
    with transaction(connection):
        connection.execute("INSERT OR REPLACE INTO cache VALUES (?, ?, ?, ?)", (kind, key, now_s, value))
        connection.execute(
            "DELETE FROM cache WHERE used_s < ? OR rowid IN (SELECT rowid FROM (SELECT rowid,"
            " SUM(LENGTH(value)) OVER (ORDER BY used_s DESC, rowid DESC) AS bytes FROM cache)"
            " WHERE bytes > ?)",
            (now_s - MOST_UNUSED_S, MOST_CACHED_BYTES),
        )


def cached_keys(connection: sqlite3.Connection, kind: str, prefix: str) -> list[str]:
    """The keys of a kind that begin with a prefix."""
    query = "SELECT key FROM cache WHERE kind = ? AND substr(key, 1, ?) = ?"
    return [key for (key,) in connection.execute(query, (kind, len(prefix), prefix))]
