"""How quickly the dashboard answers beside 100 explorations of one step, in a real browser. Not a test.

    python -m tests.benchmarks.dashboard.bench_library [--quick] [--explorations N] [--toggles N]

The ready-made exploration, copied: all of the same step, which is the most work for the table of devices ×
memory. The runs page shows all of them in one plot. Results are dated files in
tests/benchmarks/results/dashboard.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tensoropt_app.jobs.manager import JobManager
from tensoropt_app.library import READY_MADE, Library
from tensoropt_app.server import create_app, listen
from tensoropt_app.state import View
from tensoropt_app.views.profile import devices_by_memory
from tensoropt_app.views.runs import choices, runs_of

from tests.benchmarks.machine import Taking, dated, described, part_described, write
from tests.docs.screenshots import FLAGS

EXPLORATIONS, TOGGLES = 100, 20
WANTED_S = 0.5
"""Median that a toggle is meant to stay below."""
RUNS = "document.querySelector('#runs-graph .js-plotly-plot')"
WATCH = """(wanted) => {
  const watched = window.watched = {};
  const clicked = () => { watched.clicked = performance.now(); };
  document.addEventListener('click', clicked, {capture: true, once: true});
  const look = () => {
    if (watched.clicked && LINES === wanted) watched.seen = performance.now();
    else requestAnimationFrame(look);
  };
  look();
}"""
"""Notes when a click came and in which frame so many lines were there: in the page, as a driver that moves a
mouse takes longer than what is measured."""
AXIS = "document.querySelector('#graph .js-plotly-plot')?._fullLayout?.xaxis?.type"


def measure(count: int, toggles: int) -> dict[str, Any]:
    """Seconds of the list, of the table and of toggles, of the first time and of later ones."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "explorations"
        source = next(f for f in sorted(READY_MADE.iterdir()) if f.is_dir())
        for number in range(count):
            shutil.copytree(source, folder / f"run{number:03d}")
        library = Library(folder)
        view = View(exploration="opened-run000")
        found = {
            "explorations": count,
            "first_list_s": seconds(lambda: choices(library)),
            "first_runs_s": seconds(lambda: runs_of(library)),
            "first_table_s": seconds(lambda: devices_by_memory(library, view)),
            "runs_s": [seconds(lambda: runs_of(library)) for _ in range(toggles)],
            "list_s": [seconds(lambda: choices(library)) for _ in range(toggles)],
            "table_s": [seconds(lambda: devices_by_memory(library, view)) for _ in range(toggles)],
        }
        jobs = JobManager(Path(home) / "jobs")
        server = listen(create_app(library, jobs), "127.0.0.1", 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/"
            found["toggle_s"] = browsed(address, toggles)
            found["runs_open_s"], found["runs_toggle_s"] = runs_browsed(address, toggles)
        finally:
            server.shutdown()
            jobs.close()
    return found


def seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def browsed(address: str, toggles: int) -> list[float]:
    """Seconds from a click on an axis' toggle to the plot that shows it."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(f"{address}frontier?x=opened-run000")
        page.wait_for_function(f"{AXIS} === 'linear'")
        page.wait_for_selector("#points .ag-row-selected", timeout=120_000)
        page.wait_for_timeout(1000)
        found = []
        for number in range(toggles):
            begun = time.perf_counter()
            page.click("text=log memory")
            page.wait_for_function(f"{AXIS} === '{'linear' if number % 2 else 'log'}'")
            found.append(time.perf_counter() - begun)
            page.wait_for_timeout(500)
        browser.close()
    return found


def runs_browsed(address: str, toggles: int) -> tuple[list[float], list[float]]:
    """Seconds until the runs page has drawn all frontiers; from a click on a run's box to the plot without or
    with it."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    box = "#runs-table .ag-row[row-id='opened-run000'] .ag-selection-checkbox input"
    lines = (
        f"[...{RUNS}.querySelectorAll('.scatterlayer .trace')].filter(e => e.style.display !== 'none').length"
    )
    opened, found = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        for _ in range(3):
            begun = time.perf_counter()
            page.goto(f"{address}runs?x=opened-run000&runs=all")
            page.wait_for_function(f"{RUNS}?.querySelectorAll('.scatterlayer .trace').length > 0")
            page.wait_for_selector(box)
            opened.append(time.perf_counter() - begun)
        page.wait_for_timeout(2000)
        whole = page.evaluate(lines)
        for number in range(toggles):
            page.evaluate(WATCH.replace("LINES", lines), whole - 1 + number % 2)
            page.click(box)
            page.wait_for_function("window.watched.seen")
            found.append(page.evaluate("(window.watched.seen - window.watched.clicked) / 1000"))
            page.wait_for_timeout(1500)  # axes follow, and the address
        browser.close()
    return opened, found


def markdown(results: dict[str, Any]) -> str:
    """One table: the first time, medians and the slowest."""
    lines = [
        f"# Dashboard beside {results['explorations']} explorations, {results['date']}",
        "",
        f"Taken from {described(results)}. When it was done: {part_described(results['taken'])}. "
        "Headless Chromium without a GPU.",
        "",
        "| | first time | median | slowest |",
        "| --- | --- | --- | --- |",
    ]
    for name, title in (
        ("list", "list of explorations"), ("table", "devices × memory → time"), ("runs", "table of runs"),
    ):  # fmt: skip
        times = results[f"{name}_s"]
        first = f"{results[f'first_{name}_s']:.2f} s"
        lines.append(f"| {title} | {first} | {statistics.median(times):.3f} s | {max(times):.3f} s |")
    medians = []
    for name, title in (
        ("toggle", "toggle of an axis"),
        ("runs_toggle", "showing or hiding a run among all"),
    ):
        toggles = results[f"{name}_s"]
        medians.append(statistics.median(toggles))
        lines.append(f"| {title}, in the browser | | {medians[-1]:.2f} s | {max(toggles):.2f} s |")
    first, *later = results["runs_open_s"]
    median = statistics.median(later)
    lines.append(
        f"| opening the runs page, all shown | {first:.2f} s | {median:.2f} s | {max(later):.2f} s |"
    )
    met = "met" if max(medians) <= WANTED_S else "missed"
    return "\n".join([*lines, "", f"Wanted of a toggle: a median of at most {WANTED_S} s; {met}.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--explorations", type=int, default=EXPLORATIONS)
    parser.add_argument("--toggles", type=int, default=TOGGLES)
    parser.add_argument("--quick", action="store_true", help="few of both, into out/dashboard")
    options = parser.parse_args(arguments)
    count, toggles = (5, 3) if options.quick else (options.explorations, options.toggles)
    taking = Taking()
    results = {**taking.about, **measure(count, toggles), "taken": taking.part()}
    write(dated("dashboard", "library", quick=options.quick), results, markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
