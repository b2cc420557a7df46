"""The memory curve's owners, under a person's hands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def page(site: Any, opened: Callable[..., Any]) -> Any:
    """The ready-made frontier's leanest plan."""
    page = opened(site.url("plan", "x=gpt2-dgx-h100&point=1"))
    page.wait_for_selector("#owners .ag-center-cols-container .ag-row")
    page.wait_for_selector("#plan-curve .nsewdrag", state="attached")
    return page


def moment(page: Any, words: str) -> None:
    page.wait_for_function(f"document.getElementById('owners-moment').innerText.startsWith('{words}')")


@pytest.mark.slow
def test_owners_are_those_of_the_peak_until_the_curve_is_clicked(page: Any) -> None:
    moment(page, "Peak, at ")
    page.locator("#plan-curve").scroll_into_view_if_needed()
    box = page.locator("#plan-curve .nsewdrag").first.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.8
    for _ in range(20):  # a click while the plot still finds its margins goes by
        page.mouse.move(x - 3, y)
        page.mouse.move(x, y)
        page.wait_for_timeout(300)
        page.mouse.click(x, y)
        page.wait_for_timeout(500)
        if not page.inner_text("#owners-moment").startswith("Peak"):
            break
    moment(page, "At 1")
    page.click("#owners-peak")
    moment(page, "Peak")
    # The same without a mouse.
    page.focus("#owners-next")
    page.keyboard.press("Enter")
    moment(page, "At 2")
    # A row leads to its operator in the table.
    page.click("#owners .ag-center-cols-container .ag-row >> nth=0")
    page.wait_for_selector("#operators .ag-row-selected")
