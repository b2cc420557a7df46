"""What is written is the old or the new, whole: killed anywhere, on a full disk, in a folder without rights,
with two writers, and with a clock that goes back."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from tensoropt.errors import TensorOptError
from tensoropt.execute import load_checkpoint, save_checkpoint
from tensoropt.exploration.exploration import load_exploration
from tensoropt.exploration.export import write_frontier_csv
from tensoropt.plan.plan import load_plan
from tensoropt.profiling.store import ProfileStore
from tests.app.support.samples_app import GIB, exploration, of_model, point, space
from tests.execute.test_parallel import unsplit_mlp
from tests.plan.explorations import small_exploration

RECORDS = [f"key {number}" for number in range(200)]
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "shutil.rmtree", "fcntl.flock"}
"""What Python reports of a process that changes files (`sys.addaudithook`), beside opening them to write."""


class Writer(NamedTuple):
    """Writes content 1 or 2 into a folder; reads which is there, 0 for none, and that it is one."""

    write: Callable[[Path, int], Any]
    read: Callable[[Path], int]


def write_store(folder: Path, which: int) -> None:
    with closing(ProfileStore(folder / "profiles.sqlite")) as store:
        store.put_many({key: {"which": which, "filler": "x" * 100} for key in RECORDS})


def read_store(folder: Path) -> int:
    with closing(ProfileStore(folder / "profiles.sqlite")) as store:
        found = [record["which"] for record in store.get_many(RECORDS).values()]
    return one_of(found, len(RECORDS)) if found else 0


def explored(which: int) -> Any:
    """As many points, of other times, strategies, meshes and models."""
    points = [
        point((i + 1) * 10 * GIB, 0.8 - 0.1 * i + which, choice=(which - 1, *(0,) * 3)) for i in range(8)
    ]
    return of_model(exploration(points, [space(micro_batches=which)]), parameters=which)


def read_exploration(folder: Path, others: Sequence[int] = ()) -> int:
    if not (folder / "out").is_dir():
        return 0
    if refused(lambda: load_exploration(folder / "out"), "holds no exploration"):
        return 0
    found = load_exploration(folder / "out")
    of_points = [n for p in found.points for n in (p.choice[0] + 1, int(p.time_s - 0.05))]
    seen = [*of_points, found.spaces[0].micro_batches, found.model.parameters, *others]
    return one_of(seen, 2 * 8 + 2 + len(others))


def read_folder(folder: Path) -> int:
    """What an exploration's folder holds, with the file that no function reads."""
    which = read_exploration(folder)
    return read_exploration(folder, [read_csv(folder / "out")]) if which else 0


def read_csv(folder: Path) -> int:
    if not (folder / "frontier.csv").exists():
        return 0
    header, *rows = [line.split(",") for line in (folder / "frontier.csv").read_text().splitlines()]
    return one_of([int(float(row[header.index("time_s")]) - 0.05) for row in rows], 8)


def write_plan(folder: Path, which: int) -> None:
    plan = small_exploration().plan(0).model_copy(update={"versions": {"which": str(which)}})
    plan.save(folder / "plan.json")


def read_plan(folder: Path) -> int:
    file = folder / "plan.json"
    return int(load_plan(file).versions["which"]) if file.exists() else 0


@cache
def model() -> torch.nn.Module:
    return unsplit_mlp()


def write_checkpoint(folder: Path, which: int) -> None:
    kept = model()
    with torch.no_grad():
        for parameter in kept.parameters():
            parameter.fill_(which)
    save_checkpoint(folder / "state", kept)


def read_checkpoint(folder: Path) -> int:
    if refused(lambda: load_checkpoint(folder / "state", model()), "no checkpoint"):
        return 0
    values = [int(value) for p in model().parameters() for value in p.detach().reshape(-1)[:3]]
    return one_of(values, len(values))


def refused(read: Callable[[], Any], words: str) -> bool:
    try:
        read()
    except TensorOptError as error:
        if words not in str(error):
            raise
        return True
    return False


def one_of(found: list[int], count: int) -> int:
    assert len(found) == count
    assert len(set(found)) == 1, "two contents in one"
    return found[0]


WRITERS = {
    "store": Writer(write_store, read_store),
    "exploration": Writer(lambda folder, which: explored(which).save(folder / "out"), read_folder),
    "plan": Writer(write_plan, read_plan),
    "checkpoint": Writer(write_checkpoint, read_checkpoint),
    "export": Writer(
        lambda folder, which: write_frontier_csv(explored(which), folder / "frontier.csv"), read_csv
    ),
}
every_writer = pytest.mark.parametrize("name", WRITERS)


def child(work: Callable[[], Any]) -> int:
    """How a process ended that did this: 0 done, 1 refused in words, 2 otherwise, -9 killed."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 2
    try:
        work()
        code = 0
    except TensorOptError:
        code = 1
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def killed_at(number: int, work: Callable[[], Any]) -> Callable[[], None]:
    """The work in a process that dies before its change of files of this number, from 0."""
    left = [number]

    def change() -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    class Connection(sqlite3.Connection):
        def execute(self, *args: Any) -> sqlite3.Cursor:
            change()
            return super().execute(*args)

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and values[2] & (os.O_WRONLY | os.O_RDWR)):
            change()

    def run() -> None:
        sys.addaudithook(hook)
        connect = sqlite3.connect
        with mock.patch("sqlite3.connect", lambda *args, **more: connect(*args, factory=Connection, **more)):
            work()

    return run


@every_writer
@pytest.mark.parametrize("before", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_killed_anywhere(name: str, before: int, tmp_path: Path) -> None:
    """Before each of its changes of files, over nothing and over an older content."""
    writer, seen, number = WRITERS[name], list[int](), 0
    while True:
        folder = tmp_path / str(number)
        folder.mkdir()
        if before:
            writer.write(folder, before)
        ended = child(killed_at(number, lambda folder=folder: writer.write(folder, 2)))
        seen.append(writer.read(folder))
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        number += 1
    assert set(seen) <= {before, 2}
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (before, 2)


@every_writer
@pytest.mark.parametrize("most_bytes", [0, 100, 2000])
def test_a_full_disk(name: str, most_bytes: int, tmp_path: Path) -> None:
    writer = WRITERS[name]
    writer.write(tmp_path, 1)

    def write() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that may not grow is an error of writing
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        writer.write(tmp_path, 2)

    ended = child(write)
    # A store goes on in memory, and a small file may fit.
    assert (ended, writer.read(tmp_path)) in ((0, 1), (0, 2), (1, 1))


@every_writer
def test_a_folder_without_rights(name: str, tmp_path: Path) -> None:
    writer, folder = WRITERS[name], tmp_path / "kept"
    folder.mkdir()
    writer.write(folder, 1)
    for path in (*tmp_path.parents, tmp_path):
        if os.stat(path).st_uid == os.getuid() and path.name.startswith("pytest-"):
            path.chmod(0o755)
    inside = [folder, *folder.rglob("*")]
    for path in inside:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def write() -> None:
        if not os.getuid():
            os.setuid(65534)  # root has rights everywhere
        writer.write(folder, 2)

    assert child(write) == (0 if name == "store" else 1)
    for path in inside:
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert writer.read(folder) == 1


@pytest.mark.parametrize("name", ["store", "exploration", "plan", "export"])
def test_two_writers_of_one_folder(name: str, tmp_path: Path) -> None:
    """Whoever reads meanwhile finds the whole content of one of them."""
    writer = WRITERS[name]
    writer.write(tmp_path, 1)
    writers = []
    for which in (1, 2):
        if not (pid := os.fork()):
            try:
                for _ in range(20):
                    writer.write(tmp_path, which)
            finally:
                os._exit(0)
        writers.append(pid)
    seen = set()
    while writers:
        # One reading, which locks the folder.
        seen.add(read_exploration(tmp_path) if name == "exploration" else writer.read(tmp_path))
        writers = [pid for pid in writers if os.waitpid(pid, os.WNOHANG)[0] == 0]
    assert seen <= {1, 2}


def test_a_clock_that_goes_back(tmp_path: Path) -> None:
    """Nothing is forgotten, and what is kept is found."""
    value = {"table": [1.0, 2.0]}
    with closing(ProfileStore(tmp_path / "profiles.sqlite")) as store:
        store.put("a", value, kind="tables")
        a_year_ago = time.time() - 365 * 86_400
        with mock.patch("time.time", return_value=a_year_ago):
            store.put("b", value, kind="tables")
            assert store.get("a", kind="tables") == store.get("b", kind="tables") == value
    with closing(ProfileStore(tmp_path / "profiles.sqlite")) as store:
        assert store.get("a", kind="tables") == value


@pytest.mark.parametrize("left", [0, 200])
def test_a_damaged_checkpoint_is_refused(left: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    for file in (tmp_path / "state").glob("*.distcp"):
        os.truncate(file, left)
    with pytest.raises(TensorOptError, match="cannot read the checkpoint"):
        load_checkpoint(tmp_path / "state", model())


@pytest.mark.parametrize(
    "names", ['{"../secret": "frontier.csv"}', '{".kept": "../secret"}', "[1]", "{", '{"a": 1}']
)
def test_a_journal_from_elsewhere_moves_nothing_outside(names: str, tmp_path: Path) -> None:
    explored(1).save(tmp_path / "out")
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "out" / ".x.renames").write_text(names)
    assert load_exploration(tmp_path / "out").points
    assert (tmp_path / "secret").read_text() == "mine"


def test_a_folder_where_a_file_belongs_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "out" / "frontier.csv").mkdir(parents=True)
    with pytest.raises(TensorOptError, match="nothing was changed"):
        explored(2).save(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["frontier.csv"]
