"""The frontier page under a person's hands."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from contrast_app import PALE
from site_app import Site
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
def test_the_first_screen_is_never_empty(site: Any, opened: Callable[..., Any]) -> None:
    page = drawn(opened(site.address))
    assert "per device" in page.inner_text("#card")
    page.wait_for_function("document.querySelectorAll('#points .ag-row').length > 5")
    assert "Assumptions" in page.inner_text("#page-frontier")


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
def test_keys_pressed_faster_than_answers_come_all_count(site: Any, opened: Callable[..., Any]) -> None:
    page = drawn(opened(site.url(query="x=opened-long&point=501")), "Point 501 of")
    page.focus("#plot")
    for key in ("ArrowRight",) * 23 + ("PageUp",) * 3 + ("ArrowLeft",) * 6:
        page.keyboard.press(key)
    page.wait_for_selector(f"#card-title:text-matches('Point {501 + 23 + 30 - 6} of')")


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


@pytest.mark.slow
def test_a_drag_is_answered_in_the_browser_and_asks_the_server_when_it_rests(
    site: Any, opened: Callable[..., Any]
) -> None:
    page = drawn(opened(site.url(query="x=opened-small&point=8")), "Point 8 of 8")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.post_data or ""))
    thumb, track = page.locator("#budget [role=slider]"), page.locator("#budget").bounding_box()
    box = thumb.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 2, y)
    page.mouse.down()
    rests, last = 0, time.monotonic()
    for step in range(40):
        page.mouse.move(track["x"] + track["width"] * (0.9 - 0.01 * step), y)
        # A machine that is busy moves so slowly that the slider does rest.
        rests, last = rests + (time.monotonic() - last > 0.1), time.monotonic()
    page.wait_for_function(f"({RING})() < 80")  # before the mouse is let go
    page.mouse.up()
    page.wait_for_selector("#card-title:text-matches('Point [3-5] of 8')")
    page.wait_for_function("location.search.includes('budget=')")
    assert 1 <= sum('"output":"..state.data' in body for body in asked) < 8 + rests
    before = select_title(page)
    page.click("#pick-fastest")  # of those within the budget
    page.wait_for_selector("#card-title:text-matches('Point [3-5] of 8')")
    thumb.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowRight")  # back where it was: nothing is asked twice
    page.keyboard.press("Home")
    page.wait_for_selector("text=/No plan fits/")
    assert before != select_title(page)


GRIP = "#graph .annotation[data-index='1']"
LABEL = f"""document.querySelector("{GRIP}").textContent"""


@pytest.mark.slow
def test_the_budgets_line_is_dragged(site: Any, opened: Callable[..., Any]) -> None:
    page = drawn(opened(site.url(query="x=opened-small&budget=55GiB")), "Point 5 of 8")
    box = page.locator(GRIP).bounding_box()
    x, _ = page.evaluate(PIXEL, [55, 500])
    assert box["x"] < x < box["x"] + box["width"]
    page.mouse.move(x, box["y"] + 5)
    page.mouse.down()
    x, _ = page.evaluate(PIXEL, [35, 500])
    page.mouse.move(x, box["y"] + 40, steps=3)
    page.wait_for_function(f"({RING})() === 30")  # before the mouse is let go
    page.wait_for_function(f"/3[45].* GiB/.test({LABEL})")
    page.mouse.up()
    page.wait_for_selector("#card-title:text-matches('Point 3 of 8')")
    page.wait_for_selector("#card .verdict:text-matches('[Ff]its your 3[45].* GiB')")
    # Let go at the right edge there is none.
    page.mouse.move(x, box["y"] + 5)
    page.mouse.down()
    page.mouse.move(page.evaluate(PIXEL, [84, 500])[0], box["y"], steps=3)
    page.mouse.up()
    page.wait_for_function(f"{LABEL} === '◂ budget'")
    page.wait_for_function("!location.search.includes('budget=')")


@pytest.mark.slow
def test_answers_that_come_late_do_not_move_the_slider_back(site: Any, opened: Callable[..., Any]) -> None:
    page = drawn(opened(site.url(query="x=opened-small&budget=55GiB")), "Point 5 of 8")
    page.evaluate(
        """() => {
          const { set_props } = window.dash_clientside, { fetch } = window;
          const later = (ms) => new Promise((go) => setTimeout(go, ms));
          window.rests = [];
          window.dash_clientside.set_props = (name, props) => {
            if (name === 'budget-rest') window.rests.push(props.data);
            set_props(name, props);
          };
          window.fetch = async (...asked) => {
            const answer = await fetch(...asked);
            const { changedPropIds: changed = [] } = JSON.parse(asked[1]?.body || "{}");
            // The mouse moves on just before the view of 45 GiB is there, and rests before it follows.
            if (changed.includes("budget-rest.data")) {
              if (window.rests.length === 1) set_props("budget", { value: 21 });
              else await later(800);
            } else if (changed.includes("controls.data")) await later(400);
            return answer;
          };
          set_props("budget", { value: 45 });
        }"""
    )
    page.wait_for_selector("#card-title:text-matches('Point 2 of 8')")
    page.wait_for_timeout(3000)
    assert page.evaluate("window.rests") == [45, 21]
    assert page.inner_text("#card-title").startswith("Point 2 of 8")


@pytest.mark.slow
def test_filters_and_addresses_that_lead_nowhere_are_said(site: Any, opened: Callable[..., Any]) -> None:
    page = opened(site.url(query="x=opened-small&point=999&budget=lots&mesh=9x9"))
    said = page.locator("#frontier-notes")
    for words in (
        "Point 999 does not exist: this frontier has 8 points.",
        "“lots” is not understood as “budget”.",
        "No point of this frontier has mesh 9x9",
    ):
        said.locator(f"text={words}").wait_for()
    nothing = "No point passes the filters"
    page.wait_for_function(f"document.querySelector('#points .ag-overlay')?.innerText === '{nothing}'")
    page.wait_for_function(
        f"[...document.querySelectorAll('#graph .annotation')].some((a) => a.textContent === '{nothing}')"
    )
    page.wait_for_selector("#answer-costs:text-is('no point passes the filters.')")
    # What the address asked for is said until something else is chosen.
    page.fill("#headroom", "20")
    page.keyboard.press("Enter")
    said.locator("text=does not exist").wait_for(state="detached")


ROWS = "document.querySelector('#points .ag-root')?.getAttribute('aria-rowcount') - 1"


@pytest.mark.slow
def test_the_table_begins_with_notable_points_and_the_selected_one(
    site: Any, opened: Callable[..., Any]
) -> None:
    page = drawn(opened(site.url(query="x=opened-long&point=501")), "Point 501 of")
    few = page.evaluate(ROWS)
    assert 3 < few <= 31
    page.wait_for_selector("#points .ag-row-selected[row-id='500']")
    # Of thirty rows the first is above the selected one, which is in view.
    page.evaluate("document.querySelector('#points .ag-body-viewport').scrollTop = 0")
    page.wait_for_selector("#points .ag-cell[col-id='is']:text-matches('leanest')")
    page.click("#points-all:has-text('all 20,000')")
    page.wait_for_function(f"{ROWS} === 20000")
    page.wait_for_selector("#points .ag-row-selected[row-id='500']")
    page.click("#points-all:has-text('notable')")
    page.wait_for_function(f"{ROWS} === {few}")


@pytest.mark.slow
def test_the_budget_is_among_the_first_ten_stops_of_the_tab_key(
    site: Any, opened: Callable[..., Any]
) -> None:
    page = drawn(opened(site.url(query="x=opened-small")))
    page.evaluate("document.activeElement.blur()")
    stops = []
    for _ in range(10):
        page.keyboard.press("Tab")
        stops.append(page.evaluate("document.activeElement.id"))
    assert "budget-text" in stops


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


PLOT = "document.querySelector('#graph .js-plotly-plot')"
RANGES = """() => {
  const l = document.querySelector('#graph .js-plotly-plot')._fullLayout;
  return [...l.xaxis.range, ...l.yaxis.range];
}"""
TICKS = (
    "[...document.querySelectorAll('#graph .xtick text')].map(e => Number(e.textContent.replace(',', '')))"
)


def zoom_in(page: Any, x: float, y: float) -> None:
    """Drag a box; again where the plot was drawn anew while it was dragged."""
    before = page.evaluate(RANGES)
    for _ in range(3):
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + 200, y + 120, steps=5)
        page.mouse.up()
        for _ in range(10):
            page.wait_for_timeout(100)
            if page.evaluate(RANGES) != before:
                return
    raise AssertionError("a box that is dragged zooms in")


@pytest.mark.slow
def test_a_zoom_stays_and_ticks_of_a_log_axis_ascend(site: Any, opened: Callable[..., Any]) -> None:
    page = drawn(opened(site.url(query="x=opened-small&point=1")))
    box = page.locator("#graph").bounding_box()
    zoom_in(page, box["x"] + 200, box["y"] + 100)
    zoomed = page.evaluate(RANGES)
    option(page, "compute / network")
    page.wait_for_function("document.querySelector('#graph .js-plotly-plot')?.data[4].visible === true")
    page.click("#scheme-button")
    page.wait_for_function("document.documentElement.dataset.scheme === 'dark'")
    page.click("#pick-fastest")
    page.wait_for_selector("#card-title:text-matches('Point 7 of 8')")
    page.wait_for_timeout(500)
    assert page.evaluate(RANGES) == pytest.approx(zoomed)
    option(page, "log memory")
    page.wait_for_function(
        "document.querySelector('#graph .js-plotly-plot')?._fullLayout.xaxis.type === 'log'"
    )
    page.wait_for_function(f"({TICKS}).length > 2")
    ticks = page.evaluate(TICKS)
    assert ticks == sorted(set(ticks))


@pytest.mark.slow
def test_back_goes_back_and_the_tab_says_where(site: Any, opened: Callable[..., Any]) -> None:
    page = drawn(opened(site.url(query="x=opened-small&point=2"), haste=4), "Point 2 of 8")
    page.wait_for_function("document.title.startsWith('Frontier · gpt2-tiny on dgx-h100')")
    for button, number in (("fastest", 7), ("leanest", 1)):
        page.wait_for_timeout(300)  # what follows at once is one step
        page.click(f"#pick-{button}")
        page.wait_for_selector(f"#card-title:text-matches('Point {number} of 8')")
        page.wait_for_function(f"location.search.includes('point={number}')")
    page.click("#nav-plan")
    page.wait_for_function("document.title.startsWith('Plan · gpt2-tiny')")
    page.go_back()
    page.wait_for_function("document.documentElement.dataset.page === 'frontier'")
    for number in (7, 2):
        page.go_back()
        page.wait_for_selector(f"#card-title:text-matches('Point {number} of 8')")
    page.go_forward()
    page.wait_for_selector("#card-title:text-matches('Point 7 of 8')")


@pytest.mark.slow
def test_another_exploration_is_drawn_with_the_answer_to_its_choice(
    site: Any, opened: Callable[..., Any]
) -> None:
    """Once: callbacks that follow find it drawn."""
    page = drawn(opened(site.url(query="x=opened-small&point=2")), "Point 2 of 8")
    page.wait_for_timeout(1000)  # what follows the first picture is over
    figures: list[str] = []

    def answered(response: Any) -> None:
        if "_dash-update-component" not in response.url or response.status != 200:
            return
        told = response.json()
        figures.extend(
            how for how in ("sideUpdate", "response") if "figure" in told.get(how, {}).get("graph", {})
        )

    page.on("response", answered)
    page.click("#exploration")
    page.click("[role=option]:has-text('long'):visible")
    page.wait_for_selector("#card-title:text-matches('of 20000')")
    page.wait_for_selector("#points .ag-row-selected", state="attached")
    page.wait_for_function("location.search.includes('x=opened-long')")
    page.wait_for_timeout(1000)
    assert figures == ["sideUpdate"]
    # The ring is where the card says.
    memory = page.evaluate(f"({RING})()")
    assert page.inner_text("#card strong").startswith(f"{memory:.3g}")


def choose(page: Any, label: str, title: str) -> None:
    page.click("#exploration")
    page.click(f"[role=option]:has-text('{label}'):visible")
    page.wait_for_selector(f"#card-title:text-matches('{title}')")
    page.wait_for_timeout(1500)  # what follows an answer; changes that are closer are one step of the history


@pytest.mark.slow
def test_a_double_click_shows_all_of_what_is_drawn_now(site: Any, opened: Callable[..., Any]) -> None:
    """Not of what was drawn first."""
    page = drawn(opened(site.url(query="x=opened-long&point=2")))
    choose(page, "small", "of 8")
    option(page, "log memory")
    page.wait_for_function(
        "document.querySelector('#graph .js-plotly-plot')._fullLayout.xaxis.type === 'log'"
    )
    page.wait_for_timeout(500)
    whole, box = page.evaluate(RANGES), page.locator("#graph .nsewdrag").first.bounding_box()
    x, y = box["x"] + 0.6 * box["width"], box["y"] + 0.2 * box["height"]
    page.mouse.dblclick(x, y)
    page.wait_for_timeout(800)
    assert page.evaluate(RANGES) == whole
    zoom_in(page, x, y)
    page.mouse.dblclick(x, y)
    page.wait_for_timeout(800)
    assert page.evaluate(RANGES) == whole


@pytest.mark.slow
def test_back_goes_one_choice_back_and_forward_returns(site: Any, opened: Callable[..., Any]) -> None:
    page = drawn(opened(site.url(query="x=opened-small&point=2")), "Point 2 of 8")
    choose(page, "long", "of 20000")
    choose(page, "gpt2 on dgx-h100", SHIPPED)
    page.go_back()
    page.wait_for_selector("#card-title:text-matches('of 20000')")
    page.go_back()
    page.wait_for_selector("#card-title:text-matches('Point 2 of 8')")
    page.go_forward()
    page.wait_for_selector("#card-title:text-matches('of 20000')")
    page.go_forward()
    page.wait_for_selector(f"#card-title:text-matches('{SHIPPED}')")


@pytest.mark.slow
def test_an_exploration_that_is_gone_is_said(site: Any, opened: Callable[..., Any]) -> None:
    page = opened(site.url(query="x=job-gone&point=4"))
    page.wait_for_selector("text=This exploration cannot be shown")


UNNAMED = """() => [...document.querySelectorAll('button, input, [role=slider], a, [role=combobox]')]
  .filter(e => e.offsetParent !== null && !['hidden', 'file'].includes(e.type) && e.tabIndex >= 0)
  .filter(e => !e.closest('.js-plotly-plot, .ag-root, details:not([open])'))
  .filter(e => !(e.innerText || e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')
     || (e.labels && e.labels.length && e.labels[0].innerText) || e.title))
  .map(e => e.outerHTML.slice(0, 160))"""
"""Controls that no words say the purpose of."""


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


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        pytest.param(1280, "dark", marks=pytest.mark.slow),
        pytest.param(400, "dark", marks=pytest.mark.slow),
    ],
)
def test_pages_fit_and_can_be_read(site: Any, opened: Callable[..., Any], width: int, scheme: str) -> None:
    """In both schemes, wide and narrow; every control says what it is for."""
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
    page = opened(site.url("frontier", "x=opened-small&point=4&other=6"), **options)
    for name, selector in SHOWN.items():
        page.click(f"#nav-{name}")
        page.wait_for_selector(selector)
        page.wait_for_timeout(300)  # what only appears now would not be seen
        assert page.evaluate("document.documentElement.dataset.scheme") == scheme
        assert not remaining(page, "() => document.documentElement.scrollWidth > window.innerWidth"), name
        assert remaining(page, PALE) == []
        assert remaining(page, UNNAMED) == []


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


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    "width", [390, 1280, *(pytest.param(width, marks=pytest.mark.slow) for width in (768, 1920))]
)
def test_names_of_planners_stand_at_their_own_marks(
    site: Site, opened: Callable[..., Any], width: int
) -> None:
    """On every window: as drawn, the mark nearest to a name is of a planner that it names."""
    page = drawn(opened(site.url(query="x=opened-close"), viewport={"width": width, "height": 844}))
    said = page.evaluate(NAMES)
    assert said
    for name, nearest in said:
        assert any(nearest.lower().startswith(one.lower()) for one in name.split(", ")), (name, nearest)
