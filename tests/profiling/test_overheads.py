"""What a step spends beside operators and collectives, by data sheets."""

import json
from dataclasses import asdict

import pytest

from tensoropt.cluster import DeviceKind, host_seconds
from tensoropt.cluster.catalog import device_kind
from tensoropt.profiling.overheads import Overheads, data_sheet_overheads


def test_data_sheet():
    kind = DeviceKind(
        name="card", type="cuda", memory_bytes=1 << 30, flops={"float32": 1e12}, memory_bandwidth=2e12
    )
    sheet = data_sheet_overheads(kind)
    assert (sheet.copy_s_per_byte, sheet.add_s_per_byte) == pytest.approx((1e-12, 1.5e-12))
    host = host_seconds("cuda")
    assert (sheet.call_s, sheet.pass_s) == (host.kernel_s, 0.0)
    assert (sheet.host.call_s, sheet.host.pass_s) == (host.edge_s, host.pass_s)
    assert sheet.host.copy_s_per_byte == sheet.host.add_s_per_byte == 0.0  # bytes cost a host nothing


def test_a_record_is_read_as_it_was_written():
    own = Overheads(1, 5, of_host=Overheads(call_s=3.0))
    assert Overheads.from_record(json.loads(json.dumps(asdict(own)))) == own
    older = {name: value for name, value in asdict(Overheads(1, 5)).items() if name != "of_host"}
    assert Overheads.from_record(older) == Overheads(1, 5)
    assert Overheads.from_record(older).host == Overheads()
    assert Overheads.from_record({**asdict(own), "step_kinds_s": {"mask": 2}}) == own


def test_a_direction_takes_what_its_steps_take_and_goes_through_autograd_once():
    overheads = Overheads(call_s=5.0, pass_s=1.0)
    assert overheads.issuing_s(0) == 0.0  # there is no edge
    assert overheads.issuing_s(1) == 5.0
    assert overheads.issuing_s(2) == 1 + 4 + 4


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
