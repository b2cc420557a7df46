"""Facts derived from probes of a few workloads of a kind equal those of probing each."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tensoropt.graph import Ref
from tensoropt.profiling import facts_of_kinds
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.facts_of_kinds import find_facts_of_all, kind_of
from tensoropt.profiling.workload import Resolved, Workload
from tests.costs.models import gates, gpt2, llama
from tests.profiling.test_facts import chain, linear, pointwise
from tests.profiling.test_workload import every_workload

GELU = ("aten.gelu.default", (Ref("y"),), ("z",))


def added(rows: int, columns: int, of_other: int) -> Workload:
    inputs = {"a": ((rows, columns), "read"), "b": ((of_other, columns), "read")}
    return chain(inputs, ("aten.add.Tensor", (Ref("a"), Ref("b")), ("y",)), writes="y")


def resolved(rows: int, n: int, parts: int, elements: int) -> Workload:
    moved = Resolved("y", (rows, n // parts), elements, 2 * elements)
    return replace(linear(rows, 24, n, GELU, writes="z"), resolved=moved)


KINDS = {
    "uneven, and 1": [linear(m, 24, n, GELU, writes="z") for m in (1, 3, 5, 10, 40) for n in (1, 8, 48, 96)],
    "broadcasting": [added(m, n, k) for m in (2, 4, 8) for n in (16, 32, 64) for k in {1, m}],
    "resharded inside": [
        resolved(m, n, parts, n * m * more)
        for m, n, parts, more in itertools.product((2, 8), (16, 64), (2, 4, 8), (1, 2, 3))
    ],
    "no products": [pointwise("aten.constant_pad_nd.default", [1, 1], shape=(8, n)) for n in range(2, 12)],
}


def probes(monkeypatch: pytest.MonkeyPatch) -> list[Workload]:
    """The workloads that are probed from here on."""
    seen: list[Workload] = []
    for name in ("probe", "find_facts"):
        real: Callable = getattr(facts_of_kinds, name)
        monkeypatch.setattr(
            facts_of_kinds, name, lambda work, *args, _real=real: seen.append(work) or _real(work, *args)
        )
    return seen


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_all_of_a_kind(kind: str, training: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(facts_of_kinds, "_LEAST_PER_PROCESS", 1 << 30)
    works = KINDS[kind]
    assert len({kind_of(work) for work in works}) == 1
    seen = probes(monkeypatch)
    found = find_facts_of_all(works, training)
    assert (len(seen) < len(works)) == (kind != "no products")
    assert found == [find_facts(work, training) for work in works]


def test_a_form_that_no_probe_shows_is_not_invented(monkeypatch: pytest.MonkeyPatch):
    """The check fails: what was derived is not used."""
    works = KINDS["uneven, and 1"]
    real = facts_of_kinds.probe
    monkeypatch.setattr(
        facts_of_kinds,
        "probe",
        lambda work, training, of_kind=None: real(
            work, training, None if of_kind is None else [2 * numbers for numbers in of_kind]
        ),
    )
    assert find_facts_of_all(works) == [find_facts(work) for work in works]


@pytest.mark.parametrize(
    "build", [gates, pytest.param(gpt2, marks=pytest.mark.slow), pytest.param(llama, marks=pytest.mark.slow)]
)
def test_one_percent_of_what_explorations_derive(build: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(facts_of_kinds, "_LEAST_PER_PROCESS", 1 << 30)
    works = {work.key: work for mesh in ((8,), (2, 2, 2)) for *_, work in every_workload(build, mesh)}
    seen = probes(monkeypatch)
    found = dict(zip(works, find_facts_of_all(list(works.values())), strict=True))
    derived = sorted(works.keys() - {work.key for work in seen})
    assert len(derived) > len(works) // 3
    for key in random.Random(0).sample(derived, max(5, len(derived) // 100)):
        assert found[key] == find_facts(works[key]), works[key].describe()


WORKS = [linear(8, 16, 16 * n + n % 3) for n in range(1, 20)] + [
    pointwise("aten.constant_pad_nd.default", [n, 1], shape=(8, n + 1)) for n in range(2, 12)
]


@pytest.mark.slow
def test_what_processes_find_is_what_this_one_finds():
    """In a process of its own, as test runners have threads."""
    program = """
import os
from tensoropt import processes
from tensoropt.profiling import facts_of_kinds
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.facts_of_kinds import find_facts_of_all
from tests.profiling.test_facts_of_kinds import WORKS
facts_of_kinds.cores = processes.cores = lambda: 2
facts_of_kinds._LEAST_PER_PROCESS = 4
forks, fork = [], processes._fork
processes._fork = lambda *asked: forks.append(fork(*asked)) or forks[-1]
assert find_facts_of_all(WORKS) == [find_facts(work) for work in WORKS]
assert len(forks) == 2
assert find_facts_of_all(WORKS[:4], False) == [find_facts(work, False) for work in WORKS[:4]]
assert len(forks) == 2
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=Path(__file__).parents[2])
