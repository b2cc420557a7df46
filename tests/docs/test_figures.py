"""Every measured figure of README.md is in a result file, with that value."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.machine import WRITTEN
from tests.docs.figures import MARK, PAGES, README, current, lookup, newest, parts, result, shown
from tests.docs.pages import FENCE, ROOT, pages, prose
from tests.docs.taken import sentence

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
UNIT = re.compile(r"\d[\d.,]*\s?(?:%|s\b|ms\b|MiB\b|GiB\b|TiB\b|×)")
QUOTED = re.compile(r"<!--: .*? -->(.*?)<!--/-->", re.DOTALL)
"""A figure of somebody else's, or a default or an example: ``<!--: whose -->24 GiB<!--/-->``."""


@each_page
def test_figures_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert MARK.search(text)
    for old, new in zip(MARK.finditer(text), MARK.finditer(current(text)), strict=True):
        assert old[0] == new[0], "run python -m tests.docs.figures"


def test_no_other_page_holds_figures() -> None:
    """One that did would not be written anew."""
    assert {page for page in pages() if MARK.search(page.read_text(encoding="utf-8"))} == set(PAGES)
    assert {str(page.relative_to(ROOT)) for page in PAGES} <= set(WRITTEN)


def test_no_figure_comes_from_nowhere() -> None:
    """What carries a unit is marked: as a result, or as what somebody else says."""
    bare = QUOTED.sub("", MARK.sub("", prose(README)))
    bare = re.sub(r"`[^`\n]*`", "", bare)
    found = UNIT.findall(FENCE.sub("", bare))
    assert not found, found


@each_page
def test_marked_files_exist(page: Path) -> None:
    for name, *_ in MARK.findall(page.read_text(encoding="utf-8")):
        assert all(newest(file).suffix == ".json" for _, file in parts(name))


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        ("> 25", ".2f", "> 25"),
        (2**30, ".1GiB", "1.0 GiB"),
        (0.25, ".0ms", "250 ms"),
        (0.0123, ".1%", "1.2 %"),
        (3, "d", "3"),
    ],
)
def test_formats(value: float, form: str, text: str) -> None:
    assert shown(value, form) == text


def test_a_figure_that_is_measured_later_is_a_dash_until_it_is_there() -> None:
    later = "<!--= fidelity/*-fidelity.json results.model=GPT-2.{} ?.0% -->–<!--/-->"
    assert current(later.format("not_yet")) == later.format("not_yet")
    assert re.fullmatch(r"<!--= \S+ \S+ \.0% -->\d+ %<!--/-->", current(later.format("noise")))
    with pytest.raises(KeyError):
        current(later.format("not_yet").replace("?", ""))


def test_places() -> None:
    data = {"rows": [{"model": "a", "x": [1, 2]}, {"model": "b", "x": [3]}]}
    assert lookup(data, "rows.model=b.x.0") == 3
    with pytest.raises(StopIteration):
        lookup(data, "rows.model=c.x")


def test_summaries_are_completed_from_their_rows(tmp_path: Path) -> None:
    """A fidelity result from before tau was taken over all pairs has it nevertheless; what it says stays."""
    data = json.loads(newest("fidelity/*-fidelity.json").read_text(encoding="utf-8"))
    one = data["results"][0]
    one.pop("tau_all", None)
    one["tau"] = "kept"
    path = tmp_path / "day.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    found = result(path)["results"][0]
    assert -1 <= found["tau_all"] <= 1
    assert found["tau"] == "kept"


def taken(commit: str | None, processor: str = "P", date: str = "2026-12-01", **more: Any) -> dict[str, Any]:
    return {
        "date": date,
        "commit": commit,
        "dirty": False,
        "machine": {"processor": processor, "cores": 2},
        **more,
    }


def test_tables_of_one_commit_are_said_at_once() -> None:
    found = sentence({"the steps": taken("0123456"), "the search": taken("0123456")})
    assert found == "All that follows was taken from commit 0123456 on a machine (P, 2 cores) on 2026-12-01."


@pytest.mark.parametrize(
    "other", [taken("89abcde"), taken(None), taken("0123456", "Q"), {**taken("0123456"), "dirty": True}]
)
def test_tables_of_several_say_which_is_from_which(other: dict[str, Any]) -> None:
    found = sentence({"the steps": taken("0123456"), "the demo": taken("0123456"), "the search": other})
    assert "not all taken from one commit on one machine" in found
    assert "the steps and the demo from commit 0123456 on a machine (P, 2 cores) on 2026-12-01;" in found
    assert "; the search from " in found


def test_a_benchmark_over_midnight_is_of_one_commit() -> None:
    found = sentence({"the steps": taken("0123456"), "the demo": taken("0123456", date="2026-12-02")})
    assert found.startswith("All that follows")
    assert found.endswith("on 2026-12-01 and 2026-12-02.")


def test_rows_of_several_commits_are_named() -> None:
    rows = [
        {"model": name, "taken": {"commit": commit, "dirty": dirty, "processor": "P"}}
        for name, commit, dirty in (("a", "0123456", False), ("b", "0123456", False), ("c", "89abcde", True))
    ]
    found = sentence({"the steps": taken("89abcde", rows=rows)})
    assert "the steps (a and b) from commit 0123456 on a machine (P" in found
    assert "the steps (c) from commit 89abcde with changes on a machine (P" in found
