"""WCAG 2 A and AA as axe-core checks them on every page, light and dark, wide and narrow; and no mouse."""

from __future__ import annotations

from typing import Any

import pytest
from tensoropt_app.state import PAGES

TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
AXE = """async (tags) => (await axe.run(document, { runOnly: { type: 'tag', values: tags } })).violations
  .flatMap(rule => rule.nodes.map(node => `${rule.id}: ${node.target.join(' ')}: ${rule.help}`))"""
READY = {"result": "#what-if td", "new": "#upload input[aria-label]", "details": "#operators .ag-row"}
"""What is there last on each page."""


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_every_page_keeps_the_rules(site, opened, axe, scheme, width):
    viewport = {"width": width, "height": 900}
    page = opened(site.url(query="x=opened-small&point=3"), color_scheme=scheme, viewport=viewport)
    page.wait_for_selector(READY["result"])
    page.evaluate(axe)
    assert set(READY) == set(PAGES)
    found: list[str] = []
    for name, ready in READY.items():
        page.click(f"#nav-{name}")
        page.wait_for_selector(ready, state="attached")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found += [f"{name}: {fault}" for fault in page.evaluate(AXE, TAGS)]
    page.click("#nav-result")
    for number in range(4):
        page.click(f"#below > details >> nth={number} >> summary >> nth=0")
    page.wait_for_selector("#faster p")
    page.click("#points-show")
    page.wait_for_selector("#points .ag-row")
    found += [f"below: {fault}" for fault in page.evaluate(AXE, TAGS)]
    page.click("#export-open")
    page.wait_for_selector(".files a")
    page.wait_for_timeout(500)  # it slides in
    found += [f"export: {fault}" for fault in page.evaluate(AXE, TAGS)]
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
def test_the_whole_journey_without_a_mouse(quick, opened):
    page = opened(quick.url("new"))
    page.wait_for_selector("#devices-said:not(:empty)")
    reach(page, ".skip")
    page.keyboard.press("Enter")
    reach(page, "#start")
    page.keyboard.press("Enter")
    page.wait_for_selector(".job .state-done")
    assert page.evaluate("document.activeElement.id") == "start"
    reach(page, ".job a.open")
    page.keyboard.press("Enter")

    page.wait_for_selector("#choices td")
    page.wait_for_function("document.activeElement.id === 'content'")
    reach(page, "#plot")
    page.keyboard.press("End")
    page.wait_for_function("location.search.includes('point=8')")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#answer:has-text('needs 70.0 of')")
    page.keyboard.press("ArrowLeft")  # that was the recommended one
    page.wait_for_function("location.search.includes('point=6')")
    page.wait_for_selector("#choices tr:has-text('recommended') a.use")
    page.wait_for_timeout(1000)  # what else follows it
    assert reach(page, "#choices a.use") < 24
    page.keyboard.press("Enter")
    page.wait_for_selector("#choices tr:has-text('recommended') a.chosen")
    page.keyboard.press("Control+Home")
    reach(page, "#export-open", "Shift+Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector(".files a")
    reach(page, ".files a[href*='plan.json']")
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert download.value.suggested_filename == "plan.json"
    page.keyboard.press("Escape")
    page.wait_for_selector(".files a", state="hidden")
    page.wait_for_function("document.activeElement.id === 'export-open'")
    reach(page, "#answer a")
    page.keyboard.press("Enter")
    page.wait_for_selector("#details-head strong")
    assert page.evaluate(FOCUS) == ""
