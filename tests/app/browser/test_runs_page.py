"""The runs page: several frontiers, shown, hidden, named and opened."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contrast_app import PALE
from samples_app import GIB, exploration, of_model, point
from site_app import Site, running
from tensoropt_app.jobs.worker import run
from tensoropt_app.library import READY_MADE

from tests.app.browser.conftest import another_person
from tests.app.browser.test_frontier_page import UNNAMED, remaining

PLOT = "document.querySelector('#runs-graph .js-plotly-plot')"
VISIBLE = f"{PLOT}?.data?.filter(t => t.visible !== false).map(t => t.name).length"
COUNT = len(list(READY_MADE.iterdir())) + 3
"""The explorations below, and what ships."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two of one step in other dtypes, and one of another batch."""
    folder = tmp_path_factory.mktemp("runs")
    for name, dtype, batch, share in (
        ("a", "float32", 32, 1.0),
        ("b", "bfloat16", 32, 0.5),
        ("c", "float32", 64, 2.0),
    ):
        found = exploration([point((i + 1) * 10 * share * GIB, (0.8 - 0.1 * i) * share) for i in range(6)])
        found = of_model(found, batch=batch)
        replace(found, settings={**found.settings, "dtype": dtype}).save(folder / name)
    with running(tmp_path_factory.mktemp("home"), folder, run) as found:
        yield found


def drawn(page: Any, count: int) -> Any:
    """Wait until so many frontiers are visible."""
    page.wait_for_function(f"{VISIBLE} === {count}")
    page.wait_for_selector("#runs-table .ag-row[row-id='opened-a'] .ag-checkbox")
    return page


def box(key: str) -> str:
    return f"#runs-table .ag-row[row-id='{key}'] .ag-selection-checkbox input"


def cell(key: str, column: str) -> str:
    return f"#runs-table .ag-row[row-id='{key}'] .ag-cell[col-id='{column}']"


def check_readable(page: Any) -> None:
    assert not remaining(page, "() => document.documentElement.scrollWidth > window.innerWidth")
    assert remaining(page, PALE) == []
    assert remaining(page, UNNAMED) == []


@pytest.mark.slow
def test_runs_are_readable_and_hiding_one_asks_nothing_and_is_in_the_url(
    runs: Site, opened: Callable[..., Any]
) -> None:
    page = drawn(opened(runs.url("runs")), COUNT)
    check_readable(page)
    page.wait_for_timeout(500)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.post_data or ""))
    page.click(box("opened-b"))
    drawn(page, COUNT - 1)
    page.wait_for_function("location.search.includes('runs=')")
    page.wait_for_timeout(300)
    assert not [body for body in asked if "runs-" in body]  # but jobs are asked for all the time
    assert page.inner_text("#runs-count").startswith(f"{COUNT - 1} of {COUNT} shown")
    again = drawn(opened(page.url), COUNT - 1)
    assert not again.is_checked(box("opened-b"))
    again.click("#runs-none")
    drawn(again, 0)
    again.wait_for_selector("text=No run is shown")
    assert "runs=none" in again.url
    again.go_back()
    drawn(again, COUNT - 1)


def reads(page: Any, key: str, column: str, text: str) -> None:
    """Wait until a cell has exactly this text."""
    page.wait_for_function(
        "([c, t]) => document.querySelector(c)?.innerText === t", arg=[cell(key, column), text]
    )


@pytest.mark.slow
def test_a_link_may_be_wrong(runs: Site, opened: Callable[..., Any]) -> None:
    page = drawn(opened(runs.url("runs", "runs=opened-a,gone,%252&runaxes=sample,nonsense")), 1)
    page.wait_for_selector("text=2 of the runs in this link are not here.")
    page.wait_for_function(f"{PLOT}.layout.yaxis.title.text.startsWith('time per sample')")
    page.goto(runs.url("runs", "runs=all&runaxes=sample"))
    drawn(page, COUNT)
    with page.expect_download() as download:
        page.click("#runs-csv")
    text = Path(download.value.path()).read_text(encoding="utf-8-sig")
    assert text.splitlines()[0].startswith('"name","leanest, GiB","fastest, s","model"')
    assert len(text.splitlines()) == COUNT + 1


def edited(page: Any, key: str, column: str, text: str) -> None:
    page.dblclick(cell(key, column))
    page.wait_for_selector(f"{cell(key, column)} input")
    page.keyboard.press("Control+a")
    page.keyboard.type(text)
    page.keyboard.press("Enter")


@pytest.mark.slow
def test_names_stay(runs: Site, opened: Callable[..., Any]) -> None:
    page = drawn(opened(runs.url("runs", "x=opened-a&runs=all")), COUNT)
    edited(page, "opened-a", "name", "plain <b>")
    page.wait_for_function("document.querySelector('#exploration').value === 'plain <b>'")
    edited(page, "opened-b", "name", "x" * 81)
    page.wait_for_selector("text=a name has at most 80 characters, this one has 81")
    reads(page, "opened-b", "name", "gpt2-tiny on dgx-h100")
    another_person(page)
    again = drawn(opened(page.url), COUNT)
    again.fill("#runs-search", "plain")
    again.wait_for_function(
        "document.querySelectorAll('#runs-table .ag-center-cols-container .ag-row').length === 1"
    )
    again.click("#runs-only")
    drawn(again, 1)
    assert again.inner_text("#runs-said").startswith("One run")
    kept = json.loads((runs.jobs.root / "labels.json").read_text())["runs"]
    assert list(kept.values()) == [{"name": "plain <b>"}]
    again.fill("#runs-search", "")
    edited(again, "opened-a", "name", " ")
    reads(again, "opened-a", "name", "gpt2-tiny on dgx-h100")


PIXEL = f"""([i, j]) => {{
  const l = {PLOT}._fullLayout, t = {PLOT}.data[i], box = {PLOT}.getBoundingClientRect();
  return [box.left + l.xaxis._offset + l.xaxis.d2p(t.x[j]), box.top + l.yaxis._offset + l.yaxis.d2p(t.y[j])];
}}"""


@pytest.mark.slow
def test_a_point_says_its_plan_and_the_page_what_is_alike(runs: Site, opened: Callable[..., Any]) -> None:
    page = drawn(opened(runs.url("runs", "runs=opened-a,opened-b")), 2)
    page.wait_for_timeout(500)
    x, y = page.evaluate(PIXEL, [1, 2])
    page.mouse.move(x - 30, y - 30)
    page.mouse.move(x, y)
    page.wait_for_selector("text=/bfloat16, point 3 of 6: 15 GiB, 0.3 s · DP/")
    page.mouse.click(x, y)
    page.wait_for_selector("#card-title:text-matches('Point 3 of 6')")
    page.wait_for_function("location.pathname === '/frontier' && location.search.includes('x=opened-b')")
    page.click("#nav-runs")
    page.wait_for_function("document.documentElement.dataset.page === 'runs'")
    drawn(page, 2)
    page.wait_for_selector("text=/Alike: model gpt2-tiny.*batch 32.*Differ: dtype[.]/")
    assert page.locator("#runs-said .note").count() == 0
    page.click(box("opened-c"))
    page.wait_for_selector("text=Steps have batches of different sizes: compare the time per sample")
    page.click("text=per sample")
    page.wait_for_function(f"{PLOT}.layout.yaxis.title.text.startsWith('time per sample')")
    page.wait_for_function("location.search.includes('runaxes=sample')")
    page.wait_for_function("document.querySelectorAll('#runs-said .note').length === 0")
    assert page.evaluate(f"{PLOT}.data.map(t => t.visible)").count(True) == 3
    again = drawn(opened(page.url), 3)
    again.wait_for_function(f"{PLOT}.layout.yaxis.title.text.startsWith('time per sample')")
    again.wait_for_function("document.querySelector('#runs-time input[value=sample]').checked")
    again.click("text=samples per second")
    again.wait_for_function(f"{PLOT}.layout.yaxis.title.text === 'throughput (log scale), samples/s'")
    again.wait_for_function("location.search.includes('runaxes=rate')")
    again.click("#page-runs >> text=log time")
    again.wait_for_function(f"{PLOT}._fullLayout.yaxis.type === 'linear'")
    again.wait_for_function("decodeURIComponent(location.search).includes('runaxes=liny,rate')")
    last = opened(again.url)
    last.wait_for_function(f"{PLOT}?._fullLayout?.yaxis.type === 'linear'")
    last.wait_for_function(f"{PLOT}._fullLayout.xaxis.type === 'log'")
    assert again.locator("#runs-said .note").count() == 0


@pytest.mark.slow
def test_keys_alone_reach_everything(runs: Site, opened: Callable[..., Any]) -> None:
    page = drawn(opened(runs.url("runs", "runs=opened-a,opened-c")), 2)
    page.focus("#runs-plot")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    page.wait_for_selector("text=/batch 64.*, point 1 of 6: 20 GiB/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") != "runs-plot"
    page.focus("#runs-none")
    for _ in range(4):  # into the table, and out of it again
        page.keyboard.press("Tab")
    assert not page.evaluate("document.activeElement.closest('#runs-none')")
    page.click(cell("opened-a", "name"))
    page.keyboard.press("Space")  # the box of the row
    drawn(page, 1)
    page.keyboard.press("Space")
    drawn(page, 2)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_function("location.pathname === '/frontier' && location.search.includes('x=opened-a')")


@pytest.mark.slow
def test_the_page_fits_a_phone_and_can_be_read_in_the_dark(runs: Site, opened: Callable[..., Any]) -> None:
    options = {"color_scheme": "dark", "viewport": {"width": 390, "height": 800}}
    check_readable(drawn(opened(runs.url("runs"), **options), COUNT))


@pytest.mark.slow
def test_a_file_that_cannot_be_read_is_said(tmp_path: Path, opened: Callable[..., Any]) -> None:
    exploration().save(tmp_path / "lib" / "a")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "labels.json").write_text("{{{")
    with running(tmp_path / "home", tmp_path / "lib", run) as site:
        page = opened(site.url("runs"))
        page.wait_for_selector("text=/Names cannot be read from .*labels.json/")
        assert (tmp_path / "home" / "labels.json").read_text() == "{{{"
