"""From a model to a plan on disk, as a person goes through it; and what goes wrong on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import workers_app
from onnx_app import model_file
from site_app import running
from tensoropt_app.jobs.worker import run

from tensoropt.plan.plan import load_plan
from tensoropt.units import format_bytes
from tests.plan.explorations import rows_of


def form(page: Any, **fields: str) -> None:
    """Fill the form of the page Plan it, once it is there."""
    page.wait_for_selector("#devices-said:not(:empty)")
    fill(page, **{"model": "mlp", "devices": "dgx-h100[2]", "sequence": "", **fields})


def fill(page: Any, **fields: str) -> None:
    """Fill fields, and wait until the page has heard of them, which it does once one has typed."""
    for control, value in fields.items():
        page.fill(f"#{control}", value)
    page.keyboard.press("Tab")
    page.wait_for_timeout(1500)


def downloaded(page: Any, name: str, folder: Path) -> Path:
    with page.expect_download() as download:
        page.click(f".files a:text-is('{name}')")
    download.value.save_as(folder / name)
    return folder / name


def test_the_whole_journey(real, opened, tmp_path):
    page = opened(real.url("new"))
    form(page, more="--max-points 40 --micro-batches 1")
    page.wait_for_selector("#devices-said:has-text('2 x H100-80GB')")
    page.fill("#batch", "24")
    page.click("#start")  # at once: what was typed last counts
    page.click(".job:has-text('mlp on dgx-h100[2] · batch 24') >> text=open the result", timeout=240_000)

    page.wait_for_selector("#answer .verdict-big:has-text('Fits')")
    page.wait_for_selector("#choices td:has-text('recommended')")
    page.wait_for_selector("#what-if td:has-text('4 × H100-80GB')")
    page.focus("#plot")
    page.keyboard.press("Home")
    page.wait_for_function("location.search.includes('point=1')")
    page.wait_for_selector("#choices tr:has(a.chosen)")

    page.click("#export-open")
    page.wait_for_selector("#command-1:has-text('--point 1 ')")
    plan = load_plan(downloaded(page, "plan.json", tmp_path))
    assert plan.devices == 2
    first, *_ = rows_of(downloaded(page, "frontier.csv", tmp_path))
    assert round(plan.predicted.memory_bytes) == int(first["memory_bytes"])
    needs = format_bytes(float(first["needs_bytes"])).split()[0]
    page.wait_for_selector(f"#answer .figures span:has-text('needs {needs} ')")
    page.keyboard.press("Escape")
    page.click("#answer a:has-text('Details')")
    page.wait_for_selector("#details-head strong:has-text('per device')")
    page.wait_for_selector("#operators .ag-row", state="attached", timeout=120_000)
    assert needs in page.inner_text("#details-head")


@pytest.mark.slow
def test_an_uploaded_file_is_explored(real, opened, tmp_path):
    (tmp_path / "garbage.onnx").write_bytes(bytes(range(256)) * 40)
    model_file(tmp_path / "small.onnx")
    page = opened(real.url("new"))
    form(page)
    page.set_input_files("#upload input[type=file]", tmp_path / "garbage.onnx")
    page.wait_for_selector("text='garbage.onnx' cannot be read as ONNX", timeout=60_000)
    page.set_input_files("#upload input[type=file]", tmp_path / "small.onnx")
    page.wait_for_selector("text=small.onnx is uploaded")
    page.wait_for_selector("#model-said:has-text('--dim batch=8')")
    page.wait_for_selector("text=give a file's sizes in more options")
    fill(page, batch="")
    page.click("#start")
    page.wait_for_selector("#start-said:has-text('Not started: give sizes')")
    fill(page, more="--dim batch=8 --micro-batches 1")
    page.click("#start")
    page.click(".job:has-text('small.onnx') >> text=open the result", timeout=240_000)
    page.wait_for_selector("#bar-words:has-text('small.onnx')")
    page.click("#export-open")
    page.wait_for_selector("#command-0:has-text('--dim batch=8')")
    page.click(".launcher:has-text('accelerate') button")
    page.wait_for_selector(".launcher:has-text('accelerate') .note", timeout=240_000)


NET = """
import torch

def build(batch=8, width=16):
    model = torch.nn.Sequential(torch.nn.Linear(width, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    return model, (torch.zeros(batch, width),), {}, lambda y: y.mean()
"""


@pytest.mark.slow
def test_a_function_of_an_own_file_is_explored(explorations, opened, tmp_path):
    own = tmp_path / "project"
    own.mkdir()
    (own / "train.py").write_text(NET)
    with running(tmp_path / "home", explorations, run, own) as site:
        page = opened(site.url("new"))
        form(page, model="elsewhere.py:build")
        page.wait_for_selector(f"text=there is no file {own}/elsewhere.py")
        fill(page, model="train.py:build?width=24", batch="16", more="--micro-batches 1")
        page.click("#start")
        page.click(".job >> text=open the result", timeout=240_000)
        page.wait_for_selector("#answer .verdict-big")
        page.click("#bar-words a:has-text('change')")
        page.wait_for_function("document.querySelector('#model').value === 'train.py:build?width=24'")


@pytest.mark.slow
def test_cancel_ends_all_that_a_job_started_and_forget_can_be_undone(endless, opened):
    page = opened(endless.url("new"))
    form(page, more="--optimizer best")
    page.wait_for_selector("text=--optimizer is one of sgd")
    fill(page, more="")
    page.wait_for_selector("text=--optimizer is one of sgd", state="detached")
    page.click("#start")
    page.wait_for_selector("text=mesh 2x4 (search)")
    (job,) = endless.jobs.jobs()
    child = psutil.Process(int((endless.jobs.folder / job.id / workers_app.PIDS).read_text()))
    page.reload()  # jobs go on
    page.wait_for_selector("text=mesh 2x4 (search)")
    page.click(".job button:has-text('cancel')")
    page.wait_for_selector(".job .state-cancelled")
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    page.click(".job button:has-text('forget')")
    page.wait_for_selector("text=No jobs yet")
    page.click("#forgotten:has-text('Deleted: mlp on dgx-h100') >> button:has-text('Undo')")
    page.wait_for_selector(f"#job-{job.id} .state-cancelled")
    page.wait_for_function("document.querySelector('#forgotten').innerText === ''")
