"""Every measured figure of the READMEs is in a result file, with that value."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from tests.benchmarks.machine import WRITTEN
from tests.docs import figures
from tests.docs.pages import ROOT, pages, prose
from tests.docs.parts import PARTS
from tests.docs.taken import sentence

UNIT = re.compile(r"(?<![\w,.])\d[\d.,]*\s?(?:%|s\b|ms\b|MiB\b|GiB\b|TiB\b|×)")
MOST_WORDS = 700
"""Of README.md, tables included: it is a first look; stages' READMEs hold the rest."""


def test_generated_parts_are_those_of_the_results():
    for page in figures.PAGES:
        text = page.read_text(encoding="utf-8")
        assert text == figures.current(text, PARTS, page.parent), f"{page}: run make figures"


def test_every_part_stands_once():
    texts = {page: page.read_text(encoding="utf-8") for page in pages()}
    found = [(page, name) for page, text in texts.items() for name, _ in figures.PART.findall(text)]
    assert Counter(name for _, name in found if name != figures.MODULES) == Counter(list(PARTS))
    written = {str(page.relative_to(ROOT)) for page, name in found if name != figures.MODULES}
    assert written <= set(WRITTEN)


def test_comments_are_nothing_but_the_bounds_of_generated_parts():
    """No bound stands without its other, and no comment in a text."""
    made = re.compile(r"<!-- begin ([\w-]+): made by `[^`]+` -->\n.*?<!-- end \1 -->", re.DOTALL)
    texts = {page: page.read_text(encoding="utf-8") for page in pages()}
    assert [p for p, text in texts.items() if text.count("<!--") != 2 * len(made.findall(text))] == []


def test_no_figure_comes_from_nowhere():
    """What carries a unit is generated, or code."""
    for page in (figures.README, ROOT / "tests" / "benchmarks" / "README.md"):
        assert not UNIT.findall(re.sub(r"`[^`\n]*`", "", figures.PART.sub("", prose(page)))), page


def test_the_first_page_is_short():
    assert len(prose(figures.README).split()) <= MOST_WORDS


def test_a_figure_that_is_measured_later_is_a_dash_until_it_is_there():
    assert figures.Filled({"noise": 0.03}).format("{not_yet:?.0%}, {noise:?.0%}") == "–, 3 %"
    with pytest.raises(KeyError, match="not_yet"):
        figures.Filled({"noise": 0.03}).format("{not_yet:.0%}")


def taken(commit: str | None, processor: str = "P", date: str = "2026-12-01", **more: Any) -> dict[str, Any]:
    return {
        "date": date, "commit": commit, "dirty": False, "machine": {"processor": processor, "cores": 2},
        **more,
    }  # fmt: skip


def test_tables_of_one_commit_are_said_at_once():
    """Also if a benchmark ran over midnight; the page has tables of several."""
    found = sentence({"the steps": taken("0123456"), "the demo": taken("0123456", date="2026-12-02")})
    assert found == "Taken from commit 0123456 on a machine (P, 2 cores) on 2026-12-01 and 2026-12-02."


def test_rows_of_several_commits_are_named():
    rows = [
        {"model": name, "taken": {"commit": commit, "dirty": dirty, "processor": "P"}}
        for name, commit, dirty in (("a", "0123456", False), ("b", "0123456", False), ("c", "89abcde", True))
    ]
    found = sentence({"the steps": taken("89abcde", rows=rows)})
    assert "the steps (a and b) from commit 0123456 on a machine (P" in found
    assert "the steps (c) from commit 89abcde with changes on a machine (P" in found
