"""Saved explorations: whole, comparable, and every point can still become a plan."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.plan import Exploration, load_exploration
from tensoropt.plan.export import write_frontier_csv, write_strategies_csv
from tensoropt.plan.figures import FIXED as FIXED_FIGURES
from tensoropt.plan.point import reduce_points
from tests.plan.explorations import MIB, small_exploration

FIXED = "point,memory_bytes,time_s,devices,mesh,micro_batches,compute_s,communication_s,exact,gap,planner"


@pytest.fixture
def found() -> Exploration:
    return small_exploration()


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_saved_and_loaded_explorations_make_the_same_plans(found: Exploration, tmp_path: Path) -> None:
    found.save(tmp_path)
    loaded = load_exploration(tmp_path)
    assert loaded.points == found.points
    assert loaded.model == found.model
    for i in range(len(found.points)):
        assert loaded.plan(i) == found.plan(i)


def test_saving_twice_gives_the_same_bytes(found: Exploration, tmp_path: Path) -> None:
    for name in ("a", "b"):
        found.save(tmp_path / name)
    for name in ("exploration.json", "strategies.json.gz", "frontier.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("memory", "expected"), [(10 * MIB, 0), (11 * MIB, 0), (12 * MIB, 1), (39 * MIB, 2), (1e12, 3)]
)
def test_the_fastest_within_a_budget(found: Exploration, memory: float, expected: int) -> None:
    assert found.index(memory_bytes=memory) == expected


@pytest.mark.parametrize(("time_s", "expected"), [(0.14, 3), (0.149, 3), (0.15, 2), (0.2, 1), (9.0, 0)])
def test_the_leanest_within_a_time(found: Exploration, time_s: float, expected: int) -> None:
    assert found.index(time_s=time_s) == expected


def test_the_knee_and_the_default(found: Exploration) -> None:
    assert found.index(knee_point=True) == 1
    assert found.choose() == found.plan(3)


def test_what_would_fit_is_named(found: Exploration) -> None:
    with pytest.raises(InfeasibleError, match=r"no plan fits 1 MiB; the smallest plan needs 10 MiB"):
        found.choose(memory_bytes=MIB)
    with pytest.raises(InfeasibleError, match=r"the fastest takes 140 ms"):
        found.choose(time_s=0.001)


def test_the_csv_has_its_fixed_columns_and_falls_strictly(found: Exploration, tmp_path: Path) -> None:
    write_frontier_csv(found, tmp_path / "f.csv")
    rows = read(tmp_path / "f.csv")
    assert ",".join(figure.name for figure in FIXED_FIGURES) == FIXED
    assert (tmp_path / "f.csv").read_text().startswith(FIXED + ",")
    assert [int(r["point"]) for r in rows] == [1, 2, 3, 4]
    memory, time_s = [int(r["memory_bytes"]) for r in rows], [float(r["time_s"]) for r in rows]
    assert memory == sorted(set(memory))
    assert time_s == sorted(set(time_s), reverse=True)
    assert [r["mesh"] for r in rows] == ["2", "1x2", "2", "1x2"]
    assert [r["exact"] for r in rows] == ["true", "true", "false", "true"]
    assert {r["planner"] for r in rows} == {"frontier"}


def test_the_strategies_csv_has_a_column_per_axis(found: Exploration, tmp_path: Path) -> None:
    write_strategies_csv(found, tmp_path / "s.csv")
    rows = read(tmp_path / "s.csv")
    assert list(rows[0]) == ["point", "operator", "axis_0", "axis_1", "options"]
    assert len(rows) == 4 * 2
    assert rows[0] | {"options": ""} == {
        "point": "1", "operator": "linear", "axis_0": "rows", "axis_1": "", "options": ""
    }  # fmt: skip
    assert "weight=S(0)" in rows[0]["options"]


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_full_disk_keeps_the_old_files(
    found: Exploration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    found.save(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    done = []

    def full(*_: object) -> None:
        if len(done) == writes:
            raise OSError(28, "No space left on device")
        done.append(1)

    monkeypatch.setattr("os.fsync", full)
    shorter = replace(found, points=found.points[:2])
    with pytest.raises(TensorOptError, match=r"cannot write .*No space left on device; nothing was changed"):
        shorter.save(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert load_exploration(tmp_path).points == found.points


def test_an_interrupted_write_leaves_nothing_behind(
    found: Exploration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found.plan(0).save(tmp_path / "plan.json")
    before = (tmp_path / "plan.json").read_bytes()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        found.plan(1).save(tmp_path / "plan.json")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "exploration.json").unlink(), "holds no exploration"),
        (lambda d: (d / "exploration.json").write_text("{"), "is damaged"),
        (lambda d: (d / "points.npz").unlink(), "is damaged"),
        (lambda d: (d / "points.npz").write_bytes(b"no archive"), "is damaged"),
        (lambda d: (d / "strategies.json.gz").unlink(), "is damaged"),
        (lambda d: (d / "strategies.json.gz").write_bytes(b"no archive"), "is damaged"),
        (lambda d: (d / "exploration.json").write_text('{"schema": "other"}'), "schema 'other'"),
    ],
)
def test_damaged_folders_are_refused(
    found: Exploration, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    found.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(TensorOptError, match=message):
        load_exploration(tmp_path)


def test_reduce_keeps_what_nothing_beats() -> None:
    costs = [(3.0, 1.0), (1.0, 3.0), (2.0, 3.0), (1.0, 4.0), (2.0, 2.0), (3.0, 1.0)]
    kept = reduce_points(list(enumerate(costs)), lambda item: item[1])
    assert [i for i, _ in kept] == [1, 4, 0]


def test_an_exploration_of_another_version_is_refused(found: Exploration, tmp_path: Path) -> None:
    found.save(tmp_path)
    file = tmp_path / "exploration.json"
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data | {"schema": "tensoropt.exploration/1"}))
    with pytest.raises(TensorOptError, match=r"schema 'tensoropt.exploration/1', not '.*/3'; explore again"):
        load_exploration(tmp_path)
