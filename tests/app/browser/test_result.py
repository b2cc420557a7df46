"""The page Result: five questions without scrolling, and the ways to another plan."""

from __future__ import annotations

from typing import Any

import pytest
from tensoropt_app.library import READY_MADE

from tests.plan.explorations import rows_of

QUESTIONS = {
    "does it fit": "#answer .verdict-big",
    "how fast": "#answer .figures span:has-text('a step')",
    "which plan": "#answer p[title]",
    "of which others": "#choices tr:last-child",
    "which on the plot": "#graph .js-plotly-plot",
    "what would more bring": "#what-if tr:last-child",
    "how do I run it": "#export-open",
}


@pytest.mark.slow
def test_five_questions_are_answered_without_scrolling(site, opened):
    page = opened(site.url())
    for name in sorted(folder.name for folder in READY_MADE.iterdir()):
        page.goto(site.url(query=f"x={name}"))
        for question, selector in QUESTIONS.items():
            page.wait_for_selector(selector)
            box = page.locator(selector).first.bounding_box()
            assert box["y"] + box["height"] <= 800, (name, question)
            assert box["x"] + box["width"] <= 1280, (name, question)
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        assert page.evaluate("document.querySelectorAll('*').length") <= 1500
        assert not page.evaluate("Boolean(window.dash_ag_grid)")  # it comes with the first table
    # Two of them beside each other: one plot, one table, one CSV.
    page.goto(site.url(query="x=gpt2-dgx-h100&beside=gpt2-dgx-h100-half"))
    page.wait_for_selector("#bar-words:has-text('2 explorations')")
    assert page.locator("#choices tbody tr").count() == 2
    page.wait_for_function("document.querySelector('#graph .js-plotly-plot')?.data?.length === 2")
    with page.expect_download() as download:
        page.click("#answer a:has-text('CSV')")
    assert len({row["exploration"] for row in rows_of(download.value.path())}) == 2


def searched(page: Any, part: str) -> None:
    page.wait_for_function("part => `${location.search}&`.includes(part)", arg=part)


@pytest.mark.slow
def test_a_plan_is_chosen_in_every_way(site, opened, tmp_path):
    page = opened(site.url(query="x=opened-small"))
    page.wait_for_selector("#choices td:has-text('recommended')")
    page.fill("#budget", "35GiB")
    page.keyboard.press("Enter")
    searched(page, "budget=")
    page.wait_for_selector("#answer:has-text('needs 30.0 of 35 GiB')")
    # Wrong input is said, and changes nothing.
    for field, typed, said in (
        ("budget", "lots", "write a size"), ("budget", "99 GiB", "H100-80GB has 80 GiB"),
        ("longest", "soon", "Longest step: 'soon' is not a time"),
    ):  # fmt: skip
        page.fill(f"#{field}", typed)
        page.keyboard.press("Enter")
        page.wait_for_selector(f'#bar-said:has-text("{said}")')
        assert "needs 30.0 of 35 GiB" in page.inner_text("#answer")
        page.fill(f"#{field}", "35 GiB" if field == "budget" else "")
        page.keyboard.press("Enter")
        page.wait_for_selector("#bar-said .note", state="detached")
    page.fill("#longest", "0.45")
    page.keyboard.press("Enter")
    searched(page, "time=0.45")
    page.wait_for_selector("#choices td:has-text('leanest within 450 ms')")
    assert "budget" not in page.url
    # The budget's line is dragged; a phone's finger does the same.
    page.wait_for_selector("#graph .annotation[data-index='0']")
    box = page.locator("#graph .annotation[data-index='0']").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 100, y, steps=5)
    field = page.input_value("#budget")
    page.mouse.up()
    searched(page, "budget=")
    page.wait_for_selector(f"#answer:has-text('of {field}')")
    page.wait_for_timeout(1500)  # the plot follows
    # A dot, a key, a row, a link.
    x, y, row = page.evaluate(
        """() => {
          const plot = document.querySelector('#graph .js-plotly-plot'), dots = plot.data[1];
          const { xaxis, yaxis } = plot._fullLayout, place = plot.getBoundingClientRect();
          return [place.left + xaxis._offset + xaxis.d2p(dots.x[0]),
                  place.top + yaxis._offset + yaxis.d2p(dots.y[0]), dots.customdata[0][0]];
        }"""
    )
    page.mouse.move(x - 3, y)
    page.mouse.move(x, y)
    page.wait_for_timeout(200)
    page.mouse.click(x, y)
    searched(page, f"point={row + 1}&")
    page.focus("#plot")
    page.keyboard.press("ArrowRight")
    searched(page, f"point={row + 2}&")
    page.click("#choices a.use >> nth=0")
    page.wait_for_selector("#choices tr:has-text('recommended') a.chosen")
    page.click("#below summary:has-text('All points')")
    page.click("#points-show")
    page.click("#points .ag-row[row-index='5'] [col-id='needs']")
    searched(page, "point=6")
    page.wait_for_selector("#choices tr:has-text('chosen')")
    assert page.is_visible("#points")
    page.click("#faster-show")
    page.wait_for_selector("#faster p")
    page.click("#below summary:has-text('Assumptions')")
    page.fill("#price", "2.5")
    page.keyboard.press("Enter")
    page.wait_for_selector("#answer:has-text('for 1,000 steps')")
    # Another exploration, of 20,000 points, is picked; what is seen can be sent to a colleague.
    page.click("#exploration")
    page.get_by_role("option", name="(long)").click()
    searched(page, "x=opened-long")
    page.wait_for_selector("#whole:has-text('all 20,000 points')")
    page.click("#whole")
    searched(page, "whole=1")
    page.go_back()
    page.wait_for_selector("#whole:has-text('all 20,000 points')")
    shared = opened(page.url)
    shared.wait_for_selector("#answer .verdict-big")
    assert shared.inner_text("#answer") == page.inner_text("#answer")
