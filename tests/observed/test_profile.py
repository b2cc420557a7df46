"""Traces of the profiler: kernels by stream, what is communication, steps, memory."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from torch import nn

from tensoropt.observed.files import read_observation
from tensoropt.observed.profile import NO_KERNELS, ProfileError, parse_json, read_profile


def event(name: str, cat: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 0, "tid": 7, "args": args}


def step(number: int, ts: float, dur: float, cat: str = "user_annotation") -> dict[str, Any]:
    return event(f"ProfilerStep#{number}", cat, ts, dur)


def trace(*events: dict[str, Any]) -> dict[str, Any]:
    return {"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "process_name", "pid": 0}, *events]}


KERNELS = (
    step(1, 1000, 100),
    event("ampere_sgemm", "kernel", 1010, 40, device=0, stream=7),
    event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 1030, 50, device=0, stream=20),
    event("Memcpy HtoD", "gpu_memcpy", 1000, 5, device=0, stream=7),
    event("aten::mm", "cpu_op", 1001, 3),
)


def test_kernels_lie_on_their_streams_with_categories():
    found = read_profile(trace(*KERNELS))
    assert [(e.name, e.lane, e.category) for e in found.events] == [
        ("Memcpy HtoD", "device 0 stream 7", "copy"),
        ("ampere_sgemm", "device 0 stream 7", "compute"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "device 0 stream 20", "communication"),
    ]
    assert found.events[1].start_s == pytest.approx(10e-6)
    assert found.events[1].end_s == pytest.approx(50e-6)
    assert found.notes == ()


def test_the_gpus_marks_of_steps_come_before_the_hosts():
    found = read_profile(
        trace(*KERNELS, step(1, 1020, 60, "gpu_user_annotation"), step(1, 1000, 70, "gpu_user_annotation"))
    )
    (mark,) = found.steps
    assert (mark.start_s, mark.end_s) == (0.0, pytest.approx(80e-6))


def test_the_memory_of_a_gpu_is_told_if_there_is_any():
    def memory(ts: float, total: int, kind: int, number: int) -> dict[str, Any]:
        args = {"Total Allocated": total, "Bytes": total, "Device Type": kind, "Device Id": number, "Addr": 1}
        return {"ph": "i", "name": "[memory]", "ts": ts, "args": args}

    host = memory(1001, 64, 0, -1)
    assert [m.device for m in read_profile(trace(*KERNELS, host)).memory] == ["cpu"]
    both = read_profile(trace(*KERNELS, memory(1009, 512, 1, 0), host, memory(1005, 256, 1, 0)))
    assert [m.device for m in both.memory] == ["cuda:0"]
    assert both.memory[0].bytes.tolist() == [256, 512]


def test_a_real_trace_of_a_small_model_on_the_cpu(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    activities = [torch.profiler.ProfilerActivity.CPU]
    steps = torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1)
    with torch.profiler.profile(
        activities=activities, schedule=steps, profile_memory=True,
        on_trace_ready=lambda p: p.export_chrome_trace(str(tmp_path / "trace.json.gz")),
    ) as profile:  # fmt: skip
        for _ in range(4):
            model(torch.randn(32, 64)).sum().backward()
            profile.step()
    found = read_observation(tmp_path / "trace.json.gz")
    assert [mark.name for mark in found.steps] == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"]
    assert found.notes == (NO_KERNELS,)
    names = {e.name for e in found.events}
    assert "aten::linear" in names
    # Outermost only: what linear is made of lies in it.
    assert "aten::addmm" not in names
    assert found.memory[0].device == "cpu"
    assert found.memory[0].peak_bytes >= 32 * 64 * 4
    for lane in {e.lane for e in found.events}:
        of_lane = [e for e in found.events if e.lane == lane]
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(of_lane))


@pytest.mark.parametrize("data", [None, 3, {}, {"traceEvents": 5}, {"traceEvents": [1]}, [[]]])
def test_other_json_is_refused(data):
    with pytest.raises(ProfileError, match=r"no traceEvents; .*export_chrome_trace"):
        read_profile(data)


@pytest.mark.parametrize(
    "events",
    [[], [{"ph": "X", "ts": "now", "dur": 1}], [{"ph": "X", "ts": 1e400, "dur": 1}],
     [{"ph": "X", "ts": True, "dur": 1}], [event("python", "python_function", 1, 1)]],
)  # fmt: skip
def test_traces_of_nothing_are_refused(events):
    with pytest.raises(ProfileError, match="profile at least one step"):
        read_profile(trace(*events))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b"1" * 10_000])
def test_what_is_no_json_is_refused(content):
    with pytest.raises(ProfileError, match="the file is not JSON"):
        parse_json(content)


def test_strange_fields_do_no_harm():
    odd = {"ph": "X", "name": ["a"], "cat": "kernel", "ts": 1, "dur": 2, "args": 7}
    found = read_profile(
        json.loads(json.dumps(trace(odd, event("x" * 900, "kernel", 5, -3, device={}, stream=[]))))
    )
    assert len(found.events) == 2
    assert all(len(e.name) <= 200 and e.duration_s >= 0 for e in found.events)
