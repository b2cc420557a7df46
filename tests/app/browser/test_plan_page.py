"""The plan page under a person's hands: its operators, and what differs between two plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

ROWS = "#operators .ag-center-cols-container .ag-row"
LAST = "#operators .ag-floating-bottom-container .ag-row:last-child .ag-cell"
SUMMED = f"() => [...document.querySelectorAll('{LAST}')].map(cell => cell.innerText)"
TABS = 60
"""Tab stops from the top of the page to the limits, at most; the table alone has more cells."""


@pytest.fixture
def page(site: Any, opened: Callable[..., Any]) -> Any:
    """The ready-made frontier's leanest plan beside one of Megatron's."""
    page = opened(site.url("plan", "x=gpt2-dgx-h100&point=1&other=135"))
    page.wait_for_selector("#operators .ag-row")
    page.wait_for_selector("#owners-moment:has-text('Peak')")
    return page


@pytest.mark.slow
def test_operators_are_searched_and_add_up_to_the_peak(page: Any) -> None:
    page.fill("#operator-search", "attn.c_proj")
    page.wait_for_function(f"document.querySelectorAll('{ROWS}').length === 12")
    assert all("attn.c_proj" in text for text in page.locator(f"{ROWS} [col-id='module']").all_inner_texts())
    page.fill("#operator-search", "")
    page.wait_for_function(f"document.querySelectorAll('{ROWS}').length > 12")
    assert "waiting for gpu links (NVLink4)" in page.inner_text("#plan-parts")
    trace = page.get_attribute("#plan-parts a", "href")
    assert trace == "/download/gpt2-dgx-h100/trace.json?point=1"
    assert page.request.get(page.url.partition("/plan")[0] + trace).json()["traceEvents"]
    peak = page.inner_text("#owners-moment").partition(": ")[2].split()[0]
    assert peak in page.evaluate(SUMMED)
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
