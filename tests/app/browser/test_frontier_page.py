"""The frontier page under a person's hands."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from tensoropt_app.library import READY_MADE
from tensoropt_app.pages.frontier import callbacks

PIXEL = """([x, y]) => {
  const plot = document.querySelector('#graph .js-plotly-plot'), l = plot._fullLayout;
  const box = plot.getBoundingClientRect();
  return [box.left + l.xaxis._offset + l.xaxis.d2p(x), box.top + l.yaxis._offset + l.yaxis.d2p(y)];
}"""
HOVERED = "document.querySelector('#graph .hoverlayer')?.childElementCount > 0"
RING = "() => document.querySelector('#graph .js-plotly-plot')?.data[9].x[0]"


SHIPPED = f"of {json.loads((READY_MADE / 'gpt2-dgx-h100' / 'exploration.json').read_text())['points']}"


def drawn(page: Any, title: str = "Point [0-9,]+ of") -> Any:
    """Wait until the plot and the card are there, and callbacks have drawn what is selected."""
    page.wait_for_function("document.querySelector('#graph .js-plotly-plot')?.data?.length >= 10")
    page.wait_for_selector(f"#card-title:text-matches('{title}')")
    page.wait_for_selector("#points .ag-row-selected", state="attached")
    return page


def option(page: Any, name: str) -> None:
    """Press a chip of the plot's options."""
    if not page.is_visible(f"text={name}"):
        page.click("#plot-options summary")
    page.click(f"text={name}")


def select_title(page: Any) -> str:
    return str(page.inner_text("#card-title"))


def point_at(page: Any, x: float, y: float) -> None:
    """Until the plot says what is there, which a click picks: it passes over moves that follow at once."""
    for _ in range(20):
        page.mouse.move(x - 25, y - 25)
        page.mouse.move(x, y)
        page.wait_for_timeout(300)
        if page.evaluate(HOVERED):
            return
    raise AssertionError("the plot says nothing of the point under the mouse")


@pytest.mark.slow
def test_keys_walk_and_compare_and_clicks_faster_than_answers_all_count(
    site: Any, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*values: Any) -> Any:
        time.sleep(1.0)
        return applied(*values)

    page = drawn(opened(site.url(query="x=opened-small&point=3")), "Point 3 of 8")
    page.focus("#plot")
    page.keyboard.press("c")
    page.wait_for_function("location.search.includes('other=3')")
    for expected in (3, 4):
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(f"#card-title:text-matches('Point {expected + 1} of 8')")
    page.keyboard.press("End")  # the fastest within what headroom leaves
    page.wait_for_selector("#card-title:text-matches('Point 7 of 8')")
    page.wait_for_selector("#comparison td:text-is('+40.0 GiB (+133 %)')")
    page.click("#nav-export")
    page.wait_for_selector("#command-0")
    page.click("#nav-frontier")
    page.wait_for_selector("#plot", state="visible")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#card-title:text-matches('Point 6 of 8')")
    page.click("#pick-leanest")
    page.wait_for_selector("#card-title:text-matches('Point 1 of 8')")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#card-title:text-matches('Point 2 of 8')")
    # Of a field they are its own.
    page.focus("#headroom")
    page.keyboard.press("End")
    page.wait_for_timeout(500)
    assert select_title(page).startswith("Point 2 of 8")
    x, y = page.evaluate(PIXEL, [40, 500])
    point_at(page, x, y)
    page.mouse.click(x, y)
    page.wait_for_selector("#card-title:text-matches('Point 4 of 8')")
    page.wait_for_selector("#points .ag-row-selected[row-id='3']")
    page.wait_for_function(f"({RING})() === 40")
    page.click("#points .ag-row[row-id='5'] .ag-cell[col-id='needs']")
    page.wait_for_selector("#card-title:text-matches('Point 6 of 8')")
    page.wait_for_function("location.search.includes('point=6')")
    applied = callbacks._applied
    monkeypatch.setattr(callbacks, "_applied", late)
    page.click("#compare-this")
    page.click("#pick-leanest")
    option(page, "log memory")
    page.wait_for_selector("#card-title:text-matches('Point 1 of 8')")
    page.wait_for_function("document.querySelector('#graph .js-plotly-plot')?.layout.xaxis.type === 'log'")
    page.wait_for_function("location.search.includes('other=6')")


@pytest.mark.slow
def test_a_budget_selects_and_greys_and_axes_and_lines_are_in_the_url(
    site: Any, opened: Callable[..., Any]
) -> None:
    page = drawn(opened(site.url(query="x=opened-small")))
    page.fill("#budget-text", "35 GiB")
    page.keyboard.press("Enter")
    page.wait_for_selector("#card-title:text-matches('Point 3 of 8')")
    veil = "document.querySelector('#graph .js-plotly-plot')?.layout.shapes[2]"
    page.wait_for_function(f"{veil}.visible && {veil}.x0 === 35")
    page.wait_for_function("document.querySelector('#budget-text').value === '35 GiB'")
    page.fill("#budget-text", "8 GiB")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=No plan fits 8 GiB; the smallest needs 10.0 GiB.")
    page.fill("#budget-text", "lots")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=write a number and a unit")
    page.fill("#target-text", "450 ms")
    page.keyboard.press("Enter")
    page.wait_for_selector("#card-title:text-matches('Point 5 of 8')")
    option(page, "log memory")
    page.wait_for_function("document.querySelector('#graph .js-plotly-plot')?.layout.xaxis.type === 'log'")
    option(page, "compute / network")
    page.wait_for_function("document.querySelector('#graph .js-plotly-plot')?.data[4].visible === true")
    page.wait_for_function("location.search.includes('logx=1') && location.search.includes('lines=1')")
    # Of headroom and price the rule is said, and what breaks it changes nothing.
    for control, typed, rule in (
        ("headroom", "95", "between 0 and 90"), ("price", "1e9", "at most 1,000,000"),
    ):  # fmt: skip
        page.fill(f"#{control}", typed)
        page.keyboard.press("Enter")
        page.wait_for_selector(f".mantine-InputWrapper-error:has-text({rule!r})")
    page.fill("#headroom", "20")
    page.keyboard.press("Enter")
    page.wait_for_function("location.search.includes('headroom=0.2')")
    assert "price" not in page.url
    again = drawn(opened(page.url))
    assert again.evaluate("document.querySelector('#graph .js-plotly-plot').layout.xaxis.type") == "log"


GRIP = "#graph .annotation[data-index='1']"
LABEL = f"""document.querySelector("{GRIP}").textContent"""


ROWS = "document.querySelector('#points .ag-root')?.getAttribute('aria-rowcount') - 1"


@pytest.mark.slow
def test_twenty_thousand_points_follow_the_slider(site: Any, opened: Callable[..., Any]) -> None:
    page = drawn(opened(site.url(query="x=opened-long&point=20000")), "Point 20000")
    thumb = page.locator("#budget [role=slider]")
    thumb.focus()
    for _ in range(4):
        before = select_title(page)
        for _ in range(12):
            page.keyboard.press("ArrowLeft")
        page.wait_for_function(
            "t => ![t, undefined].includes(document.querySelector('#card-title')?.innerText)", arg=before
        )
    page.wait_for_function(f"({RING})() < 79")
    assert page.locator("#points-count").inner_text() == "20,000 points"


def choose(page: Any, label: str, title: str) -> None:
    page.click("#exploration")
    page.click(f"[role=option]:has-text('{label}'):visible")
    page.wait_for_selector(f"#card-title:text-matches('{title}')")
    page.wait_for_timeout(1500)  # what follows an answer; changes that are closer are one step of the history


SHOWN = {
    "frontier": "#card-title",
    "plan": "#plan-headline .big",
    "export": "#command-0",
    "explore": "#start",
}


def remaining(page: Any, script: str) -> Any:
    """Faults that a script finds, once they have had time to go away: pages are drawn in steps."""
    for _ in range(40):
        if not page.evaluate(script):
            break
        page.wait_for_timeout(250)
    return page.evaluate(script)


NAMES = """() => {
  const plot = document.querySelector('#graph .js-plotly-plot'), l = plot._fullLayout;
  const box = plot.getBoundingClientRect(), trace = plot.data[6];
  const marks = trace.x.map((x, i) => [box.left + l.xaxis._offset + l.xaxis.d2p(x),
    box.top + l.yaxis._offset + l.yaxis.d2p(trace.y[i]), trace.customdata[i][2]]);
  const texts = [...plot.querySelectorAll('.scatterlayer .textpoint text')];
  const bends = plot.data[10].text;
  const own = texts.filter((t) => !t.textContent.startsWith('knee') && !bends.includes(t.textContent));
  return own.map((t) => {
    const b = t.getBoundingClientRect(), x = b.left + b.width / 2, y = b.top + b.height / 2;
    const far = (m) => Math.hypot(m[0] - x, m[1] - y);
    return [t.textContent, marks.slice().sort((m, n) => far(m) - far(n))[0][2]];
  });
}"""
