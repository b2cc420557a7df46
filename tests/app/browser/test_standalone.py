"""The plot without a server, in a browser: drawn, in both schemes, on a phone, and without scripts."""

from __future__ import annotations

from typing import Any

import pytest
from samples_app import exploration
from tensoropt_app import standalone
from tensoropt_app.figures.palette import DARK, LIGHT
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData

from .conftest import Watch

GROUND = "getComputedStyle(document.querySelector('.main-svg')).backgroundColor"


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


@pytest.fixture
def opened(browser, tmp_path):
    def show(html: str, scheme: str = "light", width: int = 1280) -> Any:
        path = tmp_path / "page.html"
        path.write_text(html, encoding="utf-8")
        page, watch = browser.new_page(), Watch()
        page.on("console", watch._console)
        page.on("pageerror", lambda error: watch.faults.append(str(error)))
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.goto(f"file://{path}")
        pages.append((page, watch))
        return page

    pages: list[Any] = []
    yield show
    for page, watch in pages:
        page.close()
        assert not watch.faults


@pytest.mark.slow
def test_the_page_is_drawn_on_a_phone_and_follows_the_scheme(opened):
    html = standalone.frontier_page(FrontierData.of(exploration(), "gpt2"), View(point=2))
    page = opened(html, "dark", 390)
    page.wait_for_selector(".main-svg .point")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(GROUND) == rgb(DARK.surface)
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"{GROUND} === '{rgb(LIGHT.surface)}'")
