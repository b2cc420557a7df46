"""The profile store: what goes in comes out, and nothing that can happen to the file is a crash."""

from __future__ import annotations

import gzip
import hashlib
import logging
import pickle
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.errors import MeasurementError
from tensoropt.profiling.store import _MOST_UNUSED_S, _USED_WITHIN_S, KINDS, ProfileStore, default_path

RECORD = {"forward_s": 1e-3, "backward_s": 2.5e-3, "spread": 0.02, "repeats": 7}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "profiles.sqlite"


def cached(store: ProfileStore, kind: str, prefix: str) -> list[str]:
    """The keys of what is cached."""
    rows = store._connection.execute("SELECT key FROM cache WHERE kind = ?", (kind,))
    return [key for (key,) in rows if key.startswith(prefix)]


def test_records_survive_closing(path):
    with ProfileStore(path) as store:
        assert store.persistent
        store.put_many({"linear|8x8": RECORD, "conv": {"failed": "out of memory"}})
        store.put("all_reduce", {"alpha": 1e-5}, kind="collective")
    with ProfileStore(path) as store:
        assert store.get("linear|8x8") == RECORD
        assert store.get("linear|8x8", kind="saved") is None
        assert store.get_many(["conv", "nothing", "conv"]) == {"conv": {"failed": "out of memory"}}
        assert (store.count(), store.count("collective"), store.count("saved")) == (3, 1, 0)
        store.put("conv", {"forward_s": 1.0})
        assert store.get("conv") == {"forward_s": 1.0}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    data=st.dictionaries(texts, st.dictionaries(texts, json_values, max_size=3), max_size=8),
    kind=st.sampled_from(KINDS),
)
def test_behaves_like_a_dictionary_and_survives_export(tmp_path, data, kind):
    for name in ("a.sqlite", "a.sqlite-wal", "a.sqlite-shm", "b.sqlite", "b.sqlite-wal", "b.sqlite-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    with ProfileStore(tmp_path / "a.sqlite") as store, ProfileStore(tmp_path / "b.sqlite") as other:
        store.put_many(data, kind)
        assert store.get_many(data, kind) == data
        assert store.export_file(tmp_path / "x.jsonl") == len(data)
        assert other.import_file(tmp_path / "x.jsonl") == len(data)
        assert dict(other.items(kind)) == data


WRITER = """
import sys
import numpy as np
from tensoropt.profiling.store import ProfileStore
store = ProfileStore(sys.argv[1])
for i in range(100000):
    store.put(f"{sys.argv[2]}-{i % 50}", {"i": i, "array": i % 7 * np.arange(10**5)}, "tables")
    store.put_many({f"{sys.argv[2]}-{i}-{j}": {"i": i} for j in range(10)})
    print(i, flush=True)
"""


def test_two_writers_of_large_values_and_a_kill_lose_nothing_saved(path):
    """Whichever of the two is killed, in the middle of whatever it does."""
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], stdout=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    last = [int([process.stdout.readline() for _ in range(5)][-1]) for process in writers]
    writers[0].kill()
    writers[0].wait()
    for _ in range(5):  # the other goes on
        last[1] = int(writers[1].stdout.readline())
    with ProfileStore(path) as store:
        store.put("from here", {"yes": True})
    writers[1].kill()
    writers[1].wait()
    with ProfileStore(path) as store:
        assert store._connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert store.get("from here") == {"yes": True}
        for name, process, saved in zip("ab", writers, last, strict=True):
            process.stdout.close()
            found = {key for key, _ in store.items() if key.startswith(f"{name}-")}
            assert found >= {f"{name}-{i}-{j}" for i in range(saved + 1) for j in range(10)}
            assert len(found) % 10 == 0  # whole batches only
            for key in cached(store, "tables", name):
                value = store.get(key, "tables")
                assert (value["array"] == value["i"] % 7 * np.arange(10**5)).all()
    assert not list(path.parent.glob("*.aside-*"))


def test_cached_values_come_back_as_they_were(path):
    columns = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    value = {
        "text": "a",
        "numbers": (1, 2.5, np.inf, None, True),
        "none": np.zeros((0, 3)),
        "columns": columns,
    }
    with ProfileStore(path) as store:
        digest = store.digest()
        store.put("key", value, "frontiers")
        assert (store.digest(), store.count()) == (digest, 0)  # it is no measurement
    with ProfileStore(path) as store:
        found = store.get("key", "frontiers")
        assert store.get("other", "frontiers") is None
        assert (cached(store, "frontiers", "k"), cached(store, "frontiers", "o")) == (["key"], [])
    assert (found["text"], found["numbers"]) == ("a", [1, 2.5, np.inf, None, True])
    assert found["none"].shape == (0, 3)
    assert (found["columns"] == columns).all()
    assert found["columns"].flags.f_contiguous
    assert found["columns"].flags.writeable
    assert found["columns"].flags.aligned


def test_what_was_unused_for_longest_is_removed(path, monkeypatch):
    clock = [1e9]
    monkeypatch.setattr("tensoropt.profiling.store.time.time", lambda: clock[0])
    large = {"array": np.random.default_rng(0).random(10**4)}
    monkeypatch.setattr("tensoropt.profiling.store._MOST_CACHED_BYTES", 250_000)
    with ProfileStore(path) as store:
        for name in "abcd":
            store.put(name, large, "tables" if name == "c" else "frontiers")
            store.put(name, RECORD)
            clock[0] += 2 * _USED_WITHIN_S
            store.get("a", "frontiers")
        assert (cached(store, "frontiers", ""), cached(store, "tables", "")) == (["a", "d"], ["c"])
        clock[0] += _MOST_UNUSED_S
        store.get("a", "frontiers")
        store.put("e", {}, "tables")
        assert (cached(store, "frontiers", ""), cached(store, "tables", "")) == (["a"], ["e"])
        assert store.count() == 4


def test_a_value_that_does_not_fit_leaves_all_as_it_is(path, monkeypatch):
    with ProfileStore(path) as store:
        store.put("a", RECORD)
        store.put("small", {"x": 1}, "tables")
        store._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1000)
        with pytest.raises(MeasurementError, match=r"cannot be written .*too big"):
            store.put("large", {"array": np.random.default_rng(0).random(10**4)}, "tables")
        with pytest.raises(MeasurementError, match="set is not an array"):
            store.put("small", {"x": {1}}, "tables")
        monkeypatch.setattr("tensoropt.profiling.store._MOST_VALUE_BYTES", 10)
        with pytest.raises(MeasurementError, match="too large to be cached"):
            store.put("small", {"x": 2}, "tables")
        assert (store.get("a"), store.get("small", "tables")) == (RECORD, {"x": 1})
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_store_of_an_earlier_version_is_used_as_it_is(path, caplog):
    """It has no table of cached values."""
    with ProfileStore(path) as store:
        store.put_many({"a": RECORD, "b": RECORD})
        store._connection.execute("DROP TABLE cache")
    with caplog.at_level(logging.WARNING), ProfileStore(path) as store:
        assert store.get_many(["a", "b"]) == {"a": RECORD, "b": RECORD}
        store.put("a", {"x": 1}, "tables")
        assert store.get("a", "tables") == {"x": 1}
    assert not caplog.text


class Hostile:
    """Would write a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "content",
    [
        lambda path: pickle.dumps(Hostile(path)),
        lambda path: gzip.compress(pickle.dumps(Hostile(path))),
        lambda path: b"",
        lambda path: gzip.compress(b" " * 2**24)[:2000],
        lambda path: gzip.compress(
            (64).to_bytes(8, "big") + b'{"ndarray":["O",[1],"C",0]}'.ljust(64) + pickle.dumps(Hostile(path))
        ),
        lambda path: gzip.compress((64).to_bytes(8, "big") + b'{"ndarray":["f8",[1000],"C",0]}'.ljust(64)),
        lambda path: gzip.compress((40000).to_bytes(8, "big") + b"[" * 40000),
    ],
)
def test_values_that_somebody_else_wrote_run_nothing(path, content):
    run = path.parent / "run"
    with ProfileStore(path) as store:
        store.put("key", {}, "tables")
        store._connection.execute("UPDATE cache SET value = ?", (content(run),))
        assert store.get("key", "tables") is None
    assert not run.exists()


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("", "file is not a database"),
        ("UPDATE schema SET version = 99", "version 99"),
        ("PRAGMA application_id = 5", "another program's database"),
    ],
    ids=["corrupt", "another version", "another program's"],
)
def test_what_is_no_store_of_ours_is_moved_aside(path, caplog, statement, reason):
    with ProfileStore(path) as store:
        store.put("a", RECORD)
    if statement:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute(statement)
        connection.close()
    else:
        path.write_bytes(b"this is no database" * 100)
    before = path.read_bytes()
    with caplog.at_level(logging.WARNING), ProfileStore(path) as store:
        assert store.get("a") is None
        store.put("a", RECORD)
        assert store.get("a") == RECORD
        assert store.persistent
    assert "moved to" in caplog.text
    assert reason in caplog.text
    assert [file.read_bytes() for file in path.parent.glob("*.aside-*")] == [before]


def test_a_folder_that_cannot_be_written_means_memory(path, caplog):
    path.parent.parent.joinpath("cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING), ProfileStore(path) as store:
        assert not store.persistent
        store.put("a", RECORD)
        assert store.get("a") == RECORD
    assert "TENSOROPT_CACHE" in caplog.text


@pytest.mark.parametrize("when", ["opening", "writing"])
def test_a_read_only_file_means_memory(path, caplog, monkeypatch, when):
    with ProfileStore(path) as store:
        store.put("old", RECORD)
    # Root may write anything, so the read-only file system is played.
    if when == "opening":
        from tensoropt.profiling import store as module

        connect = module.connect

        def refuse(target):
            if target is not None:
                raise sqlite3.OperationalError("attempt to write a readonly database")
            return connect(target)

        monkeypatch.setattr(module, "connect", refuse)
    with caplog.at_level(logging.WARNING), ProfileStore(path) as store:
        if when == "writing":
            store._connection.execute("PRAGMA query_only = ON")
        store.put("new", RECORD)
        assert not store.persistent
        assert store.get_many(["old", "new"]) == {"new": RECORD}
    assert "cannot be written" in caplog.text


def test_bad_records_and_kinds_are_refused(path):
    with ProfileStore(path) as store:
        store.put("good", RECORD)
        for record in ({"x": float("nan")}, {"x": object()}):
            with pytest.raises(MeasurementError, match="not JSON"):
                store.put_many({"fine": RECORD, "bad": record})
        with pytest.raises(MeasurementError, match="valid: compute"):
            store.get("a", kind="colective")
        assert store.count() == 1


@pytest.mark.parametrize(
    "text", ["", "not json\n", '{"schema": "other/3"}\n', '{"schema": "tensoropt.profiles/1"}\n{"kind": 1}\n']
)
def test_bad_imports_change_nothing(path, tmp_path, text):
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    with ProfileStore(path) as store:
        with pytest.raises(MeasurementError, match=r"x\.jsonl"):
            store.import_file(file)
        with pytest.raises(MeasurementError, match="cannot be read"):
            store.import_file(tmp_path / "missing")
        assert store.count() == 0


def test_only_what_failed_is_forgotten(path):
    with ProfileStore(path) as store:
        store.put_many({"good": RECORD, "bad": {"error": "out of memory"}, "named": {"class": "error"}})
        store.put("links", {"failed": "it hung"}, "collective")
        store.put("operator", {"lost": "it died"}, "discovery")
        store.put("splits", {"splits": [], "linear": True}, "discovery")
        assert store.forget_failed() == 3
        assert [key for kind in KINDS for key, _ in store.items(kind)] == ["good", "named", "splits"]
        assert store.forget_failed() == 0


def test_a_sample_is_fixed_and_says_so(path):
    """A tenth of what is there, of every prefix alike, and the same whatever the order it came in."""
    keys = [
        f"{p}/{hashlib.sha256(f'{p}{i}'.encode()).hexdigest()[:32]}"
        for p in ("cpu/a", "gpu/b")
        for i in range(1000)
    ]
    with ProfileStore(path) as store:
        store.put_many(dict.fromkeys(reversed(keys), RECORD))
        drawn = store.sample(200)
        found = [key for key, _ in drawn.records]
        assert found == sorted(sorted(keys, key=lambda key: key.rpartition("/")[2])[:200])
        assert {key[:5] for key in found} == {"cpu/a", "gpu/b"}
        assert drawn.words == "a fixed sample of 200 of 2,000 records"
        assert (len(store.sample(5000).records), store.sample(5000).words) == (2000, "")


def test_the_default_place_can_be_set(monkeypatch, tmp_path):
    monkeypatch.setenv("TENSOROPT_CACHE", str(tmp_path))
    assert default_path() == tmp_path / "profiles.sqlite"
    monkeypatch.delenv("TENSOROPT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    if sys.platform != "darwin":
        assert default_path() == tmp_path / "x" / "tensoropt" / "profiles.sqlite"


def _damaged(path: Path) -> None:
    """Break the pages of what is cached, and nothing else."""
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        root, size = (
            connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'cache'").fetchone()[0],
            connection.execute("PRAGMA page_size").fetchone()[0],
        )
    connection.close()
    with open(path, "r+b") as file:
        file.seek((root - 1) * size)
        file.write(b"\xff" * size)


def test_damage_among_what_is_cached_costs_no_measurement(path):
    with ProfileStore(path) as store:
        store.put("measured", {"seconds": 1.0})
        store.put("computed", {"a": np.ones(3)}, "tables")
    _damaged(path)
    with ProfileStore(path) as store:
        assert store.get("computed", "tables") is None
        with pytest.raises(MeasurementError, match="cannot be written"):
            store.put("computed", {"a": np.ones(3)}, "tables")
        assert store.get("measured") == {"seconds": 1.0}
        store.put("another", {"seconds": 2.0})
    assert not list(path.parent.glob("*.aside-*"))
    with ProfileStore(path) as store:
        assert store.get("another") == {"seconds": 2.0}
