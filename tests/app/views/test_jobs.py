"""Jobs as people read them: how far they are, and how they ended."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tensoropt_app.jobs.record import Job, Stage
from tensoropt_app.views.jobs import job_card

from tensoropt.profiling.eta import Eta, without_eta
from tensoropt.session.remaining import Remaining

STAGES = (
    Stage("facts", 12, 12, "about 53 s left, found", 0.0, 4.0),
    Stage("tables", 3, 8, "about 2.1 h left, mesh 2x4", 4.0, 6.0),
    Stage("search", 7, 8, "about 14 s left, mesh 8", 6.0, 20.0),
)
JOB = Job("a", "gpt2", ("explore",), state="running", stages=STAGES, created=0.0, started=0.0)


def test_only_what_is_at_work_says_what_is_left() -> None:
    facts, tables, search = job_card(JOB, 30.0).stages
    assert facts.words == "12 of 12 · 4.0 s · found"
    assert tables.words == "3 of 8 · 2.0 s · mesh 2x4"
    assert search.words == "7 of 8 · 24 s · about 14 s left, mesh 8"


@pytest.mark.parametrize("state", ["done", "failed", "cancelled", "interrupted"])
def test_what_has_ended_has_nothing_left(state: str) -> None:
    lines = job_card(replace(JOB, state=state, ended=30.0), 99.0).stages
    assert not any(re.search(r"left|in all", line.words) for line in lines)
    assert lines[-1].words.startswith("done · 14 s" if state == "done" else f"{state} at 7 of 8 · 14 s")
    assert [line.share for line in lines] == ([1.0] * 3 if state == "done" else [1.0, 3 / 8, 7 / 8])


def test_all_that_progress_says_of_time_is_taken_out() -> None:
    """In the words that are really said."""
    clock = iter(range(10**6))
    for seconds in (0.2, 14.0, 700.0, 90000.0):
        left = Remaining(lambda: float(next(clock)))
        left.expect("search", seconds)
        eta = Eta({"a": seconds, "b": seconds}, clock=lambda: float(next(clock)))
        said = [left.words, eta.words]
        eta.done(["a"])
        for words in (*said, eta.words):
            assert words
            assert without_eta(f"{words}, mesh 8, 1 micro-batches") == "mesh 8, 1 micro-batches"
            assert without_eta(words) == ""
    assert without_eta("300 of 8243 points remain") == "300 of 8243 points remain"
