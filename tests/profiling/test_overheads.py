"""What a step spends beside operators and collectives, as two ranks measure it.

What an edge takes beside its collective, with steps that are slow on purpose.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace

import pytest

from tensoropt.cluster import DeviceKind, host_seconds
from tensoropt.cluster.catalog import device_kind
from tensoropt.profiling import overheads
from tensoropt.profiling.overheads import (
    EdgeSeconds,
    Overheads,
    _time_edges,
    data_sheet_overheads,
    known_overheads,
    measure_overheads,
    slowest_overheads,
)
from tensoropt.profiling.store import ProfileStore
from tensoropt.profiling.timers import WallTimer
from tensoropt.sharding.reshard import redistribute
from tensoropt.sharding.reshard.steps import COLLECTIVES

ALONE = {"slice", "pad", "mask"}
LONG_S = 50e-3


def slowed(monkeypatch, kind: str) -> None:
    """Let steps of a kind take so much longer that no busy machine hides it."""
    make = redistribute._MOVES[kind]

    def slow(*args):
        move = make(*args)

        def late(x):
            time.sleep(LONG_S)
            return move(x)

        return late

    monkeypatch.setitem(redistribute._MOVES, kind, slow)


@pytest.mark.parametrize("kind", ["slice", "pad", "mask"])
def test_each_kind_of_step_is_told_from_the_others(monkeypatch, kind):
    monkeypatch.setattr(overheads, "_ROUNDS", 5)
    slowed(monkeypatch, kind)
    found, of_host = _time_edges(0, 1, WallTimer())
    assert not of_host.by_kind.pop(kind)
    assert set(found.by_kind) == ALONE
    assert found.by_kind.pop(kind) > LONG_S / 2
    others = (*found.by_kind.values(), found.pass_s, found.arrive_s, found.add_s)
    assert all(0 <= seconds < LONG_S / 2 for seconds in others)


def slow_gather(rank: int, world_size: int) -> EdgeSeconds:
    """What edges take whose all-gather is slow beside its collective (runs in the pool)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overheads, "_ROUNDS", 5)
        slowed(patch, "all_gather")
        return _time_edges(rank, world_size, WallTimer())[0]


@pytest.mark.distributed
def test_collectives_are_not_counted(ranks):
    for found in ranks.run(slow_gather):
        assert set(found.by_kind) == ALONE | {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
        assert found.by_kind["all_gather"] > LONG_S / 2
        assert found.by_kind["all_reduce"] < LONG_S / 2


pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_measured_once_and_kept(tmp_path, ranks):
    with ProfileStore(tmp_path / "profile.sqlite") as store:
        store.put(
            "here/upkeep-2", {"copy_s_per_byte": 1.0, "add_s_per_byte": 1.0, "call_s": 1.0}
        )  # an older way
        assert known_overheads(store, "here", "adam") is None
        found = measure_overheads(ranks, store, "here", "adam")
        assert 0 < found.copy_s_per_byte < 1e-6
        assert 0 < found.add_s_per_byte < 1e-6
        assert 0 <= found.call_s < 1e-2  # a difference, which a busy machine may hide
        assert 0 <= found.again_s < 1e-2
        assert 0 < found.step_s < 1e-2
        assert set(found.step_kinds_s) == {"slice", "pad", "mask", *COLLECTIVES}
        assert found.call_s == found.step_kinds_s["slice"]
        assert known_overheads(store, "here", "adam") == found
        assert known_overheads(store, "here", "sgd") is None
        assert known_overheads(store, "elsewhere", "adam") is None


def test_data_sheet_and_slowest():
    kind = DeviceKind(
        name="card", type="cuda", memory_bytes=1 << 30, flops={"float32": 1e12}, memory_bandwidth=2e12
    )
    sheet = data_sheet_overheads(kind)
    assert (sheet.copy_s_per_byte, sheet.add_s_per_byte) == pytest.approx((1e-12, 1.5e-12))
    host = host_seconds("cuda")
    assert (sheet.call_s, sheet.pass_s) == (host.kernel_s, 0.0)
    assert (sheet.host.call_s, sheet.host.pass_s) == (host.edge_s, host.pass_s)
    assert sheet.host.copy_s_per_byte == sheet.host.add_s_per_byte == 0.0  # bytes cost a host nothing
    kinds = [
        Overheads(1, 5, 2, 0, 9, step_kinds_s={"mask": 2}),
        Overheads(3, 4, 1, 7, 8, step_kinds_s={"mask": 3}),
    ]
    assert slowest_overheads(kinds) == Overheads(3, 5, 2, 7, 9, step_kinds_s={"mask": 3})
    hosts = [replace(one, of_host=Overheads(call_s=s)) for one, s in zip(kinds, (4.0, 3.0), strict=True)]
    assert slowest_overheads(hosts).host == Overheads(call_s=4.0)


def test_a_record_is_read_as_it_was_written():
    own = Overheads(1, 5, step_kinds_s={"mask": 2}, of_host=Overheads(call_s=3.0, step_kinds_s={"pad": 1}))
    assert Overheads.from_record(json.loads(json.dumps(asdict(own)))) == own
    older = {name: value for name, value in asdict(Overheads(1, 5)).items() if name != "of_host"}
    assert Overheads.from_record(older) == Overheads(1, 5)
    assert Overheads.from_record(older).host == Overheads()


def test_a_direction_takes_what_its_steps_take_and_goes_through_autograd_once():
    overheads = Overheads(call_s=5.0, pass_s=1.0, step_kinds_s={"mask": 2.0, "all_gather": 7.0})
    assert overheads.issuing_s([]) == 0.0  # there is no edge
    assert overheads.issuing_s(["mask"]) == 2.0
    assert overheads.issuing_s(["all_gather", "mask"]) == 1 + 6 + 1
    assert overheads.issuing_s(["reduce_scatter"]) == 5.0  # not measured: as a copy
    noisy = Overheads(pass_s=3.0, step_kinds_s={"mask": 1.0})
    assert noisy.issuing_s(["mask", "mask"]) == 3.0  # never less than passing


def test_a_gradient_that_comes_to_its_bucket_is_a_kernel_of_a_gpu():
    """H100: 1 MiB is copied by a kernel of 1.7 us, read and written at 3,350 GB/s (0.626 us); that of a
    second micro-batch is added by another, which reads two and writes one (0.939 us)."""
    sheet = data_sheet_overheads(device_kind("H100-80GB"))
    assert sheet.arrival_s(2**20) == pytest.approx(2.326e-6, abs=1e-9)
    assert sheet.arrival_s(2**20, 2) == pytest.approx((2.326e-6 + 2.639e-6) / 2, abs=1e-9)
    assert sheet.arrival_s(2**20, copied=False) == 0  # it stays where autograd made it
    assert sheet.arrival_s(2**20, 2, copied=False) == pytest.approx(2.639e-6 / 2, abs=1e-9)


def test_on_a_cpu_rank_it_takes_what_an_edge_takes():
    core = data_sheet_overheads(device_kind("CPU-core"))
    assert core.arrival_s(0) == core.call_s
    assert core.arrival_s(0, 4) == core.call_s / 4
