"""The memory curve's owners, the timeline's search and keys, under a person's hands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RANGE = "document.querySelector('#plan-timeline .js-plotly-plot')._fullLayout.xaxis.range.map(Number)"


@pytest.fixture
def page(site: Any, opened: Callable[..., Any]) -> Any:
    """The ready-made frontier's leanest plan."""
    page = opened(site.url("plan", "x=gpt2-dgx-h100&point=1"))
    page.wait_for_selector("#owners .ag-center-cols-container .ag-row")
    page.wait_for_selector("#plan-timeline .nsewdrag", state="attached")
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


@pytest.mark.slow
def test_the_timeline_is_searched_and_moved_by_keys(page: Any) -> None:
    page.fill("#timeline-search", "layer_norm_2")
    page.wait_for_function("document.getElementById('timeline-found').innerText.includes('events')")
    whole = page.evaluate(RANGE)
    page.press("#timeline-search", "Enter")
    page.wait_for_function("document.getElementById('timeline-found').innerText.startsWith('1 of ')")
    assert page.evaluate(RANGE)[1] < whole[1] / 10
    # From hit to hit by buttons and, over the plot, by n and N.
    found = "document.getElementById('timeline-found').innerText.startsWith('{} of ')"
    page.click("#timeline-after")
    page.wait_for_function(found.format(2))
    page.locator(".timed").nth(1).focus()
    page.keyboard.press("n")
    page.wait_for_function(found.format(3))
    page.keyboard.press("Shift+N")
    page.wait_for_function(found.format(2))
    # What is wide enough has its name on it.
    named = "document.querySelector('#plan-timeline .js-plotly-plot').layout.annotations.map(a => a.text)"
    page.wait_for_function(f"{named}.some(text => text.startsWith('h.'))")
    page.keyboard.press("0")
    page.keyboard.press("w")
    page.keyboard.press("d")
    start, end = page.evaluate(RANGE)
    assert 0 < start < end
    assert (end - start) < (whole[1] - whole[0]) * 0.75
    # Both plots move together.
    assert page.evaluate(RANGE.replace("plan-timeline", "plan-curve")) == [start, end]
    # Letters in a field are letters.
    page.focus("#timeline-search")
    page.keyboard.type("wasd")
    assert page.evaluate(RANGE) == [start, end]
