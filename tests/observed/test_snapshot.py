"""Memory snapshots: what was allocated when, by the format of torch.cuda.memory._snapshot."""

from __future__ import annotations

from typing import Any

import pytest
from torch.cuda import _memory_viz

from tensoropt.observed.snapshot import NO_CLOCK, SnapshotError, read_snapshot


def entry(action: str, addr: int, size: int, time_us: int | None = None) -> dict[str, Any]:
    """An entry of a trace, as the allocator writes it."""
    found = {"action": action, "addr": addr, "size": size, "stream": 0, "frames": []}
    return found if time_us is None else {**found, "time_us": time_us}


def block(addr: int, size: int, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": addr, "size": size, "requested_size": size, "state": state, "frames": []}


def snapshot(*traces: list[dict[str, Any]], blocks: dict[int, list[dict[str, Any]]] | None = None):
    segments = [
        {"device": device, "address": of[0]["address"], "total_size": sum(b["size"] for b in of), "stream": 0,
         "segment_type": "large", "allocated_size": 0, "active_size": 0, "blocks": of}
        for device, of in (blocks or {}).items()
    ]  # fmt: skip
    return {"segments": segments, "device_traces": list(traces)}


def test_a_block_counts_from_its_allocation_until_it_is_free_again():
    found = read_snapshot(
        snapshot(
            [
                entry("segment_alloc", 0, 2048, 90),
                entry("alloc", 0, 512, 100),
                entry("alloc", 512, 1024, 110),
                entry("free_requested", 0, 512, 120),
                entry("free_completed", 0, 512, 150),
                entry("snapshot", 0, 0, 160),
            ],
            blocks={0: [block(512, 1024)]},
        )
    )
    (memory,) = found.memory
    assert memory.device == "cuda:0"
    assert memory.bytes.tolist() == [0, 512, 1536, 1024]
    assert memory.times_s.tolist() == pytest.approx([0, 10e-6, 20e-6, 60e-6])
    assert memory.peak_bytes == 1536
    assert found.clocked


def test_what_was_there_before_is_found_in_what_is_freed_and_in_what_is_left():
    found = read_snapshot(
        snapshot(
            [entry("alloc", 5000, 10, 1), entry("free_completed", 9000, 300, 2)],
            blocks={0: [block(5000, 10), block(5010, 700), block(5710, 50, "inactive")]},
        )
    )
    # 700 stay all the while, 300 until they are freed.
    assert found.memory[0].bytes.tolist() == [1000, 1010, 710]


def test_blocks_of_older_snapshots_have_no_address_of_their_own():
    old = [{"size": 64, "state": "inactive"}, {"size": 128, "state": "active_allocated"}]
    data = {"segments": [{"address": 1000, "blocks": old}], "device_traces": [[entry("alloc", 1064, 128, 5)]]}
    assert read_snapshot(data).memory[0].bytes.tolist() == [0, 128]


def test_every_device_with_a_history_has_a_curve():
    found = read_snapshot(snapshot([entry("alloc", 0, 1, 7)], [], [entry("alloc", 0, 5, 5)]))
    assert [m.device for m in found.memory] == ["cuda:0", "cuda:2"]
    assert found.fullest is found.memory[1]
    assert found.memory[0].times_s.tolist() == pytest.approx([0, 2e-6])


def test_without_times_events_are_evenly_spaced_and_it_is_said():
    found = read_snapshot(
        snapshot([entry("alloc", 0, 1), entry("alloc", 1, 1), entry("free_completed", 0, 1)])
    )
    assert not found.clocked
    assert found.memory[0].times_s.tolist() == [0, 0, 1, 2]
    assert NO_CLOCK in found.notes


def test_annotations_of_newer_snapshots_mark_the_steps():
    data = snapshot([entry("alloc", 0, 1, 100)])
    data["external_annotations"] = [
        {"device": 0, "time_us": 100, "name": "ProfilerStep#3", "stage": "START"},
        {"device": 0, "time_us": 150, "name": "something", "stage": "START"},
        {"device": 0, "time_us": 300, "name": "ProfilerStep#3", "stage": "END"},
    ]
    (mark,) = read_snapshot(data).steps
    assert (mark.name, mark.start_s, mark.end_s) == ("ProfilerStep#3", 0.0, pytest.approx(200e-6))


def test_the_format_is_the_one_that_torch_reads():
    """What these tests call a snapshot is one to PyTorch's own tool too."""
    data = snapshot([entry("alloc", 512, 1024, 110)], blocks={0: [block(512, 1024)]})
    assert "TOTAL MEM: 1.0KiB" in _memory_viz.trace(data)
    assert _memory_viz.segsum(data)


@pytest.mark.parametrize(
    "data",
    [
        None, [], {}, 7, {"segments": [], "device_traces": None}, {"segments": 1, "device_traces": [[]]},
        snapshot([{"addr": 1}]), snapshot([entry("alloc", 0, -1, 1)]),
        snapshot([entry("alloc", 0, 2**60, 1)]),
        snapshot([entry("alloc", 0, True, 1)]), snapshot([entry("alloc", 0, 1, -5)]), snapshot([[1]]),
        snapshot([entry("alloc", 0, 1.5, 1)]), {"segments": [{}], "device_traces": [[entry("alloc", 0, 1)]]},
    ],
)  # fmt: skip
def test_anything_else_is_refused(data):
    with pytest.raises(SnapshotError, match=r"not a memory snapshot .* torch.cuda.memory._dump_snapshot"):
        read_snapshot(data)


def test_a_snapshot_without_history_says_how_to_record_one():
    with pytest.raises(SnapshotError, match=r"no history .*_record_memory_history"):
        read_snapshot(snapshot([], []))
