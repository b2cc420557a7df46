"""How a worker gets ready: CPU ranks are pinned, ranks of GPUs get theirs.

A time-out ends; what is forked may hang, raise or die.

A rank of a user's own torchrun job runs as ranks are measured, and afterwards as before.
"""

import os
import threading
import time
from multiprocessing import Pipe

import pytest
import torch

from tensoropt import MeasurementError, parallelize, shutdown
from tensoropt.cluster import available_cores
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import load_model
from tensoropt.ranks import worker
from tensoropt.ranks.local_hardware import unpin_process
from tensoropt.ranks.worker_process import Timeout, call_in_fork
from tests.execute import jobs


@pytest.mark.parametrize(
    ("backend", "gpu", "done"),
    [("gloo", None, ["pinned", "gloo"]), ("gloo", 0, ["gpu 0", "gloo"]), ("nccl", 1, ["gpu 1", "nccl"])],
)
def test_a_rank_gets_what_its_device_needs(monkeypatch, backend, gpu, done):
    seen: list[str] = []
    monkeypatch.setattr(worker, "pin_rank", lambda cores: seen.append("pinned"))
    monkeypatch.setattr(worker, "_connect", lambda setup: seen.append(setup["backend"]))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch, "set_num_interop_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(f"gpu {device}"))
    setup = {"rank": 1, "backend": backend, "gpu": gpu, "core": None}
    worker._obey("setup", setup, {})
    assert seen == done


def test_patience_ends_and_is_renewed_by_signs():
    ours, theirs = Pipe()
    timeout = Timeout(2.0)
    timeout._until = time.monotonic()
    assert timeout.wait([ours]) == []
    threading.Timer(0.02, theirs.send, ["a sign"]).start()
    timeout.renew()
    assert timeout.wait([ours]) == [ours]
    assert ours.recv() == "a sign"
    long = Timeout(600.0)
    long.at_most(0.05)
    long.renew()
    assert long.wait([ours]) == []


def raising() -> None:
    raise ValueError("no such thing")


@pytest.mark.parametrize(("function", "reason", "allowed_s"), [
    (raising, "ValueError: no such thing", 60.0),
    (lambda: os._exit(3), "died", 60.0),
    (lambda: time.sleep(60), "did not end", 0.2),
])  # fmt: skip
def test_a_fork_may_be_lost(function, reason, allowed_s):
    with pytest.raises(MeasurementError, match=reason):
        call_in_fork(function, allowed_s)


def test_a_fork_knows_what_this_process_knows():
    here = object()
    assert call_in_fork(lambda: id(here), 20.0) == id(here)


@pytest.fixture
def host(monkeypatch):
    """This process is the only rank of its host."""
    if not hasattr(os, "SCHED_BATCH"):
        pytest.skip("scheduling classes are Linux's")
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


@pytest.mark.usefixtures("host")
def test_a_rank_of_a_torchrun_job_is_pinned_until_it_leaves():
    before, cores = state(), available_cores()
    for _ in range(2):  # a second model changes nothing
        train()
        assert state() == ({cores[0]}, os.SCHED_BATCH, 1)
    shutdown()
    assert state() == before


@pytest.mark.usefixtures("host")
def test_a_script_may_pin_itself():
    before = state()
    train(as_measured=False)
    assert state() == before


@pytest.mark.usefixtures("host")
def test_a_process_that_torchrun_did_not_start_is_left_alone(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    before = state()
    train()
    assert state() == before
