"""From a job to a plan on disk, as a person goes through it; and what goes wrong on the way."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import workers_app
from onnx_app import model_file

from tensoropt.plan.plan import load_plan


def on_h100(page: Any) -> None:
    page.wait_for_selector("#start")
    # The preset that the form begins with is filled in.
    page.wait_for_function("document.querySelector('#kind')?.value === 'RTX-4090'")
    page.click("#cluster")
    page.get_by_role("option", name="dgx-h100", exact=True).click()
    page.wait_for_function("document.querySelector('#kind')?.value === 'H100-80GB'")


def form(page: Any, model: str = "mlp", **fields: str) -> None:
    on_h100(page)
    page.fill("#model", model)
    page.get_by_role("option", name=model, exact=True).click()
    if fields:
        page.click("#more > summary")
    for control, value in fields.items():
        page.fill(f"#{control.replace('_', '-')}", value)


def test_the_whole_journey(real: Any, opened: Callable[..., Any], tmp_path: Path) -> None:
    page = opened(real.url("explore"))
    form(page, per_node="2", max_points="40", micro_batches="1")
    page.wait_for_selector("text=2 × H100-80GB, priced from data sheets.")
    page.click("#start")
    page.wait_for_selector(".job:has-text('mlp on dgx-h100') .at-work", timeout=120_000)
    page.wait_for_selector(".job .state-done", timeout=240_000)
    page.click("text=open the frontier")

    page.wait_for_selector("#card-title")
    page.click("#pick-fastest")
    page.wait_for_selector("#card-title:text-matches('fastest')")
    fastest = page.inner_text("#card-title")
    page.locator("#budget [role=slider]").focus()
    page.keyboard.press("Home")  # the least budget of the slider lies below every plan
    page.wait_for_selector("text=/No plan fits .*; the smallest needs/")
    for _ in range(6):
        at = page.evaluate("location.search")
        page.keyboard.press("ArrowRight")
        page.wait_for_function("at => location.search !== at", arg=at)
    page.wait_for_selector("text=/No plan fits/", state="detached")
    # The fastest within the budget is another one.
    page.wait_for_function("title => document.querySelector('#card-title').innerText !== title", arg=fastest)
    assert "budget=" in page.url

    page.click("#nav-plan")
    page.wait_for_selector("#plan-headline .big")
    # The grid shows its rows once it is scrolled to.
    page.wait_for_selector("#operators .ag-row", state="attached")
    page.locator("#operators").scroll_into_view_if_needed()
    page.wait_for_selector("#operators .ag-row")
    memory = page.inner_text("#plan-headline .big strong >> nth=0")

    page.click("#nav-export")
    page.wait_for_selector("#command-1")
    assert "--point" in page.inner_text("#command-1")
    for name in ("plan.json", "frontier.csv"):
        with page.expect_download() as download:
            page.click(f".files a:text-is('{name}')")
        download.value.save_as(tmp_path / name)
    plan = load_plan(tmp_path / "plan.json")
    assert plan.devices == 2
    with open(tmp_path / "frontier.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert round(plan.predicted.memory_bytes) in {int(row["memory_bytes"]) for row in rows}

    again = opened(page.url.replace("/export", "/plan"))
    again.wait_for_selector("#plan-headline .big")
    assert again.inner_text("#plan-headline .big strong >> nth=0") == memory


@pytest.mark.slow
def test_an_uploaded_file_is_explored(real: Any, opened: Callable[..., Any], tmp_path: Path) -> None:
    model_file(tmp_path / "small.onnx")
    page = opened(real.url("explore"))
    on_h100(page)
    page.set_input_files("#upload input[type=file]", tmp_path / "small.onnx")
    page.wait_for_selector("text=small.onnx is here")
    page.fill("#open-dims input", "8")
    page.wait_for_selector("#batch", state="hidden")
    page.click("#more > summary")
    for control, value in (("per-node", "2"), ("micro-batches", "1")):
        page.fill(f"#{control}", value)
    page.click("#start")
    page.click(".job:has-text('small.onnx') >> text=open the frontier", timeout=240_000)
    wanted = "small.onnx on 2 x H100-80GB"
    page.wait_for_function("title => document.querySelector('#exploration')?.value === title", arg=wanted)
    page.click("#nav-export")
    page.wait_for_selector("#command-0:has-text('--dim batch=8')")
    page.wait_for_selector(".files a:text-is('cluster.json')")


@pytest.mark.slow
def test_fewer_devices_and_planners_beside(real: Any, opened: Callable[..., Any]) -> None:
    page = opened(real.url("explore"))
    form(page, micro_batches="1", max_points="20", devices="1,2")
    page.click("#start")
    page.click("text=open 2 frontiers", timeout=240_000)
    page.wait_for_selector("#profile td:has-text('1 × H100-80GB')")
    page.click("#profile tr:has-text('2 × H100-80GB') a >> nth=-1")
    page.wait_for_selector("#profile td strong:has-text('2 × H100-80GB')")
    entries = len(real.library.entries())
    page.click("#beside-start")
    # What they found joins the exploration that was looked at: no second one of nearly the same name.
    page.wait_for_selector("#beside-said:has-text('in the table and the plot')", timeout=240_000)
    page.wait_for_selector("#planner-table td:has-text('ZeRO')")
    assert len(real.library.entries()) == entries
    # It splits attention heads, which this model does not have: that is said where its plan would be.
    page.wait_for_selector("#planner-table tr:has-text('Megatron') td:has-text('no plan')")
    page.wait_for_function("document.querySelector('#graph .js-plotly-plot')?.data[6].x.length > 0")


@pytest.mark.slow
def test_cancel_ends_all_that_a_job_started_and_forget_can_be_undone(
    endless: Any, opened: Callable[..., Any]
) -> None:
    page = opened(endless.url("explore"))
    form(page)
    page.click("#start")
    page.wait_for_selector("text=mesh 2x4 (search)")
    (job,) = endless.jobs.jobs()
    child = psutil.Process(int((endless.jobs.folder / job.id / workers_app.PIDS).read_text()))
    page.click(".job button:has-text('cancel')")
    page.wait_for_selector(".job .state-cancelled")
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    page.click(".job button:has-text('forget')")
    page.wait_for_selector("text=No jobs yet")
    page.click("#forgotten:has-text('Forgotten: mlp on dgx-h100') >> button:has-text('Undo')")
    page.wait_for_selector(f"#job-{job.id} .state-cancelled")
    page.wait_for_function("document.querySelector('#forgotten').innerText === ''")
