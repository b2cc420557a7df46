"""Every result says which commit, machine, date and load it belongs to."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.benchmarks import machine
from tests.benchmarks.__main__ import BY_NAME, PROGRAMS
from tests.benchmarks.machine import REQUIRED, RESULTS, ROOT, Results, Taking, commit, named, write

LAST_BEFORE = "2026-11-22"
"""Until then some results were taken that do not name their commit."""
FILES = sorted(str(p.relative_to(RESULTS)) for p in RESULTS.rglob("*.json"))
TOOLS = {"tests.benchmarks.published.fit"}
"""Programs that write no result."""
ELSEWHERE = {"mutants"}
"""Folders that belong to other programs than the benchmarks."""


def modules() -> list[str]:
    """Every module here that can be run, but for this folder's own."""
    paths = (p for p in RESULTS.parent.rglob("*.py") if "\nif __name__ == " in p.read_text(encoding="utf-8"))
    names = (p.relative_to(ROOT).with_suffix("").parts for p in paths if p.name != "__main__.py")
    return sorted(".".join(parts) for parts in names if not ELSEWHERE & set(parts))


def test_every_program_is_known() -> None:
    assert set(modules()) == TOOLS | set(PROGRAMS.values()) | set(BY_NAME.values())


def test_a_result_that_does_not_say_is_not_written(tmp_path: Path) -> None:
    about = Taking().about
    write(tmp_path / "whole", about, "text")
    for missing in REQUIRED:
        with pytest.raises(AssertionError, match=missing):
            write(tmp_path / "half", {k: v for k, v in about.items() if k != missing}, "text")
        assert not (tmp_path / "half.json").exists()


def test_kept_results_say_what_they_were_taken_from() -> None:
    for name in (n for n in FILES if n.split("/")[0] not in ELSEWHERE):
        data = json.loads((RESULTS / name).read_text(encoding="utf-8"))
        if Path(name).name[:10] <= LAST_BEFORE and "commit" not in data:
            continue
        assert set(REQUIRED) <= set(data), name
        assert re.fullmatch(r"[0-9a-f]{7,}", data["commit"]), name
        assert {"processor", "cores", "load_at_start"} <= set(data["machine"]), name
        assert "Taken from commit" in (RESULTS / name).with_suffix(".md").read_text(encoding="utf-8"), name


def test_a_commit_is_dirty_by_what_is_not_a_result(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *name, *words], check=True, capture_output=True)

    assert commit(tmp_path) == {"commit": None, "dirty": None}
    git("init")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    assert commit(tmp_path)["dirty"] is False
    (tmp_path / "tests/benchmarks/results").mkdir(parents=True)
    (tmp_path / "tests/benchmarks/results/new.json").write_text("{}")
    (tmp_path / "README.md").write_text("figures")
    assert commit(tmp_path)["dirty"] is False
    (tmp_path / "code.py").write_text("2")
    found = commit(tmp_path)
    assert found["dirty"] is True
    assert named(found) == f"commit {found['commit']} with changes"


def test_rows_say_what_they_were_taken_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of an earlier part of the day, which keep their own commit."""
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    first = Results("step", "step", {"ranks": 2})
    first.add("model", {"model": "a"})
    first.write("text")
    file = first.stem.with_suffix(".json")
    old = json.loads(file.read_text(encoding="utf-8"))
    old["rows"][0]["taken"]["commit"] = "0123456"
    file.write_text(json.dumps(old))
    second = Results("step", "step", {"ranks": 2})
    second.add("model", {"model": "b"})
    assert [row["taken"]["commit"] for row in second.data["rows"]] == ["0123456", second.data["commit"]]
    assert {"load", "stolen", "seconds", "processor", "dirty"} <= set(second.data["rows"][1]["taken"])
