"""A server that ends while a page is open, and is started again."""

from urllib.parse import urlsplit

import pytest
from site_app import running
from tensoropt_app.jobs.worker import run

from tests.app.browser.conftest import HASTE, another_person


@pytest.mark.slow
def test_a_dead_server_is_said_and_found_again(browser, explorations, tmp_path):
    # Not `opened`, which takes the browser's own errors about a dead server for faults of the page.
    page = browser.new_page()
    page.set_default_timeout(60_000)
    page.add_init_script(HASTE.replace("HASTE", "4"))
    with running(tmp_path, explorations, run) as site:
        page.goto(site.url(query="x=opened-small&point=5"))
        page.wait_for_selector("#answer:has-text('needs 50.0 of 80 GiB')")
        with page.expect_response("**/alive"):
            pass
        assert page.is_hidden("#connection")
    page.wait_for_selector("#connection:has-text('does not answer')")
    page.focus("#plot")
    page.keyboard.press("Home")  # nobody hears it now
    page.wait_for_timeout(300)
    with running(tmp_path, explorations, run, port=urlsplit(site.address).port):
        page.wait_for_selector("#connection", state="hidden")
        page.focus("#plot")
        page.keyboard.press("End")
        page.wait_for_selector("#answer:has-text('needs 80.0 of 80 GiB')")
        another_person(page)
        page.close()
