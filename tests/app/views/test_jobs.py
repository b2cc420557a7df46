"""Jobs as people read them: how far they are, and how they ended."""

from dataclasses import replace

import numpy as np
import pytest
from tensoropt_app.jobs.record import Job, Stage
from tensoropt_app.views.jobs import JobCard, found_words, sketch

STAGES = (Stage("facts", 12, 12, "found"), Stage("tables", 3, 8, "mesh 2x4"), Stage("search", 7, 8, "mesh 8"))
JOB = Job("a", "gpt2", ("explore",), state="running", stages=STAGES, created=0.0, started=0.0)


def test_the_present_stage_is_said():
    card = JobCard(JOB, 24.0)
    assert (card.at_work, card.share) == ("mesh 8 (search)", 7 / 8)


@pytest.mark.parametrize("state", ["queued", "done", "failed", "cancelled", "interrupted"])
def test_what_is_not_at_work_has_nothing_left(state):
    assert JobCard(replace(JOB, state=state), 99.0).at_work == ""


def test_a_sweep_says_of_which_part_that_is():
    card = JobCard(replace(JOB, stages=(Stage("clusters", 1, 3, "dgx-a100"), *STAGES)), 20.0)
    assert card.at_work == "dgx-a100, 2 of 3: mesh 8 (search)"
    assert JobCard(replace(JOB, stages=()), 20.0).at_work == "opening PyTorch"


def test_points_at_work_are_sketched():
    picture = sketch([1.0, 10.0, 100.0], [4.0, 2.0, 1.0])
    assert [picture.count(f"cx='{x}' cy='{y}'") for x, y in ((4, 4), (80, 40), (156, 76))] == [1, 1, 1]
    assert sketch([5.0], [0.0]).count("%3Ccircle") == 1


def test_what_a_job_found_is_said_in_a_line():
    memory, times = np.array([0.4, 3.0, 6.0]) * 2**20, np.array([18.0, 4.0, 1.6]) * 1e-3
    found = found_words(memory, times, 3)
    assert found == "3 plans, 0.400 to 6.00 MiB, 1.60 to 18.0 ms"
    assert found_words(memory[2:], times[2:], 1) == "1 plan, 6.00 MiB, 1.60 ms"
    assert JobCard(replace(JOB, state="done", ended=30.0), 99.0, ("k",), found).words.endswith(found)
