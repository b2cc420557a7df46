"""Ten people at once for a while: no job is lost, and neither the server nor the pages grow."""

import gc
import os
import time
from itertools import cycle

import psutil
import pytest

MINUTES = float(os.environ.get("TENSOROPT_SOAK_MINUTES", "0.5"))
SESSIONS = 10
MOST = 100 << 20
"""Bytes by which the server, and each page, may grow after its first third: caches that fill."""


def look(page, site):
    page.goto(site.url(query="x=opened-long"))
    page.wait_for_selector("#answer .verdict-big")
    page.focus("#plot")
    page.keyboard.press("Home")
    page.wait_for_function("location.search.includes('point=1')")


def choose(page, site):
    page.goto(site.url(query="x=opened-small"))
    page.wait_for_selector("#answer .verdict-big")
    page.fill("#budget", "50 GiB")
    page.keyboard.press("Enter")
    page.wait_for_selector("#answer .figures span:has-text('needs 50')")


def explain(page, site):
    page.goto(site.url("details", "x=opened-small&point=3"))
    page.wait_for_selector("#details-head strong:has-text('per device')")


def ask(page, site):
    page.goto(site.url("new"))
    page.wait_for_selector("#devices-said:not(:empty)")
    with page.expect_request_finished(lambda r: "start-said" in (r.post_data or "")):
        page.click("#start")


@pytest.mark.slow
def test_ten_sessions_lose_no_job_and_no_memory(quick, opened):
    pages = [opened(quick.url("new")) for _ in range(SESSIONS)]
    began, asked, server, sizes = time.monotonic(), 0, psutil.Process(), []
    acts = cycle((ask, look, choose, look, explain, look, choose))
    while len(sizes) < 3 or time.monotonic() - began < 60 * MINUTES:
        for page in pages:
            act = next(acts)
            act(page, quick)
            asked += act is ask
        gc.collect()
        heaps = [page.evaluate("performance.memory.usedJSHeapSize") for page in pages]
        sizes.append((server.memory_info().rss, max(heaps)))
    while any(job.active for job in quick.jobs.jobs()):
        time.sleep(0.1)
    assert [job.state for job in quick.jobs.jobs()] == ["done"] * asked
    for first, last in zip(sizes[len(sizes) // 3], sizes[-1], strict=True):
        assert last - first < MOST, sizes
