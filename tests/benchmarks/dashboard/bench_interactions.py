"""How quickly the dashboard answers everything a person does on its pages, in a real browser. Not a test.

    python -m tests.benchmarks.dashboard.bench_interactions [--quick] [--explorations N] [--times N]

One exploration of 20,000 points on two meshes lies beside 99 copies of the ready-made one. The clock is the
page's: it begins with the key or the press of the mouse and ends in the frame in which what was asked for is
there (card and ring of another point, other rows, another page with its content). Results are dated files in
tests/benchmarks/results/dashboard.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tensoropt_app.jobs.manager import JobManager
from tensoropt_app.library import READY_MADE, Library
from tensoropt_app.safety import prepare
from tensoropt_app.server import create_app, listen

from tests.app.support.samples_app import GIB, exploration, point, space
from tests.benchmarks.machine import Taking, dated, described, part_described, write
from tests.docs.screenshots import FLAGS

POINTS, EXPLORATIONS, TIMES, WARM_UP = 20_000, 100, 9, 1
WANTED_S = 0.3
"""Median that every interaction is meant to stay below."""
LONGEST_MS = 5_000
REST_MS = 700
"""Between two interactions: what follows an answer (address, tables below) is over by then."""
WATCH = """([of, before, since]) => {
  const now = Function('return ' + of), was = before ? Function('return ' + before)() : now();
  const watched = window.watched = {};
  document.addEventListener(since, () => { watched.since = performance.now(); }, {capture: true, once: true});
  const look = () => {
    let seen = null;
    try { seen = now(); } catch (fault) { seen = null; }
    const there = before ? seen : seen && seen !== was;
    if (watched.since && there) watched.took = performance.now() - watched.since;
    else requestAnimationFrame(look);
  };
  look();
}"""
CALL = {"args": [], "kwargs": {"input_ids": {"tensor": [16, 64], "dtype": "int64"}}}
"""What a step reads, so that points have tokens/s."""
PLOT = "document.querySelector('#graph .js-plotly-plot')"
TITLE = "document.querySelector('#card-title')?.innerText"
PLACE = f"""(k) => {{
  const plot = {PLOT}, l = plot._fullLayout, t = plot.data[2], box = plot.getBoundingClientRect();
  const i = Math.floor(t.x.length * k);
  return [box.left + l.xaxis._offset + l.xaxis.d2p(t.x[i]), box.top + l.yaxis._offset + l.yaxis.d2p(t.y[i])];
}}"""
HOVERED = "document.querySelector('#graph .hoverlayer')?.childElementCount > 0"
SHOWN = {
    "plan": "document.querySelector('#plan-headline .big')",
    "frontier": f"{PLOT}?.data?.length >= 10 && {TITLE}",
    "runs": "document.querySelector('#runs-table .ag-row')",
    "clusters": "document.querySelector('#clusters-answer')?.innerText",
    "export": "document.querySelector('#command-1')?.innerText",
    "explore": "document.querySelector('#start')?.checkVisibility()",
}
"""What has to be there of every page."""


class Visit:
    """A page of the browser and what it is timed with."""

    def __init__(self, page: Any, times: int):
        self.page = page
        self.times = times
        self.found: dict[str, list[float]] = {}

    def watch(self, of: str, *, there: bool = False, since: str = "mousedown") -> None:
        """Begin: until ``of`` is another value than now, or (``there``) until it is true."""
        self.page.wait_for_timeout(REST_MS)
        self.page.evaluate(WATCH, [of, "0" if there else None, since])

    def end(self, name: str, number: int) -> None:
        """What was asked for is there, or did not come: then the others still have their turn."""
        from playwright.sync_api import TimeoutError as NoAnswerError

        try:
            self.page.wait_for_function("window.watched.took", timeout=LONGEST_MS)
            took = self.page.evaluate("window.watched.took / 1e3")
        except NoAnswerError:
            took = math.inf
        if number >= WARM_UP:
            self.found.setdefault(name, []).append(took)

    def numbers(self) -> range:
        return range(self.times + WARM_UP)

    def keys(self, name: str, place: str, of: str) -> None:
        self.page.locator(place).focus()
        for number in self.numbers():
            self.watch(of, since="keydown")
            self.page.keyboard.press("ArrowLeft")
            self.end(name, number)

    def clicks(self, name: str, place: str, of: str) -> None:
        self.page.locator(place).scroll_into_view_if_needed()
        for number in self.numbers():
            self.watch(of)
            self.page.click(place)
            self.end(name, number)

    def points(self, of: str) -> None:
        self.page.locator("#graph").scroll_into_view_if_needed()
        for number in self.numbers():
            x, y = self.page.evaluate(PLACE, 0.06 + 0.03 * number)
            self.page.mouse.move(x, y, steps=3)
            self.page.wait_for_function(HOVERED)
            self.watch(of)
            self.page.mouse.down()
            self.page.mouse.up()
            self.end("point click", number)

    def choices(self, name: str, place: str, labels: Sequence[str], of: str) -> None:
        """One option of a select after another."""
        for number in self.numbers():
            self.page.locator(place).scroll_into_view_if_needed()
            self.page.click(place)
            label = labels[number % len(labels)]
            option = self.page.locator("[role=option]:visible").filter(has_text=re.compile(label)).first
            option.wait_for()
            self.watch(of)
            option.click()
            self.end(name, number)

    def pages(self) -> None:
        self.page.evaluate("window.scrollTo(0, 0)")
        for number in self.numbers():
            for name in ("plan", "runs", "clusters", "export", "explore", "frontier"):
                shown = f"document.documentElement.dataset.page === '{name}' && !!({SHOWN[name]})"
                self.watch(shown, there=True)
                self.page.click(f"#nav-{name}")
                self.end(f"page {name}", number)
                if name == "plan":  # with another point than the last time, as after a choice
                    self.page.wait_for_timeout(REST_MS)

    def switches(self, labels: Sequence[str]) -> None:
        of = f"[{TITLE}?.split(' of ')[1], {PLOT}.data[1].x.length].join()"
        self.choices("exploration switch", "#exploration", labels, of)


def measure(points: int, explorations: int, times: int) -> dict[str, Any]:
    """Seconds of every interaction."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "explorations"
        source = next(f for f in sorted(READY_MADE.iterdir()) if f.is_dir())
        for number in range(explorations - 1):
            shutil.copytree(source, folder / f"run{number:03d}")
        memory = np.linspace(1, 79, points) * GIB
        many = [point(float(m), float(40 * GIB / m) / 100, space=i % 2) for i, m in enumerate(memory)]
        long = exploration(many, (space((2, 4)), space((4, 2))))
        replace(long, model=long.model.model_copy(update={"call": CALL})).save(folder / "long")
        jobs = JobManager(Path(home) / "jobs")
        app = create_app(Library(folder), jobs)
        server = listen(app, "127.0.0.1", 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        prepare(app).join()
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
                page = browser.new_page(viewport={"width": 1280, "height": 800})
                page.set_default_timeout(LONGEST_MS)
                page.goto(f"http://127.0.0.1:{server.server_port}/frontier?x=opened-long&budget=60GiB")
                page.wait_for_selector("#points .ag-row-selected", timeout=120_000)
                page.wait_for_function(SHOWN["frontier"])
                found = visited(Visit(page, times))
                browser.close()
        finally:
            server.shutdown()
            jobs.close()
    return {"points": points, "explorations": explorations, "seconds": found}


def visited(visit: Visit) -> dict[str, list[float]]:
    """The whole visit, in the order of a person's."""
    ring = f"{PLOT}.data[9].x[0]"
    rows = "[...document.querySelectorAll('#points .ag-center-cols-container .ag-row')]"
    # Also the head's mark: without a sort, rows are in the order of falling time.
    order = (
        f"{rows}.map(r => r.getAttribute('row-index') + ':' + r.getAttribute('row-id')).sort().join()"
        " + document.querySelector('#points .ag-header-cell[col-id=time]').getAttribute('aria-sort')"
    )
    visit.keys("budget slider", "#budget [role=slider]", f"{TITLE} && {ring}")
    visit.keys("arrow key", "#plot", f"[{TITLE}, {ring}].join()")
    visit.points(f"[{TITLE}, {ring}].join()")
    visit.page.click("#plot-options summary")
    visit.clicks(
        "plot's option (log memory)", "#page-frontier >> text=log memory", f"{PLOT}._fullLayout.xaxis.type"
    )
    visit.clicks(
        "plot's option (compute / network)",
        "#page-frontier label:has-text('compute / network')",
        f"{PLOT}.data[4].visible + ''",
    )
    title = f"{PLOT}._fullLayout.yaxis.title.text"
    visit.choices("axis and unit", "#axis-y", ("tokens/s", "time per step"), title)
    filtered = "document.querySelector('#points-count').innerText"
    visit.choices("filter by mesh", "#filter-mesh", ("2x4", "4x2"), f"{PLOT}.data[2].x[0] + {filtered}")
    visit.clicks("table sort", "#points .ag-header-cell[col-id=time] .ag-header-cell-label", order)
    visit.pages()
    visit.switches(("run001", "gpt2-tiny on"))
    return visit.found


def markdown(results: dict[str, Any]) -> str:
    """One table: medians and the slowest of every interaction."""
    lines = [
        f"# What a person does on the dashboard, {results['date']}",
        "",
        f"Taken from {described(results)}. When it was done: {part_described(results['taken'])}. Headless "
        f"Chromium without a GPU, {results['points']:,} points, {results['explorations']} explorations.",
        "",
        "| from key or mouse to the frame that shows it | median | 90 % within | slowest |",
        "| --- | --- | --- | --- |",
    ]
    missed = []
    for name, taken in results["seconds"].items():
        times = sorted(taken)
        cells = statistics.median(times), times[int(0.9 * (len(times) - 1))], times[-1]
        lines.append(f"| {name} | " + " | ".join(map(_words, cells)) + " |")
        if cells[0] > WANTED_S:
            missed.append(f"{name} ({_words(cells[0])})")
    met = f"not reached by {', '.join(missed)}" if missed else "met"
    return "\n".join([*lines, "", f"Wanted of each: a median of at most {WANTED_S} s; {met}.", ""])


def _words(seconds: float) -> str:
    return f"{seconds:.2f} s" if math.isfinite(seconds) else f"not seen within {LONGEST_MS / 1e3:.0f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=POINTS)
    parser.add_argument("--explorations", type=int, default=EXPLORATIONS)
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--quick", action="store_true", help="few of all, into out/dashboard")
    options = parser.parse_args(arguments)
    sizes = (500, 5, 2) if options.quick else (options.points, options.explorations, options.times)
    taking = Taking()
    results = {**taking.about, **measure(*sizes), "taken": taking.part()}
    write(dated("dashboard", "interactions", quick=options.quick), results, markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
