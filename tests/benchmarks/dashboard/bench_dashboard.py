"""How quickly the frontier page answers on a frontier of 20,000 points, in a real browser. Not a test.

    python -m tests.benchmarks.dashboard.bench_dashboard [--quick] [--points N] [--moves N]

A key moves the budget's slider, or the selection; the clock runs in the page from the key's event to the
frame in which both the card and the ring in the plot show the new point. Results are dated files in
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensoropt_app.jobs.manager import JobManager
from tensoropt_app.library import Library
from tensoropt_app.server import create_app, listen

from tests.app.support.samples_app import long_exploration
from tests.benchmarks.machine import Taking, dated, described, part_described, write
from tests.docs.screenshots import FLAGS

POINTS, MOVES, WARM_UP = 20_000, 40, 5
WANTED_S = 0.5
"""Median that the slider is meant to stay below."""
WATCH = """() => {
  const ring = () => document.querySelector('#graph .js-plotly-plot').data[9].x[0];
  const title = () => document.querySelector('#card-title').innerText;
  window.answers = [];
  document.addEventListener('keydown', () => {
    const since = performance.now(), before = [ring(), title()];
    const look = () => {
      if (ring() !== before[0] && title() !== before[1]) window.answers.push(performance.now() - since);
      else if (performance.now() - since < 100000) requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
  }, true);
}"""


def measure(points: int, moves: int) -> dict[str, Any]:
    """Seconds until the page is drawn, and of every answer to a slider's move and to an arrow key."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as home:
        long_exploration(points).save(Path(home) / "explorations" / "long")
        jobs = JobManager(Path(home) / "jobs")
        server = listen(create_app(Library(Path(home) / "explorations"), jobs), "127.0.0.1", 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            begun = time.perf_counter()
            page.goto(f"http://127.0.0.1:{server.server_port}/frontier?x=opened-long&budget=60GiB")
            page.wait_for_selector("#points .ag-row-selected", timeout=120_000)
            page.wait_for_function("document.querySelector('#graph .js-plotly-plot')?.data?.length === 10")
            opened_s = time.perf_counter() - begun
            page.evaluate(WATCH)
            slider = answers(page, "#budget [role=slider]", moves)
            keys = answers(page, "#plot", moves)
            browser.close()
        server.shutdown()
        jobs.close()
    return {"points": points, "opened_s": opened_s, "slider_s": slider, "arrow_keys_s": keys}


def answers(page: Any, place: str, moves: int) -> list[float]:
    """Seconds per key pressed on a control, one at a time."""
    page.locator(place).focus()
    page.evaluate("window.answers = []")
    for number in range(moves + WARM_UP):
        page.keyboard.press("ArrowLeft")
        page.wait_for_function("n => window.answers.length === n", arg=number + 1, timeout=60_000)
    return [ms / 1e3 for ms in page.evaluate("window.answers")[WARM_UP:]]


def markdown(results: dict[str, Any]) -> str:
    """One table: medians and the slowest of every kind of answer."""
    lines = [
        f"# Dashboard, {results['date']}",
        "",
        f"Taken from {described(results)}. When it was done: {part_described(results['taken'])}. "
        f"Headless Chromium without a GPU, {results['points']:,} points.",
        "",
        f"The page is drawn {results['opened_s']:.1f} s after its address was entered. From a key's event to "
        "the frame that shows the new point in card and plot:",
        "",
        "| | median | 90 % within | slowest |",
        "| --- | --- | --- | --- |",
    ]
    for name, title in (("slider_s", "budget slider"), ("arrow_keys_s", "arrow keys")):
        times = sorted(results[name])
        cells = statistics.median(times), times[int(0.9 * (len(times) - 1))], times[-1]
        lines.append(f"| {title} | " + " | ".join(f"{t:.2f} s" for t in cells) + " |")
    met = "met" if statistics.median(results["slider_s"]) <= WANTED_S else "missed"
    return "\n".join([*lines, "", f"Wanted of the slider: a median of at most {WANTED_S} s; {met}.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=POINTS)
    parser.add_argument("--moves", type=int, default=MOVES)
    parser.add_argument("--quick", action="store_true", help="few points and moves, into out/dashboard")
    options = parser.parse_args(arguments)
    points, moves = (500, 3) if options.quick else (options.points, options.moves)
    taking = Taking()
    results = {**taking.about, **measure(points, moves), "taken": taking.part()}
    write(dated("dashboard", "dashboard", quick=options.quick), results, markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
