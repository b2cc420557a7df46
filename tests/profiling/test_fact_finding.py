"""Facts of many workloads, found by several processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tensoropt.profiling import fact_finding
from tensoropt.profiling.fact_finding import LEAST_PER_PROCESS, _Probe, find_facts, find_facts_of_all
from tests.profiling.test_facts import linear

WORKS = [linear(8, 16, 16 * n) for n in range(1, 2 * LEAST_PER_PROCESS + 2)]


def test_what_processes_find_is_what_this_one_finds():
    """In a process of its own, as test runners have threads."""
    program = f"""
import os
os.sched_getaffinity = lambda _: {{0, 1}}
from tests.profiling.test_fact_finding import WORKS, fact_finding, find_facts, find_facts_of_all
asked = []
find_each = fact_finding._find_each
def noted(works, training):
    asked.append(len(works))
    return find_each(works, training)
fact_finding._find_each = noted
assert find_facts_of_all(WORKS) == [find_facts(work) for work in WORKS]
assert asked == [{(len(WORKS) + 1) // 2}], asked
parent = os.getpid()
def dying(works, training):
    return find_each(works, training) if os.getpid() == parent else os._exit(9)
fact_finding._find_each = dying
assert find_facts_of_all(WORKS, False) == [find_facts(work, False) for work in WORKS]
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
    monkeypatch.setattr(fact_finding, "ProcessPoolExecutor", None)
    try:
        assert find_facts_of_all(WORKS[:2] * LEAST_PER_PROCESS) == [*map(find_facts, WORKS[:2])] * (
            LEAST_PER_PROCESS
        )
    finally:
        stop.set()


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
