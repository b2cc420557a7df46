"""The list of jobs under a person's hands."""

import pytest
from tensoropt_app.jobs.request import Request

from tensoropt.question.question import Question

ASKED = [Question(model=f"zoo:mlp?depth={n}", cluster="dgx-h100") for n in range(1, 4)]
REQUESTS = [Request(question, "mlp", "dgx-h100") for question in ASKED]


@pytest.mark.slow
def test_an_open_log_stays_open_while_its_job_goes_on(ticking, opened):
    for request in REQUESTS[:2]:
        ticking.jobs.submit(request)
    page = opened(ticking.url("new"))
    page.wait_for_selector(".job .at-work")
    page.click(".job summary >> nth=0")
    page.focus(".job details .log >> nth=0")
    page.evaluate("for (const e of document.querySelectorAll('.job, .job details, .log')) e.mine = true")
    for _ in range(2):
        log = page.inner_text(".job details .log >> nth=0")
        other = "t => document.querySelector('.job details .log').innerText !== t"
        page.wait_for_function(other, arg=log, timeout=20_000)
    assert page.evaluate("document.querySelector('.job details').open")
    assert page.evaluate("[...document.querySelectorAll('.job, .job details, .log')].every(e => e.mine)")
    assert page.evaluate("document.activeElement.className") == "log"
    ticking.jobs.submit(REQUESTS[2])  # a new card comes before them
    page.wait_for_function("document.querySelectorAll('.job').length === 3")
    assert page.evaluate("document.querySelectorAll('.job details')[1].open")
    assert page.evaluate("document.activeElement.className") == "log"
    for job in ticking.jobs.jobs():
        ticking.jobs.cancel(job.id)
    page.wait_for_function("document.querySelectorAll('.job .state-cancelled').length === 3")


@pytest.mark.slow
def test_other_devices_are_planned_from_the_result_and_the_end_is_told(held, opened):
    page = opened(held.url(query="x=opened-small&point=1"), haste=4)
    page.wait_for_selector("#answer .verdict-big")
    page.wait_for_function("document.querySelector('#bar-devices').value === '8 × H100-80GB'")
    page.fill("#bar-devices", "8 × Abacus")
    page.keyboard.press("Enter")
    page.wait_for_selector("#bar-said .note-error:has-text(\"'Abacus' is not a known kind of device\")")
    page.fill("#bar-devices", "16 × H100-80GB")
    page.focus("#budget")  # to leave a field starts nothing
    page.wait_for_selector("#bar-said:has-text('Press Enter in that field to plan it on 16 x H100-80GB')")
    assert held.jobs.jobs() == []
    page.focus("#bar-devices")
    with page.expect_request_finished(lambda r: '"output":"..notice.children' in (r.post_data or "")):
        page.keyboard.press("Enter")
    page.wait_for_selector("#bar-said:has-text('gpt2-tiny on 16 × H100-80GB')")
    (job,) = held.jobs.jobs()
    held.release()
    page.wait_for_selector("#notice:has-text('gpt2-tiny on 16 × H100-80GB'):has-text('done.')")
    page.click("#notice >> text=open the result")
    page.wait_for_function(f"location.search.includes('job-{job.id}')")
    page.click("#notice-close")
    page.wait_for_selector("#notice .note", state="detached")
