"""The plot without a server, in a browser: drawn, in both schemes, on a phone, and without scripts."""

from __future__ import annotations

import pytest
from samples_app import exploration
from tensoropt_app import standalone
from tensoropt_app.figures.palette import DARK, LIGHT
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData

GROUND = "getComputedStyle(document.querySelector('.main-svg')).backgroundColor"


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


@pytest.mark.slow
def test_the_page_is_drawn_on_a_phone_and_follows_the_scheme(opened, tmp_path):
    path = tmp_path / "page.html"
    html = standalone.frontier_page(FrontierData.of(exploration(), "gpt2"), View(point=2))
    path.write_text(html, encoding="utf-8")
    page = opened(path.as_uri(), viewport={"width": 390, "height": 900}, color_scheme="dark")
    page.wait_for_selector(".main-svg .point")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(GROUND) == rgb(DARK.surface)
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"{GROUND} === '{rgb(LIGHT.surface)}'")
