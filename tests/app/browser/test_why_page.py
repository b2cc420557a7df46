"""Why not faster, under a person's hands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from site_app import Site, running
from tensoropt_app.jobs.worker import run

import tensoropt
from tests.costs.models import four

Opened = Callable[..., Any]


def test_what_is_known_at_once_and_what_is_missing(site: Site, opened: Opened) -> None:
    page = opened(site.url("plan", f"x=opened-small&point=3&budget={50 * 2**30}"))
    page.wait_for_selector(".why .binding")
    assert "Computation binds: 67 % of a step of 600 ms." in page.inner_text(".why .binding")
    assert "Point 5 fits 50 GiB and is faster" in page.inner_text(".why .binding")
    # Made up, without its operators: what cannot be said is said.
    assert "nothing can be explored from it" in page.inner_text("#why-quick")
    page.wait_for_selector("#why-simulated .note")
    row = page.locator("#why-quick tr", has_text="+1 GiB of memory")
    assert "400 ms" in row.inner_text()
    row.locator("a").click()
    page.wait_for_function("location.search.includes('point=5')")
    page.wait_for_function("document.querySelector('.why .binding').innerText.includes('400 ms')")
    # The limit is part of the link.
    assert f"budget={50 * 2**30}" in page.url


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A dashboard on a real exploration of four layers, whose jobs are real."""
    monkeypatch.setenv("TENSOROPT_CACHE", str(tmp_path / "cache"))
    model, args, kwargs = four()
    found = tensoropt.explore(model, args, kwargs, cluster="dgx-h100[2]", micro_batches=(1, 2))
    found.save(tmp_path / "explorations" / "four")
    with running(tmp_path / "home", tmp_path / "explorations", run) as site:
        yield site


@pytest.mark.slow
def test_a_change_is_explored_and_found_again_after_a_reload(real: Site, opened: Opened) -> None:
    page = opened(real.url("plan", "x=opened-four&point=1"))
    page.wait_for_selector("#why-simulated table")
    assert "communication free" in page.inner_text("#why-simulated")
    row = page.locator("#why-deeper tr", has_text="computing in bfloat16")
    row.get_by_role("button", name="Explore: computing in bfloat16").click()
    page.wait_for_selector("#why-deeper .why-state")
    assert row.locator("button").count() == 0  # not twice
    page.wait_for_selector("#why-deeper a")
    there = row.locator("a").get_attribute("href")
    assert there.startswith("/plan?x=job-")
    told = row.inner_text()
    page.reload()
    page.wait_for_selector("#why-deeper a")
    assert page.locator("#why-deeper tr", has_text="computing in bfloat16").inner_text() == told
    # It holds for another point of the same exploration, too.
    other = opened(real.url("plan", "x=opened-four&point=2"))
    other.wait_for_selector("#why-deeper a")
    page.click("#why-deeper a")
    page.wait_for_function("location.search.includes('x=job-')")
    page.wait_for_function("document.querySelector('#why-quick .binding') !== null")
