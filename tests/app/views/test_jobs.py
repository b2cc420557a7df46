"""Jobs as people read them: how far they are, and how they ended."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tensoropt_app.jobs.record import Job, Stage
from tensoropt_app.views.jobs import found_words, job_card

from tensoropt.exploration.exploration_files import Costs

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
    assert not any("left" in line.words for line in lines)
    assert lines[-1].words.startswith("done · 14 s" if state == "done" else f"{state} at 7 of 8 · 14 s")
    assert [line.share for line in lines] == ([1.0] * 3 if state == "done" else [1.0, 3 / 8, 7 / 8])


def test_what_a_job_found_is_said_in_a_line() -> None:
    memory, times = np.array([0.4, 3.0, 6.0]) * 2**20, np.array([18.0, 4.0, 1.6]) * 1e-3
    found = found_words(Costs(memory, times, np.array([2, 2, 2])))
    assert found == "3 plans, 0.400 to 6.00 MiB, 1.60 to 18.0 ms"
    assert found_words(Costs(memory[2:], times[2:], np.array([2]))) == "1 plan, 6.00 MiB, 1.60 ms"
    assert job_card(replace(JOB, state="done", ended=30.0), 99.0, ("k",), found).words.endswith(found)
