"""Facts of many workloads, found by several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from tensoropt.profiling.fact_finding import LEAST_PER_PROCESS, _Probe
from tests.profiling.test_facts import linear

WORKS = [linear(8, 16, 16 * n) for n in range(1, 2 * LEAST_PER_PROCESS + 2)]


def test_what_processes_find_is_what_this_one_finds():
    """In a process of its own, as test runners have threads."""
    program = """
import os
from tensoropt import processes
from tensoropt.profiling import fact_finding
from tensoropt.profiling.fact_finding import find_facts, find_facts_of_all
from tests.profiling.test_fact_finding import WORKS
fact_finding.cores = processes.cores = lambda: 2
forks, fork = [], processes._fork
processes._fork = lambda *asked: forks.append(fork(*asked)) or forks[-1]
assert find_facts_of_all(WORKS) == [find_facts(work) for work in WORKS]
assert len(forks) == 2
assert find_facts_of_all(WORKS[:LEAST_PER_PROCESS], False) == [
    find_facts(work, False) for work in WORKS[:LEAST_PER_PROCESS]
]
assert len(forks) == 2
"""
    program = program.replace("[:LEAST_PER_PROCESS]", f"[:{LEAST_PER_PROCESS}]")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=Path(__file__).parents[2])


def test_a_storage_in_the_place_of_one_that_is_gone_is_another():
    probe = _Probe.__new__(_Probe)
    first, second = object(), object()
    call = SimpleNamespace(args=(), kwargs={})
    probe.work = SimpleNamespace(calls=[(call, ())] * 3)
    probe.parameters, probe.calls, probe.made_by = set(), [], {}
    probe.tensors, probe.sizes, probe.work_of_calls = {}, {}, []
    probe.live = SimpleNamespace(storages={7: first}, peak=0, flops=0, traffic=0)
    probe.peaks = SimpleNamespace(book=lambda _: None)
    probe._after_call(0)
    probe._after_call(1)
    assert probe._made_at(7) == 0
    probe.live.storages = {7: second}
    probe._after_call(2)
    assert probe._made_at(7) == 2
    assert probe._made_at(8) == 0
