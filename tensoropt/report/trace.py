"""A step as a Chrome trace (the "Trace Event Format"), which chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from tensoropt.files import write_text
from tensoropt.simulate.recording import MemoryAt, TimelineEvent

_MICRO = 1e6
_DEVICE = 1


def chrome_trace(
    events: Sequence[TimelineEvent], memory: Sequence[MemoryAt], title: str, assumption: str
) -> dict[str, Any]:
    """Return lanes as threads of one process, and memory as a stacked counter; times in microseconds."""
    lanes = {
        lane: i
        for i, lane in enumerate(
            # Compute first, then links in the order of their first use: sorted() is stable.
            dict.fromkeys(sorted((e.lane for e in events), key=lambda lane: lane != "compute"))
        )
    }
    found: list[dict[str, Any]] = [_named("process_name", 0, f"device ({title})")]
    found += [_named("thread_name", number, lane) for lane, number in lanes.items()]
    found += [
        {
            "name": e.name, "cat": e.phase, "ph": "X", "pid": _DEVICE, "tid": lanes[e.lane],
            "ts": e.start_s * _MICRO, "dur": e.duration_s * _MICRO, "args": {"group": e.group},
        }
        for e in events
    ]  # fmt: skip
    for at in memory:
        sizes = {k: v for k, v in vars(at).items() if k != "time_s"}
        found.append({"name": "memory", "ph": "C", "pid": _DEVICE, "ts": at.time_s * _MICRO, "args": sizes})
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"overlap": assumption}}


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _DEVICE, "tid": thread, "args": {"name": name}}


def write_trace(trace: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a trace as JSON into a file, whole or not at all."""
    write_text(path, json.dumps(trace) + "\n")
