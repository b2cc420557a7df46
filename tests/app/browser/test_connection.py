"""A server that ends while a page is open, and is started again."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tensoropt_app.jobs.manager import JobManager
from tensoropt_app.library import Library
from tensoropt_app.server import create_app, listen

from tests.app.browser.conftest import HASTE, another_person


def started(explorations: Path, home: Path, port: int) -> tuple[Any, JobManager]:
    jobs = JobManager(home)
    server = listen(create_app(Library(explorations, jobs.results), jobs), "127.0.0.1", port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, jobs


def ended(server: Any, jobs: JobManager) -> None:
    server.shutdown()
    server.server_close()
    jobs.close()


@pytest.mark.slow
def test_a_dead_server_is_said_and_found_again(browser, explorations, tmp_path):
    # Not `opened`, which takes the browser's own errors about a dead server for faults of the page.
    server, jobs = started(explorations, tmp_path, 0)
    page = browser.new_page()
    try:
        page.set_default_timeout(60_000)
        page.add_init_script(HASTE.replace("HASTE", "4"))
        page.goto(f"http://127.0.0.1:{server.server_port}/result?x=opened-small&point=5")
        page.wait_for_selector("#answer:has-text('needs 50.0 of 80 GiB')")
        with page.expect_response("**/alive"):
            pass
        assert page.is_hidden("#connection")
        port = server.server_port
        ended(server, jobs)
        page.wait_for_selector("#connection:has-text('does not answer')")
        page.focus("#plot")
        page.keyboard.press("Home")  # nobody hears it now
        page.wait_for_timeout(300)
        server, jobs = started(explorations, tmp_path, port)
        page.wait_for_selector("#connection", state="hidden")
        page.focus("#plot")
        page.keyboard.press("End")
        page.wait_for_selector("#answer:has-text('needs 80.0 of 80 GiB')")
    finally:
        another_person(page)
        page.close()
        ended(server, jobs)
