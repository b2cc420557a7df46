"""Why a plan is not faster, as rows of the page: links, jobs, and what was explored from an exploration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples_app import GIB, exploration
from tensoropt_app.jobs.deeper import Deeper, deeper_jobs
from tensoropt_app.jobs.record import Job, Stage
from tensoropt_app.library import Library
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.why import budget_of, deeper_rows, parts, quick, results_of, rows

from tensoropt.exploration.verified import CHANGED, Changed, fingerprint, save_changed
from tensoropt.report.levers import Lever

KEY = "bandwidth:gpu"
FOLDER = Path("/explorations/one")


@pytest.fixture
def data() -> FrontierData:
    return FrontierData.of(exploration())


def told(data: FrontierData, view: View) -> Any:
    """What is known at once, with one change that can be explored and one that cannot."""
    deeper = (
        Lever(KEY, "twice the bandwidth", "to explore", words="latencies stay", command="tensoropt why ..."),
        Lever("bfloat16", "computing in bfloat16", "not possible", words="it does already"),
    )
    return replace(quick(data, view, "DIR", None), deeper=deeper)


def job(state: str = "running", **more: Any) -> Job:
    arguments = tuple(Deeper(FOLDER, "one", KEY, "twice", False).arguments(Path("/jobs/1")))
    return Job("1", "one: twice", arguments, state=state, **more)


def test_the_budget_of_the_page_or_the_plans_own(data: FrontierData) -> None:
    assert budget_of(data, View(point=2))[0] is None
    assert budget_of(data, View(point=2, budget_bytes=50 * GIB)) == (
        50 * GIB, "Within the budget of 50 GiB, unless stated otherwise.",
    )  # fmt: skip
    budget, words = budget_of(data, View(point=2, budget_bytes=20 * GIB))
    assert budget is None
    assert words == (
        "This plan is over the budget of 20 GiB: what follows is within the 30.0 GiB that it needs."
    )
    assert told(data, View(point=2, budget_bytes=50 * GIB)).within == 4


def test_points_of_this_frontier_are_links_that_keep_the_view(data: FrontierData) -> None:
    view = View(exploration="here", point=2, price=3.0)
    why = told(data, view)
    by_key = {row.key: row for row in rows(why, (*why.bounds, *why.levers), data, view)}
    fastest = by_key["memory:unlimited"]
    assert fastest.link.text == "point 8, 80.0 GiB"
    assert fastest.link.href == "/plan?x=here&point=8&price=3"
    assert (fastest.time, fastest.change, fastest.better) == ("100 ms", "−83 %", True)
    more = by_key[f"memory:{GIB:+.0f}"]  # the plan itself is still the fastest
    assert (more.link, more.change, more.better) == (None, "±0", None)
    less = by_key[f"memory:{-GIB:+.0f}"]
    assert (less.change, less.better) == ("+17 %", False)
    assert [part[0] for part in parts(why, data.units)] == ["computing", "waiting for communication"]


def test_a_change_can_be_started_runs_and_ends(data: FrontierData) -> None:
    view = View(exploration="here", point=2)
    why = told(data, view)

    def row(jobs: Any = None, found: Any = None, can_run: bool = True) -> Any:
        return deeper_rows(why, data, view, found or {}, jobs or {}, can_run=can_run)[0]

    assert (row().action, row().state, row().time) == ("run", "", "—")
    stage = Stage("search", 2, 5, "")
    running = row({KEY: job(stages=(stage,))})
    assert (running.action, running.state, running.active) == ("", "running: search, 2 of 5", True)
    assert row({KEY: job("queued")}).state == "waiting for its turn"
    failed = row({KEY: job("failed", error="no memory")})
    assert (failed.action, failed.state) == ("again", "failed: no memory")
    assert row(can_run=False).state == "tensoropt why ..."
    found = exploration(
        cluster="dgx-h100", points=[p.changed(time_s=p.time_s / 2) for p in exploration().points]
    )
    done = row({KEY: job("done")}, {KEY: ("job-1", found)})
    assert (done.action, done.state, done.time, done.change) == ("", "", "300 ms", "−50 %")
    assert done.link.href == "/plan?x=job-1&point=3"
    refused = deeper_rows(why, data, view, {}, {}, can_run=True)[1]
    assert (refused.action, refused.words) == ("", "it does already")


def test_a_job_is_found_by_exploration_and_change() -> None:
    newest, older = job("running"), job("failed")
    other = replace(newest, arguments=("why", "/explorations/two", "--deep", KEY, "--out", "x"))
    unlike = replace(newest, arguments=("explore", "zoo:mlp"))
    assert deeper_jobs([other, unlike, newest, older], FOLDER) == {KEY: newest}
    wanted = Deeper(FOLDER, "gpt2 on dgx-h100", KEY, "twice the bandwidth", True)
    assert wanted.title == "gpt2 on dgx-h100: twice the bandwidth"
    assert wanted.measures


def test_results_are_found_by_what_they_were_made_from(tmp_path: Path) -> None:
    found = exploration()
    own, another = fingerprint(found), "0" * 16
    for name, of, key in (("one", own, KEY), ("two", another, "bfloat16"), ("three", own, "bfloat16")):
        found.save(tmp_path / name)
        save_changed(tmp_path / name, Changed(of, key, "words"))
    found.save(tmp_path / "plain")
    found.save(tmp_path / "damaged")
    (tmp_path / "damaged" / CHANGED).write_text("{")
    library = Library(tmp_path, ready_made=tmp_path / "none")
    assert results_of(library, own) == {KEY: "opened-one", "bfloat16": "opened-three"}
