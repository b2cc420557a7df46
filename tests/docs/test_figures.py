"""Every measured figure of README.md is in a result file, with that value."""

from __future__ import annotations

import re

import pytest

from tests.docs.figures import MARK, README, current, lookup, newest, shown
from tests.docs.pages import FENCE, prose

UNIT = re.compile(r"\d[\d.,]*\s?(?:%|s\b|ms\b|MiB\b|GiB\b|TiB\b|×)")
QUOTED = re.compile(r"<!--: .*? -->(.*?)<!--/-->", re.DOTALL)
"""A figure of somebody else's, or a default or an example: ``<!--: whose -->24 GiB<!--/-->``."""


def test_figures_are_those_of_the_results() -> None:
    text = README.read_text(encoding="utf-8")
    assert MARK.search(text)
    for old, new in zip(MARK.finditer(text), MARK.finditer(current(text)), strict=True):
        assert old[0] == new[0], "run python -m tests.docs.figures"


def test_no_figure_comes_from_nowhere() -> None:
    """What carries a unit is marked: as a result, or as what somebody else says."""
    bare = QUOTED.sub("", MARK.sub("", prose(README)))
    bare = re.sub(r"`[^`\n]*`", "", bare)
    found = UNIT.findall(FENCE.sub("", bare))
    assert not found, found


def test_marked_files_exist() -> None:
    for name, *_ in MARK.findall(README.read_text(encoding="utf-8")):
        assert newest(name).suffix == ".json"


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [(2**30, ".1GiB", "1.0 GiB"), (0.25, ".0ms", "250 ms"), (0.0123, ".1%", "1.2 %"), (3, "d", "3")],
)
def test_formats(value: float, form: str, text: str) -> None:
    assert shown(value, form) == text


def test_places() -> None:
    data = {"rows": [{"model": "a", "x": [1, 2]}, {"model": "b", "x": [3]}]}
    assert lookup(data, "rows.model=b.x.0") == 3
    with pytest.raises(StopIteration):
        lookup(data, "rows.model=c.x")
