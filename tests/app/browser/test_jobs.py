"""The list of jobs under a person's hands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from site_app import Site
from tensoropt_app.jobs.request import Request

from tensoropt.question.question import Question
from tests.app.browser.conftest import is_notice

REQUEST = Request(Question(model="zoo:mlp", cluster="dgx-h100"), "mlp", "dgx-h100")


@pytest.mark.slow
def test_an_open_log_stays_open_while_its_job_goes_on(ticking: Site, opened: Callable[..., Any]) -> None:
    for _ in range(2):
        ticking.jobs.submit(REQUEST)
    page = opened(ticking.url("explore"))
    page.wait_for_selector(".job .at-work")
    page.click(".job summary >> nth=0")
    page.focus(".job details .log >> nth=0")
    page.evaluate("for (const e of document.querySelectorAll('.job, .job details, .log')) e.mine = true")
    for _ in range(2):
        log = page.inner_text(".job details .log >> nth=0")
        page.wait_for_function(
            "t => document.querySelector('.job details .log').innerText !== t", arg=log, timeout=10_000
        )
    assert page.evaluate("document.querySelector('.job details').open")
    assert page.evaluate("[...document.querySelectorAll('.job, .job details, .log')].every(e => e.mine)")
    assert page.evaluate("document.activeElement.className") == "log"
    ticking.jobs.submit(REQUEST)  # a new card comes before them
    page.wait_for_function("document.querySelectorAll('.job').length === 3")
    assert page.evaluate("document.querySelectorAll('.job details')[1].open")
    assert page.evaluate("document.activeElement.className") == "log"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["plan", *(pytest.param(name, marks=pytest.mark.slow) for name in ("frontier", "export"))]
)
def test_jobs_go_on_after_another_page_was_loaded_whole(
    ticking: Site, opened: Callable[..., Any], name: str
) -> None:
    ticking.jobs.submit(REQUEST)
    page = opened(ticking.url(name, "x=opened-small&point=1"))
    page.wait_for_selector("#card-title", state="attached")
    page.click("#nav-explore")
    words = page.inner_text(".job .at-work .small")
    for _ in range(2):
        page.wait_for_function(
            "t => document.querySelector('.job .at-work .small').innerText !== t", arg=words, timeout=8_000
        )
        words = page.inner_text(".job .at-work .small")


@pytest.mark.slow
def test_an_answer_that_was_lost_stops_the_list_for_seconds_only(
    ticking: Site, opened: Callable[..., Any]
) -> None:
    ticking.jobs.submit(REQUEST)
    page = opened(ticking.url("explore"), haste=4)
    page.wait_for_selector(".job .at-work")

    def lose(route: Any) -> None:
        if '"output":"..finished.data' in (route.request.post_data or "") and not lost:
            lost.append(route)  # never answered
        else:
            route.continue_()

    lost: list[Any] = []
    page.route("**/_dash-update-component*", lose)
    while not lost:
        page.wait_for_timeout(50)
    words = page.inner_text(".job .at-work .small")
    page.wait_for_function(
        "t => document.querySelector('.job .at-work .small').innerText !== t", arg=words, timeout=15_000
    )
    page.unroute_all(behavior="ignoreErrors")


@pytest.mark.slow
def test_a_job_that_ends_is_told_on_every_page(held: Site, opened: Callable[..., Any]) -> None:
    page = opened(held.url("frontier", "x=opened-small&point=1"), haste=4)
    page.wait_for_selector("#points .ag-row-selected", state="attached")
    with page.expect_request_finished(is_notice):
        job = held.jobs.submit(REQUEST)
    held.release()
    page.wait_for_selector("#notice:has-text('mlp on dgx-h100: done.')")
    page.click("#notice >> text=open the frontier")
    page.wait_for_function(f"location.search.includes('job-{job.id}')")
    page.click("#notice-close")
    page.wait_for_selector("#notice .note", state="detached")
    page.wait_for_selector("#notice-close", state="hidden")
