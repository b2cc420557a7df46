"""A rank of a user's own torchrun job runs as ranks are measured, and afterwards as before."""

from __future__ import annotations

import os

import pytest
import torch

from tensoropt.cluster import available_cores
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import load_model
from tensoropt.execute.parallel import parallelize, shutdown
from tensoropt.ranks.local_hardware import unpin_process
from tests.execute import jobs

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="scheduling classes are Linux's")


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """This process is the only rank of its host."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    unpin_process()
    torch.set_num_threads(threads)


def state() -> tuple[object, ...]:
    return os.sched_getaffinity(0), os.sched_getscheduler(0), torch.get_num_threads()


def train(**how: bool) -> None:
    model, args, _ = jobs.spec("mlp").build()
    parallelize(model, unsplit_strategy(load_model(jobs.spec("mlp")).graph), args, **how)


def test_a_rank_of_a_torchrun_job_is_pinned_until_it_leaves():
    before, cores = state(), available_cores()
    for _ in range(2):  # a second model changes nothing
        train()
        assert state() == ({cores[0]}, os.SCHED_BATCH, 1)
    shutdown()
    assert state() == before


def test_a_script_may_pin_itself():
    before = state()
    train(as_measured=False)
    assert state() == before


def test_a_process_that_torchrun_did_not_start_is_left_alone(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    before = state()
    train()
    assert state() == before
