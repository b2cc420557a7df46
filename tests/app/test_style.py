"""The style sheet: WCAG AA contrast of all colours that meet, and one palette for plots and pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tensoropt_app
from contrast_app import contrast
from tensoropt_app.figures.palette import palette

STYLE = (Path(tensoropt_app.__file__).parent / "assets" / "style.css").read_text()
GROUNDS = ("page", "surface")
TEXT = {
    "ink": (*GROUNDS, "accent-soft"), "muted": (*GROUNDS, "accent-soft"), "accent": GROUNDS, "good": GROUNDS,
    "error-ink": (*GROUNDS, "error-bg"), "warn-ink": ("warn-bg",), "info-ink": ("info-bg",),
    "on-fill": ("fill",), "select": ("surface",), "other": ("surface",),
}  # fmt: skip
"""Colour of text -> what it stands on; 4.5:1."""
MARKS = {
    "edge": GROUNDS, "accent": GROUNDS, "fill": ("surface",), "k-idle": ("surface",),
    **{f"k-{kind}": ("surface",) for kind in ("parameters", "gradients", "optimizer", "kept", "transient")},
}  # fmt: skip
"""Borders of controls, focus, segments of bars -> what they lie on; 3:1."""


def variables(scheme: str) -> dict[str, str]:
    """The colours of one scheme; the dark one changes the light one's."""
    light, dark = re.findall(r"^:root[^{]*\{(.*?)^\}", STYLE, re.DOTALL | re.MULTILINE)[:2]
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))
    changed = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", dark))
    assert changed.keys() == found.keys(), "a colour that one scheme lacks"
    return changed if scheme == "dark" else found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(scheme: str) -> None:
    colours = variables(scheme)
    pairs = [(text, ground) for text, grounds in TEXT.items() for ground in grounds]
    found = {pair: round(contrast(colours[pair[0]], colours[pair[1]]), 2) for pair in pairs}
    assert {pair: ratio for pair, ratio in found.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_not_text_stands_out_as_it_must(scheme: str) -> None:
    colours = variables(scheme)
    pairs = [(mark, ground) for mark, grounds in MARKS.items() for ground in grounds]
    found = {pair: round(contrast(colours[pair[0]], colours[pair[1]]), 2) for pair in pairs}
    assert {pair: ratio for pair, ratio in found.items() if ratio < 3.0} == {}


def test_every_colour_is_looked_at() -> None:
    """A new variable has to say what it is for; ``line`` and ``free`` are decoration beside an edge."""
    grounds = {ground for pairs in (TEXT, MARKS) for names in pairs.values() for ground in names}
    assert variables("light").keys() - TEXT.keys() - MARKS.keys() - grounds == {"line", "free"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_plots_have_the_colours_of_the_page(scheme: str) -> None:
    colours, plots = variables(scheme), palette(scheme)
    for name in ("surface", "ink", "muted", "accent", "select", "other"):
        assert getattr(plots, name) == colours[name], name
    assert plots.kinds == {kind: colours[f"k-{kind}"] for kind in plots.kinds}


def test_no_colour_is_written_elsewhere() -> None:
    """Otherwise it would escape the checks above."""
    rest = STYLE[STYLE.index("* { box-sizing") :]
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b(?![-\w]* \{)", rest) == []
