"""Measuring on two ranks: failures are records, records are kept.

How long work still takes, corrected by how long it took so far.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tensoropt import zoo
from tensoropt.graph import Ref
from tensoropt.ops.calls import LocalCall
from tensoropt.profiling import workload_timing
from tensoropt.profiling.measure import measure_workloads
from tensoropt.profiling.optimizer_timing import measure_optimizer
from tensoropt.profiling.optimizers import OPTIMIZERS
from tensoropt.profiling.timers import _CACHE_BYTES, _MOST_COPIES, Span, WallTimer, _waited_s, counted, timed
from tensoropt.profiling.workload import TensorSpec, Workload, random_tensor
from tensoropt.profiling.workload_timing import MIN_REPEATS, OUT_OF_MEMORY, joined, time_workload, usual
from tensoropt.ranks.worker_process import RankError
from tests.profiling.test_workload import every_workload

pytestmark = pytest.mark.distributed


def linear(rows: int, k: int, n: int, weight: tuple[int, int] | None = None) -> Workload:
    inputs = (
        ("x", TensorSpec((rows, k), "float32", True), "read"),
        ("w", TensorSpec(weight or (n, k), "float32", True), "parameter"),
    )
    call = LocalCall("aten.linear.default", (Ref("x"), Ref("w")), {})
    return Workload(inputs, ((call, ("y",)),), None, ("y",), {})


def calling(function: str, *args, high: int = 4) -> Workload:
    inputs = (
        ("w", TensorSpec((4, 8), "float32", True), "parameter"),
        ("i", TensorSpec((64,), "int64", False, high), "free"),
    )
    return Workload(inputs, ((LocalCall(function, args, {}), ("y",)),), None, ("y",), {})


BROKEN = {
    "shapes that do not fit": linear(4, 8, 8, weight=(8, 9)),
    "indices out of range": calling("aten.embedding.default", Ref("w"), Ref("i"), high=1000),
    "a kernel that is not there": calling("kernels.missing", Ref("w")),
}


def test_measures_forward_and_backward(ranks, store):
    small, large = linear(16, 64, 64), linear(1024, 512, 512)
    seen = []
    records = measure_workloads(
        [small, large, small], ranks, store, "here", training=True, progress=lambda *a: seen.append(a)
    )
    assert set(records) == {small.key, large.key}
    for record in records.values():
        assert 0 < record["forward_s"] < 1
        assert 0 < record["backward_s"] < 1
        assert MIN_REPEATS <= record["repeats"] < workload_timing._MOST_REPEATS + _MOST_COPIES
        assert record["spread"] >= 0
    assert records[large.key]["forward_s"] > records[small.key]["forward_s"]
    assert seen[0][:3] == ("measure", 0, 2)
    assert seen[-1][:3] == ("measure", 2, 2)


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_workload_that_raises_is_a_record(ranks, store, broken):
    before, after = linear(8, 16, 16), linear(8, 16, 32)
    records = measure_workloads([before, broken, after], ranks, store, "here", training=True)
    assert records[broken.key]["error"]
    assert "forward_s" not in records[broken.key]
    assert records[before.key]["forward_s"] > 0
    assert records[after.key]["forward_s"] > 0


def failing_on_one(rank: int, world_size: int) -> dict:
    """One rank has too little memory, say, and the other has not."""
    return time_workload(
        rank, world_size, BROKEN["shapes that do not fit"] if rank else linear(4, 8, 8), True
    )


def test_what_one_rank_cannot_run_keeps_no_other_waiting(ranks):
    other, failing = ranks.run(failing_on_one, timeout_s=20)
    assert other == {"error": "another rank could not run it"}
    assert joined([other, failing]) == failing != other


class Refusing:
    """A pool that must not be asked."""

    timeout_s, world_size, backend, process_ids = 1.0, 1, "gloo", ()

    def run(self, *_: object, **__: object) -> None:
        raise AssertionError("measured again")


def test_what_is_known_is_not_measured_again(ranks, store):
    works, begun = [linear(16, 64, 64), BROKEN["shapes that do not fit"]], []
    how = {"training": True, "begins": lambda *told: begun.append(told)}
    first = measure_workloads(works, ranks, store, "here", **how)
    ((count, seconds),) = begun
    assert count == 2
    assert seconds > 0
    assert measure_workloads(works, Refusing(), store, "here", **how) == first
    assert len(begun) == 1
    with pytest.raises(AssertionError, match="measured again"):
        measure_workloads(works, Refusing(), store, "elsewhere", training=True)


SECONDS = {"forward": [1.0] * 4, "backward": [2.0] * 4}
SHORT = {"error": f"{OUT_OF_MEMORY}: 8 GiB wanted"}


class Scripted:
    """A pool of one rank that answers each work as its script says, and counts how often ranks begin anew.

    A rank error ends its run; what was told before it has been told.
    """

    timeout_s, world_size, backend = 120.0, 1, "gloo"

    def __init__(self, script: dict[str, list]):
        self.script, self.starts, self.process_ids = script, 0, ()

    def restart(self) -> None:
        self.process_ids = ()

    def run(self, function, works, training, *, timeout_s, on_message):
        self.starts, self.process_ids = self.starts + (not self.process_ids), (1,)
        for work in works:
            answers = self.script.get(work.key, [SECONDS])
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if isinstance(answer, BaseException):
                self.restart()
                raise answer
            on_message(0, answer)


@pytest.mark.parametrize(
    ("kind", "runs", "says"),
    [("hung", 2, "it did not end within 6"), ("died", 3, "rank 0 is gone")],
    ids=["what hangs once is marked", "a death is tried again"],
)
def test_what_breaks_the_ranks_is_marked_and_the_rest_is_timed(store, kind, runs, says):
    works = [linear(8, 16, n) for n in (1, 2, 3)]
    pool = Scripted({works[1].key: [RankError("rank 0 is gone\n\nwhere", rank=0, kind=kind)]})
    records = measure_workloads(works, pool, store, "here", training=True)
    assert pool.starts == runs
    assert set(records[works[1].key]) == {"error"}
    assert says in records[works[1].key]["error"]
    assert "\n" not in records[works[1].key]["error"]
    assert [records[w.key].get("forward_s") for w in works] == [1.0, None, 1.0]
    assert store.get_many([f"here/{w.key}" for w in works]).keys() == {f"here/{w.key}" for w in works}


@pytest.mark.parametrize(
    ("answers", "ends"),
    [([SHORT, SECONDS], "timed"), ([SHORT, SHORT], SHORT["error"])],
    ids=["for what ranks held on to", "for good"],
)
def test_too_little_memory_is_tried_once_more_on_fresh_ranks(store, answers, ends):
    works = [linear(8, 16, n) for n in (1, 2, 3)]
    pool = Scripted({works[1].key: list(answers)})
    records = measure_workloads(works, pool, store, "here", training=True)
    assert pool.starts == 2
    assert pool.process_ids == ()  # what comes next finds fresh ranks, too
    assert records[works[1].key].get("error", "timed") == ends
    assert all(records[w.key]["forward_s"] == 1.0 for w in (works[0], works[2]))


def allocating(rank: int, world_size: int) -> dict:
    return time_workload(rank, world_size, linear(2**30, 2**30, 2**30), True)  # more than addresses


def test_what_cannot_be_allocated_says_so(ranks):
    assert all(found["error"].startswith(OUT_OF_MEMORY) for found in ranks.run(allocating))


def test_ranks_that_lost_each_other_say_nothing_of_the_workload():
    """Else all that is left of a batch would be ruled out."""
    with pytest.raises(RuntimeError, match="failed to synchronise"):
        time_workload(0, 2, linear(4, 8, 8), True, WallTimer())  # no process group here


def test_what_took_part_of_a_batch_survives_an_interruption(store):
    works = [linear(8, 16, n) for n in (1, 2, 3)]
    pool = Scripted({works[2].key: [KeyboardInterrupt()]})
    with pytest.raises(KeyboardInterrupt):
        measure_workloads(works, pool, store, "here", training=True)
    assert len(store.get_many([f"here/{w.key}" for w in works])) == 2


def test_seconds_are_said_in_advance(store):
    works, said = [linear(8, 16, n) for n in (1, 2, 3)], []
    how = {"expected_s": lambda work: 2.0, "begins": lambda *begun: said.append(begun)}
    measure_workloads(works, Scripted({}), store, "here", training=True, **how)
    assert said == [(3, pytest.approx(42, abs=1))]


def test_the_slower_rank_counts():
    one = {"forward": [1.0, 4.0, 1.0, 4.0], "backward": [2.0] * 4}
    other = {"forward": [3.0, 2.0, 3.0, 2.0], "backward": [1.0] * 4}
    record = joined([one, other])
    assert (record["forward_s"], record["backward_s"]) == (1.0, 2.0)
    other["forward"] = [3.0, 2.5, 3.0, 2.5]
    record = joined([one, other])
    assert (record["forward_s"], record["backward_s"]) == (2.5, 1.0)
    assert record["repeats"] == 4
    assert joined([one, {"error": "no"}, other]) == {"error": "no"}


class Counting(WallTimer):
    """Counts instead of telling the time; wants three copies."""

    def __init__(self, unit_s: float):
        self.unit_s = unit_s
        self.marks = 0

    def copies(self, size_bytes: int) -> int:
        assert size_bytes == 4 * (8 * 16 + 32 * 16 + 8 * 32)
        return 3

    def begin(self, *, ahead: bool = True) -> float:
        self.marks += 1
        return self.marks * self.unit_s

    def end(self, begun: float) -> Span:
        return Span(begun, self.begin())


@pytest.mark.parametrize(
    ("unit_s", "visits"),
    [(1e-9, 51), (0.12 / 60, 30), (0.12 / 9, 6), (0.12 / 5.9, 5), (0.12 / 3, 5), (1.0, 5)],
)
def test_so_many_visits_as_there_is_time_for(unit_s, visits):
    """One forward and one backward take a unit each: 60 visits would take twice the time that is wanted."""
    found = time_workload(0, 1, linear(8, 16, 32), True, Counting(unit_s))
    assert [len(found[way]) for way in ("forward", "backward")] == [visits, visits]
    assert found["forward"] == pytest.approx([unit_s] * visits)


def test_a_lap_goes_forward_through_all_copies_and_back(monkeypatch):
    """Parameters are each copy's own, what is read is made for each visit; backward starts at the last."""
    visits = []
    original = workload_timing.run_workload

    def noted(work, tensors, context):
        visits.append({n: tensors[n].data_ptr() for n, _, _ in work.inputs})
        return original(work, tensors, context)

    monkeypatch.setattr(workload_timing, "run_workload", noted)
    work = linear(8, 16, 32)
    read = next(n for n, _, role in work.inputs if role == "read")
    timer = Counting(1.0)
    given = {name: random_tensor(spec) for name, spec, _ in work.inputs}
    copies = workload_timing._copies(work, given, 3)
    lap = workload_timing._lap(work, copies, True, timer)
    assert [forward.begin for forward, _ in lap] == [5.0, 3.0, 1.0]
    assert [back.begin for _, back in lap] == [7.0, 9.0, 11.0]
    for name in visits[0]:
        assert len({visit[name] for visit in visits}) == 3
        assert (len({c[name].data_ptr() for c in copies}) == 1) == (name == read)


def test_copies_share_the_parameters_of_a_loop():
    work = linear(8, 16, 32)
    given = {name: random_tensor(spec) for name, spec, _ in work.inputs}
    inputs = tuple((n, replace(spec, looped=n == "w"), role) for n, spec, role in work.inputs)
    looped = replace(work, inputs=inputs)
    assert looped.key != work.key
    assert len({id(copy["w"]) for copy in workload_timing._copies(work, given, 3)}) == 3
    assert len({id(copy["w"]) for copy in workload_timing._copies(looped, given, 3)}) == 1


@pytest.mark.parametrize(
    ("size", "copies"),
    [(1, _MOST_COPIES), (_CACHE_BYTES // 3, 3), (_CACHE_BYTES // 3 + 9, 3), (_CACHE_BYTES, 1)],
)
def test_copies_fill_the_cache(size, copies):
    assert WallTimer().copies(size) == copies


def test_what_was_disturbed_does_not_count():
    assert usual([1.0, 1.1, 0.9, 1.0, 50.0]) == pytest.approx(1.0)
    assert usual([1.0, 2.0]) == 1.5


class Shared(WallTimer):
    """A clock on which others take turns at the core: work takes a second, in each repeat with so many more
    in which others were at work, of which so many are known as waiting."""

    def __init__(self, repeats: Sequence[tuple[float, float]]):
        self.repeats = itertools.cycle(repeats)

    def copies(self, size_bytes: int) -> int:
        return 1

    def begin(self, *, ahead: bool = True) -> float:
        return 0.0

    def end(self, begun: float) -> Span:
        longer_s, waited_s = next(self.repeats)
        return Span(0.0, 1.0 + longer_s, waited_s=waited_s)


@pytest.mark.parametrize(
    ("repeats", "seconds"),
    [
        ([(0.0, 0.0)], 1.0),
        ([(0.5, 0.0), (0.25, 0.0)], 1.25),  # a neighbour in the caches: the least disturbed counts
        ([(0.5, 0.0), (0.3, 0.3)], 1.5),  # one that waited does not count beside one that did not
        ([(9.0, 8.5), (3.0, 2.75)], 1.25),  # all waited: the seconds at work
    ],
    ids=["alone", "slow", "some waited", "all waited"],
)
def test_the_smallest_repeat_that_did_not_wait_counts(repeats, seconds):
    timer = Shared(repeats)
    spans = [timed(timer, lambda: None)[1] for _ in range(6)]
    assert counted(timer, spans) == pytest.approx(seconds)
    found = time_workload(0, 1, linear(8, 16, 32), False, Shared(repeats))
    assert joined([found])["forward_s"] == pytest.approx(seconds)


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="only Linux tells")
def test_a_thread_that_shares_its_core_waits():
    def both(seconds: list[float]) -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        before, until = _waited_s(), time.perf_counter() + 0.3
        while time.perf_counter() < until:
            torch.mm(a, a)
        seconds.append(_waited_s() - before)

    a, seconds = torch.randn(512, 512), []
    threads = [threading.Thread(target=both, args=(seconds,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(seconds) > 0.1  # less than each takes of the core, since one also sleeps for Python's lock


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_take_time_per_element(ranks, store, name):
    slope = measure_optimizer(ranks, store, "here", name)
    assert 0 < slope < 1e-6
    assert measure_optimizer(Refusing(), store, "here", name) == slope


def test_the_routing_of_a_mixture_of_experts_can_be_measured(monkeypatch):
    """Top-k and layers of experts, whole and split, take random inputs that are in range."""
    monkeypatch.setattr(workload_timing, "TARGET_S", 0.0)
    monkeypatch.setattr(workload_timing, "MIN_REPEATS", 1)
    built = zoo.build("mixtral-tiny", layers=1, batch=2, hidden=16, inner=16, vocabulary=32, sequence=8)
    works = {work.key: work for *_, work in every_workload(lambda: (built.model, built.args, built.kwargs))}
    called = {call.function for work in works.values() for call, _ in work.calls}
    assert {"aten.topk.default", "expert_kernels.experts"} <= called
    found = {work.describe(): time_workload(0, 1, work, True) for work in works.values()}
    assert {what: record["error"] for what, record in found.items() if "error" in record} == {}
