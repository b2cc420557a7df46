"""Pictures of every page, light and dark, for the ready-made exploration: ``make screenshots``."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tensoropt_app.jobs.manager import JobManager
from tensoropt_app.server import create_app, library_with, listen

from tensoropt.errors import TensorOptError

OUT = Path(__file__).parents[2] / "app" / "screenshots"
SIZE = {"width": 1280, "height": 800}
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
SHOTS = {
    "result": ("result", "", "#what-if td"),
    "new": ("new", "", "#devices-said:not(:empty)"),
    "details": ("details", "", "#operators .ag-row"),
}
"""Name -> page, the URL's query, and what must be there before the picture is taken."""
WAIT_MS = 2500


def main() -> int:
    """Write all pictures; needs playwright and Chromium."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise TensorOptError("no Chromium: apt-get install chromium")
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        jobs = JobManager(Path(folder))
        server = listen(create_app(library_with(jobs), jobs), "127.0.0.1", 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            for scheme in ("light", "dark"):
                for name in SHOTS:
                    _shoot(browser, f"http://127.0.0.1:{server.server_port}/", name, scheme)
            browser.close()
        server.shutdown()
        jobs.close()
    return 0


def _shoot(browser: Any, address: str, name: str, scheme: str) -> None:
    path, query, ready = SHOTS[name]
    page = browser.new_page(viewport=SIZE, color_scheme=scheme)
    page.goto(f"{address}{path}?{query}")
    page.wait_for_selector(ready, state="attached", timeout=120_000)
    # Figures are drawn after their place is there; how long that takes is an assumption.
    page.wait_for_timeout(WAIT_MS)
    page.screenshot(path=OUT / f"{name}-{scheme}.png")
    page.close()
    print(f"{name}, {scheme}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
