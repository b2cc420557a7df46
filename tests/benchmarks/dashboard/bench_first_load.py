"""How long a first load of the dashboard takes, with nothing kept by the browser. Not a test.

    python -m tests.benchmarks.dashboard.bench_first_load [--quick] [--loads N]

Every load is a browser context of its own. The clock is the page's: it begins with the navigation and ends in
the frame in which the frontier's plot has its lines and the card its title. Beside the wall clock stands what
the browser's main thread was busy for until then (Chrome's TaskDuration), which other work on the machine
disturbs less. Results are dated files in tests/benchmarks/results/dashboard.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensoropt_app.jobs.manager import JobManager
from tensoropt_app.library import Library
from tensoropt_app.safety import prepare
from tensoropt_app.server import create_app, listen

from tests.benchmarks.machine import Taking, dated, described, part_described, write
from tests.docs.screenshots import FLAGS

LOADS, WARM_UP = 9, 2
WANTED_S = 1.5
"""Median that a first load is meant to stay below."""
WATCH = """(() => {
  const look = () => {
    const plot = document.querySelector('#graph .js-plotly-plot .scatterlayer .trace path');
    const title = document.querySelector('#card-title')?.innerText;
    if (plot && !window.seenPlot) window.seenPlot = performance.now();
    if (title && !window.seenCard) window.seenCard = performance.now();
    if (!(plot && title)) requestAnimationFrame(look);
    else window.drawn = performance.now();
  };
  requestAnimationFrame(look);
})()"""
KINDS = {
    "painted_s": "first paint of anything",
    "card_s": "card",
    "plot_s": "plot",
    "drawn_s": "card and plot",
    "busy_s": "main thread busy until then",
    "script_s": "of it, scripts",
}


def measure(loads: int) -> dict[str, Any]:
    """Seconds of every load, by what was waited for, and its bytes as they travelled."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as home:
        jobs = JobManager(Path(home) / "jobs")
        app = create_app(Library(), jobs)
        server = listen(app, "127.0.0.1", 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        prepare(app).join()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            address = f"http://127.0.0.1:{server.server_port}/"
            found = [load(browser, address) for _ in range(loads + WARM_UP)][WARM_UP:]
            browser.close()
        server.shutdown()
        jobs.close()
    return {kind: [one[kind] for one in found] for kind in (*KINDS, "bytes")}


def load(browser: Any, address: str) -> dict[str, float]:
    """One load by somebody who was never here."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    chrome = context.new_cdp_session(page)
    chrome.send("Performance.enable")
    page.add_init_script(WATCH)
    page.goto(address, wait_until="commit")
    page.wait_for_function("window.drawn", polling=20, timeout=120_000)
    metrics = {m["name"]: m["value"] for m in chrome.send("Performance.getMetrics")["metrics"]}
    told = page.evaluate(
        """() => ({
          painted: performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN,
          bytes: performance.getEntriesByType('resource').concat(performance.getEntriesByType('navigation'))
            .reduce((sum, entry) => sum + entry.transferSize, 0),
          card: window.seenCard, plot: window.seenPlot, drawn: window.drawn,
        })"""
    )
    context.close()
    return {
        **{f"{name}_s": told[name] / 1e3 for name in ("painted", "card", "plot", "drawn")},
        "busy_s": metrics["TaskDuration"],
        "script_s": metrics["ScriptDuration"],
        "bytes": told["bytes"],
    }


def markdown(results: dict[str, Any]) -> str:
    """One table: medians, and the quickest and slowest load."""
    lines = [
        f"# First load of the dashboard, {results['date']}",
        "",
        f"Taken from {described(results)}. When it was done: {part_described(results['taken'])}. "
        f"Headless Chromium without a GPU, nothing kept by the browser, {len(results['drawn_s'])} loads. "
        f"Until card and plot stand, {statistics.median(results['bytes']) / 1e6:.2f} MB travel.",
        "",
        "| from the navigation until | median | quickest | slowest |",
        "| --- | --- | --- | --- |",
    ]
    for kind, title in KINDS.items():
        times = results[kind]
        cells = statistics.median(times), min(times), max(times)
        lines.append(f"| {title} | " + " | ".join(f"{t:.2f} s" for t in cells) + " |")
    median = statistics.median(results["drawn_s"])
    met = "met" if median <= WANTED_S else f"not reached: {median:.2f} s"
    return "\n".join([*lines, "", f"Wanted of card and plot: a median of at most {WANTED_S} s; {met}.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", type=int, default=LOADS)
    parser.add_argument("--quick", action="store_true", help="few loads, into out/dashboard")
    options = parser.parse_args(arguments)
    taking = Taking()
    results = {**taking.about, **measure(3 if options.quick else options.loads), "taken": taking.part()}
    write(dated("dashboard", "first-load", quick=options.quick), results, markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
