"""The memory curve's owners, the timeline's search and keys, and a measured file, under a person's hands."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.observed.test_snapshot import block, entry, snapshot

RANGE = "document.querySelector('#plan-timeline .js-plotly-plot')._fullLayout.xaxis.range.map(Number)"
MIB = 2**20


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


def test_a_file_that_comes_while_the_page_is_made_is_taken(
    site: Any, opened: Callable[..., Any], tmp_path: Path
) -> None:
    data = snapshot([entry("alloc", 0, 700 * MIB, 0), entry("free_completed", 0, 700 * MIB, 50_000)])
    (tmp_path / "run.pickle").write_bytes(pickle.dumps(data))
    page = opened(site.url("plan", "x=gpt2-dgx-h100&point=1"))
    page.set_input_files("#measured-upload input[type=file]", tmp_path / "run.pickle")
    page.wait_for_selector("#measured-name:has-text('run.pickle')")


@pytest.mark.slow
def test_a_measured_file_comes_is_laid_over_and_goes(page: Any, tmp_path: Path) -> None:
    field = "#measured-upload input[type=file]"
    (tmp_path / "bad.pickle").write_bytes(pickle.dumps(print))
    page.set_input_files(field, tmp_path / "bad.pickle")
    page.wait_for_selector("#measured-said .note-error:has-text('which is not data')")
    (tmp_path / "model.onnx").write_bytes(b"x")
    page.set_input_files(field, tmp_path / "model.onnx")
    page.wait_for_selector("#measured-said .note-error:has-text('is not taken')")
    events = [entry("alloc", 0, 700 * MIB, 0), entry("free_completed", 0, 700 * MIB, 50_000)]
    data = snapshot(events, blocks={0: [block(10**12, 100 * MIB)]})
    (tmp_path / "run.pickle").write_bytes(pickle.dumps(data))
    page.set_input_files(field, tmp_path / "run.pickle")
    page.wait_for_selector("#measured-figures td:has-text('0.781 GiB')")
    traces = "document.querySelector('#plan-curve .js-plotly-plot').data.map(t => t.name)"
    page.wait_for_function(f"{traces}.includes('measured, cuda:0')")
    page.click("#measured-remove")
    page.wait_for_selector("#measured-bar", state="hidden")
    page.wait_for_function(f"!{traces}.includes('measured, cuda:0')")
