"""``tensoropt export``: the frontier as CSV."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensoropt import load_cluster, load_plan
from tensoropt.cli.parser import main
from tensoropt.exploration.exploration import load_exploration
from tests.plan.explorations import small_exploration


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
