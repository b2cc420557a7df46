"""WCAG 2 A and AA as axe-core checks them on every page, light and dark, wide and narrow; and no mouse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from site_app import Site
from tensoropt_app.state import PAGES

TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
AXE = """async (tags) => (await axe.run(document, { runOnly: { type: 'tag', values: tags } })).violations
  .flatMap(rule => rule.nodes.map(node => `${rule.id}: ${node.target.join(' ')}: ${rule.help}`))"""
READY = {
    "frontier": "#points .ag-row-selected",
    "runs": "#runs-table .ag-row .ag-checkbox",
    "plan": "#operators .ag-row",
    "export": "#command-1",
    "fit": "#fit-table td",
    "explore": "#upload input[aria-label]",
}
"""What is there last on each page."""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_keeps_the_rules(
    site: Site, opened: Callable[..., Any], axe: str, scheme: str, width: int
) -> None:
    page = opened(
        site.url(query="point=3&other=10"),
        color_scheme=scheme,
        viewport={"width": width, "height": 900},
    )
    page.wait_for_selector(READY["frontier"])
    page.evaluate(axe)
    assert set(READY) == set(PAGES)
    found: list[str] = []
    for name, ready in READY.items():
        page.click(f"#nav-{name}")
        page.wait_for_selector(ready)
        found += [f"{name}: {fault}" for fault in page.evaluate(AXE, TAGS)]
    assert found == []


FOCUS = """() => {
  const at = document.activeElement;
  if (!at || at === document.body) return 'nothing has the focus';
  const name = `${at.tagName} ${at.id} ${at.className} ${(at.innerText || '').slice(0, 30)}`;
  if (!at.checkVisibility()) return `what has the focus is hidden: ${name}`;
  const probe = document.body.appendChild(document.createElement('i'));
  probe.style.color = 'var(--accent)';
  const accent = getComputedStyle(probe).color;
  probe.remove();
  for (let place = at, up = 0; place && up < 4; place = place.parentElement, up += 1) {
    const style = getComputedStyle(place);
    if (style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1) return '';
    if (style.borderTopColor === accent && parseFloat(style.borderTopWidth) >= 1) return '';
  }
  return `the focus is not to be seen: ${name}`;
}"""
"""Why a person without a mouse cannot tell where they are; "" where they can."""
MOST_STOPS = 80


def reach(page: Any, selector: str, key: str = "Tab") -> int:
    """Press Tab until the control is reached; gives how often. The focus is seen at every stop."""
    for stops in range(1, MOST_STOPS):
        page.keyboard.press(key)
        assert page.evaluate(FOCUS) == ""
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return stops
    raise AssertionError(f"{selector} is not reached by {MOST_STOPS} times {key}")


@pytest.mark.slow
def test_the_whole_journey_without_a_mouse(quick: Site, opened: Callable[..., Any]) -> None:
    page = opened(quick.url("explore"))
    page.wait_for_function("document.querySelector('#kind')?.value === 'RTX-4090'")
    reach(page, ".skip")
    page.keyboard.press("Enter")
    reach(page, "#start")
    page.keyboard.press("Enter")
    page.wait_for_selector(".job .state-done")
    assert page.evaluate("document.activeElement.id") == "start"
    reach(page, ".job a.open")
    page.keyboard.press("Enter")

    page.wait_for_selector("#points .ag-row-selected")
    page.wait_for_function("document.activeElement.id === 'content'")
    reach(page, "#plot")
    page.keyboard.press("End")
    page.wait_for_selector("#card-title:text-matches('Point 7 of 8')")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#card-title:text-matches('Point 7 of 8')")
    assert reach(page, "#budget [role=slider]") < 24
    # The table is one stop on the way back to the top, however long it is.
    page.keyboard.press("Control+Home")
    reach(page, "#nav-plan", "Shift+Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#plan-headline .big")
    assert page.evaluate(FOCUS) == ""
    reach(page, "#nav-export")
    page.keyboard.press("Enter")
    page.wait_for_selector(".files a")
    reach(page, ".files a[href*='plan.json']")
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert download.value.suggested_filename == "plan.json"
