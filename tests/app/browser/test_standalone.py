"""The plot without a server, in a browser: drawn, in both schemes, on a phone, and without scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from samples_app import exploration
from tensoropt_app import standalone
from tensoropt_app.figures.palette import DARK, LIGHT
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData

from .conftest import Watch
from .test_accessibility import AXE, TAGS

DATA = Path(__file__).parents[3] / "app" / "data"

GROUND = "getComputedStyle(document.querySelector('.main-svg')).backgroundColor"


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Any:
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
@pytest.mark.sweep
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_drawn_at_any_width_and_follows_the_scheme(opened: Any, width: int) -> None:
    html = standalone.frontier_page(FrontierData.of(exploration(), "gpt2"), View(point=2))
    page = opened(html, "dark", width)
    page.wait_for_selector(".main-svg .point")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(GROUND) == rgb(DARK.surface)
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"{GROUND} === '{rgb(LIGHT.surface)}'")


@pytest.mark.slow
def test_all_outputs_of_a_notebook_are_drawn_with_the_script_of_one(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    for carries in (False, True, False):
        monkeypatch.setattr(standalone, "_carries", lambda carries=carries: carries)
        outputs.append(f"<div class=output>{exploration()._repr_html_()}</div>")
    page = opened("<!doctype html><body data-jp-theme-light=false>" + "".join(outputs))
    page.wait_for_function("document.querySelectorAll('[data-drawn] .main-svg .point').length > 20")
    assert page.locator(".output [data-drawn]").count() == 3
    assert "restart the kernel" not in page.inner_text("body")
    assert page.evaluate(GROUND) == rgb(DARK.surface)  # the notebook's scheme, not the machine's
    assert page.evaluate("window.Plotly") is None


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_keeps_the_rules_of_every_page(opened: Any, axe: str, scheme: str) -> None:
    page = opened(standalone.frontier_page(FrontierData.of(exploration()), View(point=2)), scheme, 390)
    page.wait_for_selector(".main-svg .point")
    page.evaluate(axe)
    assert page.evaluate(AXE, TAGS) == []


@pytest.mark.slow
def test_an_output_without_its_script_keeps_the_picture_and_says_why(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone, "_carries", lambda: False)
    page = opened(f"<!doctype html>{exploration()._repr_html_()}")
    page.wait_for_selector(".tensoropt-plot svg title", state="attached")
    assert "restart the kernel" in page.inner_text(".tensoropt-plot")
    assert page.locator("tbody tr").count() == 8
