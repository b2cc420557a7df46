"""PyTorch's memory snapshots: what is allocated on each device, event by event.

The format is that of ``torch.cuda.memory._snapshot`` (its docstring, and ``torch/cuda/_memory_viz.py``). A
block counts from ``alloc`` to ``free_completed``. What was there before the recording began follows from the
blocks that are freed without having been allocated, and from those that are still there at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensoropt.errors import TensorOptError
from tensoropt.observed.observation import Observation, ObservedMemory, StepMark

_MICRO = 1e-6
MOST_BYTES = 2**53
"""The limit up to which sums of bytes are exact."""
_ACTIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")
NO_CLOCK = "the snapshot has no times: its events are evenly spaced"


class SnapshotError(TensorOptError):
    """A pickle that is not a memory snapshot."""


def read_snapshot(data: Any) -> Observation:
    """Return the memory of all devices in a snapshot.

    Args:
        data: the contents of the pickle.

    Raises:
        SnapshotError: the data are not a snapshot, or no history was recorded.
    """
    try:
        traces, segments = data["device_traces"], data["segments"]
        entries = [list(map(_entry, trace)) for trace in _list(traces)]
        blocks = _blocks(_list(segments))
        steps = _steps(data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SnapshotError(
            f"the pickle is not a memory snapshot ({type(error).__name__}: {str(error)[:80]}); write one "
            "with torch.cuda.memory._dump_snapshot"
        ) from error
    times = [time_us for trace in entries for *_, time_us in trace]
    clocked = None not in times
    start_us = min((time_us for time_us in times if time_us is not None), default=0)
    memories = tuple(
        _memory(number, trace, blocks.get(number, {}), start_us if clocked else None)
        for number, trace in enumerate(entries)
        if trace
    )
    if not memories:
        raise SnapshotError(
            "the snapshot has no history of allocations; call torch.cuda.memory._record_memory_history() "
            "before the steps"
        )
    marks = [StepMark(name, (a - start_us) * _MICRO, (b - start_us) * _MICRO) for name, a, b in steps]
    notes = ("sizes are those of the allocator's blocks, which round up what was asked for",)
    return Observation(
        "memory snapshot",
        memories,
        steps=tuple(marks) if clocked else (),
        clocked=clocked,
        notes=notes if clocked else (*notes, NO_CLOCK),
    )


_Entry = tuple[str, int, int, int | None]


def _entry(entry: Mapping[str, Any]) -> _Entry:
    """Return (action, address, bytes, microseconds) of an entry of a trace."""
    action = entry["action"]
    if type(action) is not str:
        raise TypeError("an action that is not text")
    address, size, time_us = entry.get("addr", 0), entry.get("size", 0), entry.get("time_us")
    if time_us is not None and (type(time_us) is not int or not 0 <= time_us < 2**63):
        raise ValueError("a time that is none")
    return action, _count(address, 2**64), _count(size, MOST_BYTES), time_us


def _memory(
    device: int, entries: Sequence[_Entry], at_end: Mapping[int, int], start_us: int | None
) -> ObservedMemory:
    """Return the bytes allocated on one device after every event of its trace."""
    alive: dict[int, int] = {}
    before: dict[int, int] = {}
    changes: list[int] = []
    times: list[float] = []
    for number, (action, address, size, time_us) in enumerate(entries):
        if action == "alloc":
            alive[address] = size
            changes.append(size)
        elif action in ("free", "free_completed"):
            if address in alive:
                size = alive.pop(address)
            else:
                # Allocated before the recording began: it has been there all the time.
                before[number] = size
            changes.append(-size)
        else:
            continue
        times.append(number if start_us is None or time_us is None else (time_us - start_us) * _MICRO)
    initial_bytes = sum(before.values()) + sum(size for at, size in at_end.items() if at not in alive)
    # A clock that was set back must not make the curve turn back.
    ordered = np.maximum.accumulate(np.array([0.0, *times]))
    return ObservedMemory(
        f"cuda:{device}", ordered, np.cumsum(np.array([initial_bytes, *changes], dtype=float))
    )


def _blocks(segments: Sequence[Any]) -> dict[int, dict[int, int]]:
    """Return, for each device, the address and bytes of every block that is in use when the snapshot is
    taken."""
    blocks: dict[int, dict[int, int]] = {}
    for segment in segments:
        of_device = blocks.setdefault(_count(segment.get("device", 0), 2**16), {})
        address = segment.get("address", 0)
        for block in _list(segment["blocks"]):
            size = _count(block["size"], MOST_BYTES)
            start = block.get("address", address)  # of older snapshots blocks follow one another
            if block["state"] in _ACTIVE:
                of_device[_count(start, 2**64)] = size
            address = start + size
    return blocks


def _steps(data: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Return the profiler's steps among the annotations that newer snapshots have."""
    begun: dict[str, int] = {}
    steps = []
    for note in _list(data.get("external_annotations", [])):
        name, time_us = note["name"], note["time_us"]
        if not str(name).startswith("ProfilerStep#"):
            continue
        if note["stage"] == "START":
            begun[name] = _count(time_us, 2**63)
        elif name in begun:
            steps.append((str(name), begun.pop(name), _count(time_us, 2**63)))
    return sorted(steps, key=lambda step: step[1])


def _count(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value < most:
        raise ValueError("a size or an address that is none")
    return value


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError("something else than a list")
    return value
