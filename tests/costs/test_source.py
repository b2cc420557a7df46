"""Whose figures a cluster's are: of its own device, or of another."""

from __future__ import annotations

from dataclasses import replace

from tensoropt.cluster import load_cluster
from tensoropt.costs import timings
from tensoropt.costs.source import CostSource
from tensoropt.costs.timings import _LONG_S, Timings
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.overheads import data_sheet_overheads
from tensoropt.profiling.store import ProfileStore
from tensoropt.profiling.workload_timing import OUT_OF_MEMORY
from tensoropt.question.settings import Settings
from tensoropt.ranks.worker_process import RankError
from tests.profiling.test_cuda_attention import attention
from tests.profiling.test_measure import linear


class Ranks:
    """Ranks by which nothing is run."""


def source(store: ProfileStore, cluster: str = "dgx-h100", pool=None) -> CostSource:
    return CostSource(load_cluster(cluster), store, Settings(), pool)


def test_how_to_do_without_long_timing_is_said_once_before_it_begins(store, monkeypatch):
    lengths = [_LONG_S / 2, 119.0, 300.0]

    def measure(*args, begins, **how):
        begins(412, lengths.pop(0))
        return {}

    monkeypatch.setattr(timings, "measure_workloads", measure)
    peaks: list[tuple[str, ...]] = []

    def measure_peaks(pool, store, prefix, dtypes):
        peaks.append(tuple(dtypes))
        return {"float32": 1e11}

    monkeypatch.setattr(timings, "measure_peaks", measure_peaks)
    said = []
    costs = CostSource(load_cluster("local:2"), store, Settings(), Ranks(), note=said.append)
    costs.timings.measure({})
    assert said == []
    costs.timings.measure({})
    costs.timings.measure({})
    (words,) = said
    assert words.startswith("412 operators of this model")
    assert "about 2 min" in words
    assert '--measure never, in Python measure="never"' in words
    # Before and after each of the three.
    assert peaks == [("float32",)] * 6
    assert costs.timings.peaks == {"float32": 1e11}


def test_attention_on_gpus_that_are_not_here_is_that_of_their_kernels(store):
    work, other = attention("bfloat16", size=(40, 20)), linear(8, 16, 16)
    cpu, h100, v100 = (source(store, name) for name in ("local:2", "dgx-h100", "dgx-v100"))
    for one in (cpu, h100, v100):
        one.facts.find([work, other])
        assert one.facts.of(other) == find_facts(other)
    assert cpu.facts.of(work) == find_facts(work)
    # Known by kernels, not by kinds of devices: what one found the other reads, and no record is another's.
    assert h100.facts.of(work) == source(store, "dgx-h200").facts.of(work) == find_facts(work, True, (9, 0))
    assert v100.facts.of(work) == find_facts(work, True, (7, 0)) != h100.facts.of(work)
    attended, rest = h100.facts.notes()
    assert "kernels for compute capability 9.0, as" in attended
    assert rest.startswith("saved tensors are counted as CPU kernels save them, for 1 of 2 pieces of work")
    h100.cluster = replace(
        h100.cluster, devices=tuple(replace(one, capability="") for one in h100.cluster.devices)
    )
    assert h100.capability == (8, 0)
    assert "8.0 (assumed), as" in next(h100.facts.notes())


def test_shares_of_peaks_that_were_fitted_are_said(store):
    (said,) = (note for note in source(store, "dgx-h100").notes() if "memory bandwidth" in note)
    assert said.startswith("H100-80GB: kernels are assumed to reach of the FLOP/s 64% in matrix product")
    assert "products fitted to 37 runs" in said
    for assumed in ("dgx-v100", "local:2"):
        assert not any("memory bandwidth" in note for note in source(store, assumed).notes())


def test_cpu_ranks_say_nothing_of_gpus(store):
    asked = source(store, "local:2")
    asked.facts.of(linear(8, 16, 16))
    assert tuple(asked.facts.notes()) == ()
    assert source(store).beside > asked.beside


def test_devices_do_not_share_timings(store):
    prefixes = {name: source(store, name).prefix for name in ("local:2", "dgx-h100", "dgx-v100")}
    assert len(set(prefixes.values())) == 3
    assert prefixes["dgx-h100"].startswith(load_cluster("dgx-h100").device.name + "/")


class Lost:
    """Ranks that die of whatever they are asked."""

    timeout_s, world_size, process_ids, backend = 1.0, 2, (), "gloo"

    def run(self, *_: object, **__: object) -> None:
        raise RankError("rank 0 died by signal SIGKILL\n\nwhere", rank=0, kind="died")


def test_what_could_not_be_timed_is_of_the_data_sheet_and_said(store):
    asked = source(store, "local:2", pool=Lost())
    compute = asked.compute()
    assert (compute.source, asked.overheads()) == ("data sheet", data_sheet_overheads(asked.cluster.device))
    assert compute.optimizer_s_per_element > 0
    (mesh,) = asked.cluster.meshes(1)
    assert asked.communication(mesh).source("all_reduce", (0,)) == "data sheet"
    why = "rank 0 died by signal SIGKILL"
    assert asked.notes()[:2] == (
        f"could not be timed, estimated instead: a step of adam: {why}",
        f"could not be timed, estimated instead: all_reduce 0,1: {why}",
    )
    assert asked.notes()[-1] == "could not be timed: 1 others"


def test_only_lack_of_memory_makes_work_impossible(store):
    """Other failures may be those of the operands that a timing makes up."""
    asked = source(store, "local:2")
    works = [linear(8, 16, n) for n in (16, 32)]
    errors = ["it did not end within 60 s", f"{OUT_OF_MEMORY}: 1 TiB"]
    asked.timings.records = {w.key: {"error": e} for w, e in zip(works, errors, strict=True)}
    asked.timings.failed = {w.describe(): e for w, e in zip(works, errors, strict=True)}
    failed, short = (asked.compute().seconds(work, asked.facts.of(work))[0] for work in works)
    assert 0 < failed < short == float("inf")
    assert asked.compute().source_of(works[0]) in ("fitted", "data sheet")
    assert [note.split(":")[0] for note in asked.notes()] == [
        "could not be timed, estimated instead", "could not be timed",
    ]  # fmt: skip


def test_a_source_that_is_reopened_knows_what_it_knew(store, tmp_path):
    work = linear(8, 16, 16)
    first = source(store)
    facts = first.facts.of(work)
    first.timings.failed["linear"] = "died"
    first.timings.records[work.key] = {"error": "died"}
    with ProfileStore(tmp_path / "other.sqlite") as other:
        again = first.reopened(other, None)
        assert again.store is other
        assert again.facts.of(work) is facts
        assert again.timings.failed == {"linear": "died"}
        assert again.timings.records == {work.key: {"error": "died"}}
    assert first.store is store


def test_facts_of_many_are_found_once_and_kept(store):
    works, told = [linear(8, 16, n) for n in (16, 32)], []
    asked = source(store)
    asked.progress = lambda stage, done, total, what: told.append((stage, done, total))
    asked.facts.find(works)
    assert told == [("facts", 0, 2), ("facts", 2, 2)]
    assert [asked.facts.of(work) for work in works] == [source(store).facts.of(work) for work in works]
    asked.facts.find([*works, linear(8, 16, 48)])
    assert told[2:] == [("facts", 0, 1), ("facts", 1, 1)]


def test_timing_tells_how_far_it_is(store, monkeypatch):
    asked, seen = source(store, "local:2", pool=Ranks()), []
    monkeypatch.setattr(
        "tensoropt.costs.timings.measure_workloads", lambda *_, progress, **__: seen.append(progress) or {}
    )
    monkeypatch.setattr(Timings, "_fit", lambda _: (None, None))
    asked.timings.measure({})
    assert seen == [asked.progress]


def test_notes_can_be_asked_for_when_the_store_is_closed(tmp_path):
    with ProfileStore(tmp_path / "closed.sqlite") as opened:
        costs = CostSource(load_cluster("dgx-h100[2]"), opened, Settings())
    assert isinstance(costs.notes(), tuple)
