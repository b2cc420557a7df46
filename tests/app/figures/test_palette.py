"""Contrast and colour blindness, computed from the palettes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import tensoropt_app
from contrast_app import contrast, lab, linear
from tensoropt_app.figures.palette import DARK, LIGHT

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency"
# (2009), full severity, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


SCHEMES = pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])


@SCHEMES
def test_text_and_marks_have_the_contrast_of_wcag_aa(colours):
    for text in (colours.ink, colours.muted, colours.accent, colours.select):
        assert contrast(text, colours.surface) >= 4.5, text
    for mark in colours.series:
        assert contrast(mark, colours.surface) >= 3.0, mark


@SCHEMES
@pytest.mark.parametrize("seen", BLINDNESS)
def test_the_common_configurations_are_told_apart(colours, seen):
    series = [lab(BLINDNESS[seen] @ linear(c)) for c in colours.series[:5]]
    for a, b in itertools.combinations(series, 2):
        assert np.linalg.norm(a - b) > 10


KINDS = ("parameters", "gradients", "optimizer", "kept", "transient", "constants", "process")


@pytest.mark.parametrize("seen", BLINDNESS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_kinds_of_memory_are_told_apart_in_the_bar(scheme, seen):
    """Those of tensors, each from its neighbour, and without a blindness all; free memory and headroom are
    pale, and hatched. CIE76 distances; about 2 is just noticeable, 10 is told apart at a glance."""
    text = (Path(tensoropt_app.__file__).parent / "assets" / "style.css").read_text(encoding="utf-8")
    values: dict[str, str] = {}
    for block in text.split("}")[: 1 if scheme == "light" else 2]:  # dark, the second, overrides
        values |= dict(re.findall(r"--([\w-]+): (#\w{6})", block))
    colours = []
    for kind in KINDS:
        found = re.search(rf"\.seg-{kind}\b[^{{}}]*{{ background: var\(--([\w-]+)\)", text)
        assert found, kind
        colours.append(values[found[1]])
    assert all(contrast(colour, values["surface"]) >= 3.0 for colour in colours)
    shown = [lab(BLINDNESS[seen] @ linear(colour)) for colour in colours]
    pairs = itertools.combinations(shown, 2) if seen == "none" else itertools.pairwise(shown[:5])
    assert all(np.linalg.norm(a - b) > 10 for a, b in pairs)
