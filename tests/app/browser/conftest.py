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
LONG = 20_000


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
    yield from launched()


def launched() -> Iterator[Any]:
    path = chromium()
    if path is None:
        missing(f"no Chromium: apt-get install chromium, or name one in {NAMED}")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing("playwright is not installed: pip install playwright")
    with sync_playwright() as started:
        found = started.chromium.launch(executable_path=path, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="session")
def explorations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small explorations and one of 20,000 points."""
    folder = tmp_path_factory.mktemp("explorations")
    exploration().save(folder / "small")
    long_exploration(LONG).save(folder / "long")
    return folder


@pytest.fixture(scope="session")
def site(explorations: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A dashboard whose jobs are real."""
    with running(tmp_path_factory.mktemp("home"), explorations, run) as found:
        yield found


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
        if parts.scheme not in ("data", "blob") and parts.hostname != "127.0.0.1":
            self.faults.append(f"request off this machine: {request.url}")

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self.faults.append(f"console: {message.text}")


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages: each in a context of its own (another person) or in another page's (another tab)."""
    watch, contexts = Watch(), []

    def open_page(url: str, *, beside: Any = None, **options: Any) -> Any:
        if beside is None:
            context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options)
            contexts.append(context)
        else:
            context = beside.context
        page = watch.on(context.new_page())
        page.goto(url)
        return page

    yield open_page
    faults = list(watch.faults)  # what a page says while it is being closed is not its fault
    for context in contexts:
        context.close()
    assert faults == []
