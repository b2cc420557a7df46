"""Run again with changes, the estimate before it, a cluster file, and the desktop's notice when it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from site_app import Site

from tests.app.browser.conftest import is_notice


def filled(page: Any, **wanted: str) -> None:
    for control, value in wanted.items():
        page.wait_for_function(
            "([id, value]) => document.getElementById(id)?.value === value",
            arg=[control.replace("_", "-"), value],
        )


@pytest.mark.slow
def test_a_job_is_run_again_with_one_field_changed(quick: Site, opened: Callable[..., Any]) -> None:
    page = opened(quick.url("explore"))
    filled(page, kind="RTX-4090")
    page.wait_for_selector("#estimate:has-text('No estimate yet')")
    page.click("#more > summary")
    page.fill("#per-node", "2")
    page.fill("#epsilon", "0.5")
    page.fill("#seed", "3")
    page.click("#start")
    page.wait_for_selector(".job .state-done")
    page.fill("#seed", "4")
    page.wait_for_selector("#estimate:has-text('this model there, with other settings')")
    page.reload()
    filled(page, kind="RTX-4090", per_node="4")
    page.click(".job button:has-text('change and run')")
    page.wait_for_selector("#refill-said:has-text('Filled from')")
    filled(page, model="resnet50", kind="RTX-4090", per_node="2", epsilon="0.5", seed="3")
    page.wait_for_function("document.activeElement?.id === 'refill-said'")
    page.wait_for_selector("#estimate:has-text('the same took that last time')")
    page.fill("#max-points", "20")
    page.click("#start")
    page.wait_for_selector("#start-said:has-text('started')")
    newest, first = quick.jobs.jobs()
    assert [word for word in newest.arguments if word not in first.arguments and newest.id not in word] == [
        "--max-points", "20",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_shown_exploration_fills_the_form(quick: Site, opened: Callable[..., Any]) -> None:
    page = opened(quick.url(query="x=opened-small"))
    page.wait_for_selector("#card-title")
    page.click("#change-shown")
    page.wait_for_selector("#refill-said:has-text('Filled from gpt2-tiny on dgx-h100')")
    page.wait_for_function("location.pathname === '/explore'")
    filled(page, model="gpt2-tiny", cluster="dgx-h100", kind="H100-80GB", per_node="8")


@pytest.mark.slow
def test_a_cluster_file_is_checked_at_once_and_named_in_the_list(
    quick: Site, opened: Callable[..., Any], tmp_path: Path
) -> None:
    page = opened(quick.url("explore"))
    filled(page, kind="RTX-4090")
    bad, good = tmp_path / "bad.yaml", tmp_path / "rack.yaml"
    bad.write_text("devices: [{kind: T5}]")
    good.write_text("devices: [{kind: T4, count: 2}, TITAN-RTX, TITAN-RTX]\nlinks: {intra_node: PCIe3}\n")
    page.set_input_files("#cluster-upload input[type=file]", bad)
    page.wait_for_selector("#cluster-upload-said .note-error:has-text(\"did you mean 'T4'\")")
    filled(page, cluster="rtx-4090")
    page.set_input_files("#cluster-upload input[type=file]", good)
    filled(page, cluster="rack.yaml", per_node="4", nodes="1")
    page.wait_for_selector("#cluster-said:has-text('4 × T4 and TITAN-RTX')")
    assert page.is_disabled("#kind")
    assert page.is_disabled("#per-node")
    page.click("#start")
    page.wait_for_selector(".job:has-text('resnet50 on rack.yaml')")
    page.click("#cluster")
    page.get_by_role("option", name="dgx-a100", exact=True).click()
    filled(page, kind="A100-80GB")
    assert not page.is_disabled("#kind")


NOTICES = """window.asked = 0; window.told = [];
window.Notification = class {
  constructor(title, more) { window.told.push(more.body); }
  static permission = 'default';
  static async requestPermission() { window.asked += 1; return (window.Notification.permission = ANSWER); }
};"""


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["granted", pytest.param("denied", marks=pytest.mark.slow)])
def test_the_desktop_is_told_only_where_a_person_asked_for_it(
    held: Site, opened: Callable[..., Any], answer: str
) -> None:
    page = opened("about:blank", haste=4)
    page.add_init_script(NOTICES.replace("ANSWER", repr(answer)))
    page.goto(held.url("explore"))
    filled(page, kind="RTX-4090")
    assert page.evaluate("window.asked") == 0
    page.click("#notify")
    said = "is notified when a job ends" if answer == "granted" else "allow them in its settings"
    page.wait_for_selector(f"#notify-said:has-text('{said}')")
    with page.expect_request_finished(is_notice):
        page.click("#start")
    held.release()
    page.wait_for_selector("#notice:has-text('resnet50 on rtx-4090: done')")
    told = page.evaluate("window.told")
    assert [words.partition(":")[0] for words in told] == (
        ["resnet50 on rtx-4090"] if answer == "granted" else []
    )
    assert page.evaluate("window.asked") == 1
    if answer == "granted":
        page.click("#notify")
        page.wait_for_selector("#notify-said:has-text('Off.')")
