"""Contrast and colour blindness, computed from the palettes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tensoropt_app.figures.palette import DARK, LIGHT, Palette

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
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """WCAG 2.2, relative luminance."""
    light, dark = sorted((float(XYZ[1] @ linear(c)) for c in (a, b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(colours: Palette) -> None:
    for text in (colours.ink, colours.muted, colours.accent, colours.select, colours.other):
        assert contrast(text, colours.surface) >= 4.5, text


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_marks_have_the_contrast_of_graphical_objects(colours: Palette) -> None:
    for mark in (*colours.kinds.values(), *colours.series):
        assert contrast(mark, colours.surface) >= 3.0, mark


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("seen", BLINDNESS)
def test_neighbours_in_a_stack_are_told_apart(colours: Palette, seen: str) -> None:
    """CIE76 distances; about 2 is a just noticeable difference, 10 is told apart at a glance."""
    kinds = [lab(BLINDNESS[seen] @ linear(c)) for c in colours.kinds.values()]
    for a, b in itertools.pairwise(kinds):
        assert np.linalg.norm(a - b) > 10


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("seen", BLINDNESS)
def test_the_common_configurations_are_told_apart(colours: Palette, seen: str) -> None:
    series = [lab(BLINDNESS[seen] @ linear(c)) for c in colours.series[:5]]
    for a, b in itertools.combinations(series, 2):
        assert np.linalg.norm(a - b) > 10
