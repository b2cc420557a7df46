"""A real browser and a running dashboard. Any request off this machine or console error fails the test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import workers_app
from samples_app import exploration, long_exploration
from site_app import Site, running
from tensoropt_app.jobs.worker import run

REQUIRED = "TENSOROPT_BROWSER_REQUIRED"
"""Set where a browser must be there: then its absence fails these tests instead of skipping them."""
NAMED = "TENSOROPT_CHROMIUM"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WIDE = {"width": 1280, "height": 800}
LONG = 20_000
HASTE = """const now = Date.now, wait = window.setTimeout, start = now();
Date.now = () => start + HASTE * (now() - start);
window.setTimeout = (call, ms, ...more) => wait(call, ms / HASTE, ...more);"""
"""A page whose clock runs faster: its pulse, its patience and its steps of the history come sooner."""


def chromium() -> str | None:
    """Chromium as Debian installs it, or what the environment names."""
    named = os.environ.get(NAMED)
    if named:
        return named if Path(named).is_file() else None
    return shutil.which("chromium") or shutil.which("chromium-browser")


def missing(why: str) -> None:
    """Skip, or fail where a browser is required."""
    (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(why)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A browser with one profile, which keeps compiled scripts; without one each page compiles them anew."""
    path = chromium()
    if path is None:
        missing(f"no Chromium: apt-get install chromium, or name one in {NAMED}")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing("playwright is not installed: pip install playwright")
    with sync_playwright() as started:
        how = {"executable_path": path, "args": FLAGS, "viewport": WIDE}
        profile = started.chromium.launch_persistent_context("", **how)
        yield profile
        profile.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """axe-core, as a wheel brings it along."""
    return str(pytest.importorskip("axe_playwright_python.base").AXE_SCRIPT)


@pytest.fixture(scope="session")
def explorations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small exploration, and one of 20,000 points."""
    folder = tmp_path_factory.mktemp("explorations")
    exploration().save(folder / "small")
    long_exploration(LONG).save(folder / "long")
    return folder


@pytest.fixture(scope="session")
def site(explorations: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The dashboard of all tests: it compresses its scripts once, and the browser keeps them."""
    with running(tmp_path_factory.mktemp("home"), explorations, run) as found:
        yield found


def working(target: Callable[..., None]) -> Any:
    """A fixture: the dashboard with other work for its jobs. Afterwards it has no jobs."""

    def fixture(site: Site) -> Iterator[Site]:
        site.jobs.target = target
        yield site
        site.clear()

    return pytest.fixture(fixture)


real, quick, held = working(run), working(workers_app.quick), working(workers_app.held)
ticking, endless = working(workers_app.ticking), working(workers_app.endless)


@dataclass
class Watch:
    """What a page did that it must not do."""

    faults: list[str] = field(default_factory=list)

    def on(self, page: Any) -> Any:
        page.on("request", self._request)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.faults.append(f"page error: {error}"))
        page.set_default_timeout(float(os.environ.get("TENSOROPT_BROWSER_TIMEOUT_MS", 120_000)))
        return page

    def _request(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob", "file") and parts.hostname != "127.0.0.1":
            self.faults.append(f"request off this machine: {request.url}")

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self.faults.append(f"console: {message.text}")


def another_person(page: Any) -> None:
    """Forget what the browser keeps of a person."""
    page.evaluate("window.localStorage.clear()")
    page.context.clear_cookies()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages, which are tabs of one person; the next test's person is another one."""
    watch, pages = Watch(), []

    def open_page(url: str, *, viewport: Any = WIDE, color_scheme: str = "light", haste: int = 1) -> Any:
        page = watch.on(browser.new_page())
        pages.append(page)
        page.set_viewport_size(viewport)
        page.emulate_media(color_scheme=color_scheme)
        if haste != 1:
            page.add_init_script(HASTE.replace("HASTE", str(haste)))
        page.goto(url)
        return page

    yield open_page
    faults = list(watch.faults)  # what a page says while it is being closed is not its fault
    for page in pages:
        another_person(page)
        page.close()
    assert faults == []
