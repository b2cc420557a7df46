"""``tensoropt why``: what binds, what would buy, and one change explored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import tensoropt
from tensoropt.cli.parser import main
from tensoropt.cluster import load_cluster
from tensoropt.exploration.verified import fingerprint, load_changed
from tests.costs.models import four
from tests.plan.explorations import small_exploration

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Four layers on two GPUs that are not here, with a store of their own."""
    place = tmp_path_factory.mktemp("why")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSOROPT_CACHE", str(place / "cache"))
        model, args, kwargs = four()
        tensoropt.explore(model, args, kwargs, cluster="dgx-h100[2]", micro_batches=(1, 2)).save(
            place / "out"
        )
        yield place / "out"


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["why", str(folder), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_the_fastest_point_unless_another_is_asked_for(run: Run, folder: Path) -> None:
    last = len(tensoropt.load(folder).points)
    code, out, _ = run()
    assert code == 0
    assert f"point {last} of {last}" in out
    assert f"tensoropt why {folder} --point {last} --deep bfloat16 --out out/bfloat16" in out
    code, out, _ = run("--point", "1", "--json")
    assert (code, json.loads(out)["point"]) == (0, 1)


def test_a_change_is_explored_saved_and_found_again(run: Run, folder: Path, tmp_path: Path) -> None:
    found = tensoropt.load(folder)
    out = tmp_path / "deep"
    code, text, _ = run("--point", "1", "--deep", "bandwidth:gpu", "--out", str(out), "--json")
    assert code == 0
    data = json.loads(text)
    lever = next(one for one in data["deeper"] if one["key"] == "bandwidth:gpu")
    made = tensoropt.load(out)
    fitting = [p for p in made.points if p.memory_bytes <= found.points[0].memory_bytes]
    assert lever["how"] == "explored"
    assert (lever["point"], lever["time_s"]) == (len(fitting), fitting[-1].time_s)
    assert data["out"] == str(out)
    changed = load_changed(out)
    assert changed is not None
    assert (changed.of, changed.key) == (fingerprint(found), "bandwidth:gpu")
    # What was explored is an exploration like any other.
    assert main(["why", str(out), "--point", "1"]) == 0


REFUSED = {
    "a point that there is not": (("--point", "999"), "there is no point 999"),
    "a point and the knee": (("--point", "1", "--knee"), "not allowed with"),
    "a budget that it does not fit": (("--point", "2", "--memory", "1KiB"), "more than the budget of 1 KiB"),
    "a budget that nothing fits": (("--memory", "1KiB"), "no plan fits 1 KiB"),
    "nowhere to save it": (("--deep", "bfloat16"), "give both, or neither"),
    "nothing to explore": (("--out", "there"), "give both, or neither"),
    "no such change": (("--deep", "faster", "--out", "there"), "there is no change 'faster'"),
    "a change that was searched": (("--deep", "micro-batches:2", "--out", "there"), "searched already"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_says_why(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, words = REFUSED[name]
    try:
        code, _, err = run(*arguments)
    except SystemExit as exit_:
        code, err = int(exit_.code or 0), capsys.readouterr().err
    assert code == 2
    assert words in err
    assert list(tmp_path.iterdir()) == []  # no folder is left behind


def test_an_exploration_without_costs_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(small_exploration(), cluster=load_cluster("dgx-h100[2]").to_dict()).save(tmp_path)
    assert main(["why", str(tmp_path), "--point", "1"]) == 0
    assert "nothing can be explored from it" in capsys.readouterr().out
    assert main(["why", str(tmp_path), "--deep", "bfloat16", "--out", str(tmp_path / "there")]) == 2
    assert "saved without its operator graph" in capsys.readouterr().err
    assert not (tmp_path / "there").exists()
