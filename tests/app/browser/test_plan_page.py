"""The plan page under a person's hands: the graph, its operators, and what differs between two plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

GRAPH = "document.getElementById('plan-picture')._cyreg.cy"
NODES = "document.getElementById('plan-picture')?._cyreg?.cy?.nodes().length"
LAST = "#operators .ag-floating-bottom-container .ag-row:last-child .ag-cell"
SUMMED = f"() => [...document.querySelectorAll('{LAST}')].map(cell => cell.innerText)"
TABS = 60
"""Tab stops from the top of the page to the limits, at most; the table alone has more cells."""


@pytest.fixture
def page(site: Any, opened: Callable[..., Any]) -> Any:
    """The ready-made frontier's leanest plan beside one of Megatron's."""
    page = opened(site.url("plan", "x=gpt2-dgx-h100&point=1&other=135"))
    page.wait_for_selector("#operators .ag-row")
    page.wait_for_function(f"{NODES} > 0")
    return page


def zoom(page: Any) -> float:
    return float(page.evaluate(f"{GRAPH}.zoom()"))


@pytest.mark.slow
def test_the_graph_leaves_the_wheel_to_the_page_and_filters_its_operators(page: Any) -> None:
    # Twelve equal blocks are one, in letters of 11 px or more.
    assert page.evaluate(f"{NODES}") == 15
    page.wait_for_function(f"{GRAPH}.zoom() * 12 >= 11")
    page.locator("#plan-picture").scroll_into_view_if_needed()
    box, before, at = page.locator("#plan-picture").bounding_box(), zoom(page), page.evaluate("scrollY")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.wheel(0, 200)
    page.wait_for_function(f"scrollY > {at}")
    assert zoom(page) == before
    page.click("#picture-in")
    page.wait_for_function(f"{GRAPH}.zoom() > {before} * 1.2")
    page.click("#picture-fit")
    page.wait_for_function(f"Math.abs({GRAPH}.zoom() - {before}) < 0.05")
    page.fill("#picture-search", "attn")
    page.wait_for_selector("#picture-found:text-is('3 boxes')")
    node = f"{GRAPH}.getElementById('network.transformer.h.0–11.attn.#1')"
    page.evaluate(f"{node}.emit('mouseover')")
    page.wait_for_selector("#picture-tip:visible")
    assert "computed again in backward" in page.inner_text("#picture-tip")
    assert "MiB" in page.inner_text("#picture-tip")
    # A tapped module shows its operators and no others; one button shows all again.
    page.evaluate(f"{node}.emit('tap')")
    page.wait_for_selector("#operator-shown:text-is('in network.transformer.h.0–11.attn')")
    rows = page.locator("#operators .ag-center-cols-container .ag-row")
    page.wait_for_function(
        "document.querySelectorAll('#operators .ag-center-cols-container .ag-row').length === 12"
    )
    assert all("attn" in text for text in rows.locator("[col-id='module']").all_inner_texts())
    page.click("#operator-all")
    page.wait_for_function(
        "document.querySelectorAll('#operators .ag-center-cols-container .ag-row').length > 12"
    )
    # The table adds up to what stands in large type.
    memory = page.inner_text("#plan-headline .big strong >> nth=0").split()[0]
    assert memory in page.evaluate(SUMMED)
    assert "h.0–11" in page.inner_text("#plan-difference")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_changes_are_in_view_and_the_limits_within_reach(
    site: Any, opened: Callable[..., Any], width: int
) -> None:
    options = {"viewport": {"width": width, "height": 900}}
    page = opened(site.url("frontier", "x=gpt2-dgx-h100&point=1&other=135"), **options)
    page.wait_for_selector("#comparison table")
    page.wait_for_selector("#points .ag-row")
    inside = """() => { const all = document.querySelector('#comparison .compare');
      return all.scrollWidth <= all.clientWidth }"""
    page.wait_for_function(inside)
    for _ in range(TABS):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "budget-text":
            break
    assert page.evaluate("document.activeElement.id") == "budget-text"
    page.wait_for_selector("#budget [role=slider][aria-label='Memory budget in GiB']")
