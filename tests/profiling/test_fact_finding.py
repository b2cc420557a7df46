"""Facts of many workloads, found by several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tensoropt.profiling import fact_finding
from tensoropt.profiling.fact_finding import LEAST_PER_PROCESS, _Probe, find_facts, find_facts_of_all
from tests.profiling.test_facts import linear

WORKS = [linear(8, 16, 16 * n) for n in range(1, 2 * LEAST_PER_PROCESS + 2)]


def test_what_processes_find_is_what_this_one_finds():
    """In a process of its own, as test runners have threads."""
    program = """
import os
os.sched_getaffinity = lambda _: {0, 1}
from tests.profiling.test_fact_finding import WORKS, fact_finding, find_facts, find_facts_of_all
children, child = [], fact_finding._Child
fact_finding._Child = lambda *args: children.append(child(*args)) or children[-1]
assert find_facts_of_all(WORKS) == [find_facts(work) for work in WORKS]
assert [len(one.works) for one in children] == [len(WORKS) // 2]
assert not children[0]._process.is_alive()
parent = os.getpid()
def dying(work, training, capability):
    return find_facts(work, training, capability) if os.getpid() == parent else os._exit(9)
fact_finding.find_facts = dying
assert find_facts_of_all(WORKS, False) == [find_facts(work, False) for work in WORKS]
def wrong(work, training, capability):
    raise ValueError("no facts")
fact_finding.find_facts = wrong
try:
    find_facts_of_all(WORKS)
except ValueError:
    assert not children[-1]._process.is_alive()
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("name", ["threads", "cuda"])
def test_a_process_that_cannot_be_forked_safely_finds_them_itself(monkeypatch, name):
    stop = threading.Event()
    other = threading.Thread(target=stop.wait, name="another")
    if name == "threads":
        other.start()
    else:
        monkeypatch.setattr(fact_finding.threading, "enumerate", lambda: [threading.main_thread()])
        monkeypatch.setattr(fact_finding.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(fact_finding, "_Child", None)
    try:
        assert find_facts_of_all(WORKS[:2] * LEAST_PER_PROCESS) == [*map(find_facts, WORKS[:2])] * (
            LEAST_PER_PROCESS
        )
    finally:
        stop.set()


@pytest.mark.parametrize("ended_by", ["SIGINT", "SIGKILL"])
def test_no_process_outlives_the_one_that_was_ended(ended_by):
    program = """
import os, signal, time
os.sched_getaffinity = lambda _: {0, 1}
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.profiling.test_fact_finding import WORKS, fact_finding
fact_finding.find_facts = lambda work, training, capability: time.sleep(0.2)
print(os.getpid(), flush=True)
fact_finding.find_facts_of_all(WORKS * 20)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline().strip() == str(process.pid)
        time.sleep(1.0)
        group = process.pid
        if ended_by == "SIGINT":
            os.killpg(group, signal.SIGINT)
        else:
            process.kill()
        _, error = process.communicate(timeout=20)  # ends when all have closed what they print to
    assert error.count("Traceback") == (ended_by == "SIGINT")
    for _ in range(50):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a process is left")


def test_a_storage_in_the_place_of_one_that_is_gone_is_another():
    probe = _Probe.__new__(_Probe)
    first, second = object(), object()
    call = SimpleNamespace(args=(), kwargs={})
    probe.work = SimpleNamespace(calls=[(call, ())] * 3)
    probe.parameters, probe.calls, probe.made_by = set(), [], {}
    probe.live = SimpleNamespace(storages={7: first}, peak=0)
    probe.peaks = SimpleNamespace(book=lambda _: None)
    probe._after_call(0)
    probe._after_call(1)
    assert probe._made_at(7) == 0
    probe.live.storages = {7: second}
    probe._after_call(2)
    assert probe._made_at(7) == 2
    assert probe._made_at(8) == 0
