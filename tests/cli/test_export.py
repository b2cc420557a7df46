"""``tensoropt export``: the frontier as CSV."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tensoropt import load_cluster, load_plan
from tensoropt.cli.parser import main
from tensoropt.exploration.exploration import load_exploration
from tests.plan.explorations import rows_of, small_exploration


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    replace(small_exploration(), cluster=load_cluster("dgx-h100[2]").to_dict()).save("out")
    return tmp_path


def test_plans_of_other_planners_have_the_numbers_behind_the_frontiers(folder, capsys):
    found = load_exploration("out")
    replace(found, others=(found.points[0].changed(planner="zero"),)).save("more")
    assert main(["choose", "more", "--point", "5", "--out", "plan.json"]) == 0
    assert load_plan("plan.json").planner == "zero"
    capsys.readouterr()
    assert main(["choose", "more", "--point", "6"]) == 2
    assert "points 1 to 4, plans of other planners are 5 to 5" in capsys.readouterr().err


REFUSED = {
    "nothing to write": ((), "give --csv FILE for the frontier, or --as LAUNCHER --point N for a point"),
    "strategies alone": (("--strategies", "s.csv"), "give both"),
    "a point of a table": (("--csv", "f.csv", "--point", "1"), "--point is for --as"),
    "a config beside a table": (("--csv", "f.csv", "--as", "torchtitan"), "give one of them"),
    "a file that is a folder": (("--csv", "out"), "cannot write out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_says_why_and_writes_nothing(folder, capsys, name):
    arguments, words = REFUSED[name]
    assert main(["export", "out", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["out"]


@pytest.fixture
def batch(folder):
    """An exploration, a folder of two, damage, and other files."""
    base = load_exploration("out")
    pipelined = small_exploration().points[0].changed(planner="zero")
    for name, cluster in {"all/2-devices": "dgx-h100[2]", "all/4-devices": "dgx-a100[4]"}.items():
        replace(base, cluster=load_cluster(cluster).to_dict(), points=(pipelined,)).save(folder / name)
    (folder / "damaged").mkdir()
    (folder / "damaged/exploration.json").write_text("{")
    (folder / "all/nothing").mkdir()
    (folder / "all/notes.txt").write_text("mine")
    return folder


def test_several_explorations_become_one_csv(batch, capsys):
    assert main(["export", "out", "all", "--csv", "f.csv", "--strategies", "s.csv", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    points, strategies = rows_of("f.csv"), rows_of("s.csv")
    assert data["points"] == len(points) == 6
    found = ["out", "all/2-devices", "all/4-devices"]
    assert [one["exploration"] for one in data["explorations"]] == found
    clusters = dict(zip(found, ("dgx-h100[2]", "dgx-h100[2]", "dgx-a100[4]"), strict=True))
    assert {row["exploration"]: row["cluster"] for row in points} == clusters
    # What stands before is what the CSV of each exploration has.
    main(["export", "out", "--csv", "one.csv", "--strategies", "one-s.csv"])
    for several, one, behind in (
        (points, rows_of("one.csv"), ["exploration", "cluster", "batch"]),
        (strategies, rows_of("one-s.csv"), ["exploration", "cluster", "devices"]),
    ):
        assert list(several[0]) == [*one[0], *behind]
        assert [{name: row[name] for name in one[0]} for row in several[: len(one)]] == one
    assert {row["exploration"] for row in strategies} == set(found)
    assert {row["devices"] for row in strategies} == {row["devices"] for row in points}


def test_a_folder_without_any_is_refused(batch, capsys):
    for name, said in (
        ("all/nothing", "all/nothing holds no exploration"),
        ("nowhere", "nowhere holds no exploration"),
        ("damaged", "damaged is damaged"),
    ):
        assert main(["export", "out", name, "--csv", "f.csv"]) == 2
        assert said in capsys.readouterr().err
    assert not Path("f.csv").exists()


def test_a_folder_is_one_however_it_is_written(batch, capsys):
    main(["export", "out", "--csv", "one.csv"])
    for name in ("out/", "./out"):
        assert main(["export", name, "--csv", "f.csv"]) == 0
        assert Path("f.csv").read_text() == Path("one.csv").read_text()
    capsys.readouterr()
    assert main(["export", "all", str(Path("all/2-devices").resolve()), "--csv", "f.csv"]) == 0
    assert "2 points of 2 explorations" in capsys.readouterr().out
