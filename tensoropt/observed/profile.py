"""Traces of PyTorch's profiler: what streams of a device did when, its memory, and the steps.

The format is Kineto's Chrome trace, as ``torch.profiler.profile.export_chrome_trace`` writes it: ``X`` events
in microseconds; ``kernel``, ``gpu_memcpy`` and ``gpu_memset`` with their stream in ``args``; marks
``ProfilerStep#N``; instants ``[memory]`` if memory was profiled. For a run without a GPU, the outermost
operators of every thread take the place of kernels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensoropt.errors import TensorOptError
from tensoropt.observed.observation import Category, Observation, ObservedEvent, ObservedMemory, StepMark

_MICRO = 1e-6
_KERNELS: Mapping[str, Category] = {"kernel": "compute", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_COMMUNICATION = ("nccl", "rccl", "gloo:", "c10d::")
_DEVICES = {0: "cpu", 1: "cuda"}
"""Names of the profiler's device types (``c10/core/DeviceType.h``)."""
_MOST_EVENTS = 5_000_000
NO_KERNELS = "the trace has no kernels of a GPU: the outermost operators of each thread stand for them"


class ProfileError(TensorOptError):
    """A JSON file that is not a trace of PyTorch's profiler."""


def parse_json(content: bytes) -> Any:
    """Parse JSON strictly, without NaN or infinity.

    Raises:
        ProfileError: the content is not such JSON.
    """

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not a JSON number")

    try:
        return json.loads(content, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"the file is not JSON ({str(error)[:100]}); export the trace again") from error


def read_profile(data: Any) -> Observation:
    """Return the devices' actions, memory and steps in a trace.

    Raises:
        ProfileError: the data are not a trace, or contain nothing useful.
    """
    events = data.get("traceEvents") if isinstance(data, Mapping) else data
    if not isinstance(events, list) or not all(isinstance(e, Mapping) for e in events):
        raise ProfileError("the file has no traceEvents; export it with profile.export_chrome_trace()")
    if len(events) > _MOST_EVENTS:
        raise ProfileError(
            f"the trace has {len(events)} events, more than {_MOST_EVENTS}; profile fewer steps"
        )
    timed = [e for e in events if e.get("ph") == "X" and _number(e.get("ts")) and _number(e.get("dur", 0))]
    instants = [e for e in events if e.get("name") == "[memory]" and _number(e.get("ts"))]
    times = [float(e["ts"]) for e in (*timed, *instants)]
    if not times:
        raise ProfileError("the trace has no events with a time; profile at least one step")
    start_us = min(times)
    kernels = [e for e in timed if e.get("cat") in _KERNELS]
    actions = [_kernel(e, start_us) for e in kernels] or _outermost(timed, start_us)
    # When the GPU reached a step, if the trace says so: kernels run later than the host issues them.
    marks = _marks(timed, "gpu_user_annotation", start_us) or _marks(timed, "user_annotation", start_us)
    memory = _memory(instants, start_us)
    if not actions and not memory:
        raise ProfileError(
            "the trace has neither kernels nor operators nor memory; profile at least one step"
        )
    return Observation(
        "profiler trace",
        memory,
        tuple(sorted(actions, key=lambda e: e.start_s)),
        marks,
        notes=() if kernels else (NO_KERNELS,),
    )


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**63 and math.isfinite(value)


def _seconds(event: Mapping[str, Any], start_us: float) -> tuple[float, float]:
    return (float(event["ts"]) - start_us) * _MICRO, max(float(event.get("dur", 0)), 0.0) * _MICRO


def _text(value: Any) -> str:
    return str(value)[:200]


def _is_communication(name: str) -> bool:
    return name.lower().startswith(_COMMUNICATION) or "nccl" in name.lower()


def _kernel(event: Mapping[str, Any], start_us: float) -> ObservedEvent:
    args = event.get("args")
    args = args if isinstance(args, Mapping) else {}
    device, stream = args.get("device", event.get("pid")), args.get("stream", event.get("tid"))
    name = _text(event.get("name", ""))
    category = "communication" if _is_communication(name) else _KERNELS[event["cat"]]
    lane = f"device {_text(device)} stream {_text(stream)}"
    return ObservedEvent(name, lane, category, *_seconds(event, start_us))


def _outermost(timed: Sequence[Mapping[str, Any]], start_us: float) -> list[ObservedEvent]:
    """Return the operators on the host that lie within no other one."""
    ends: dict[str, float] = {}
    outermost = []
    # The longest of operators that begin together is outermost.
    operators = [e for e in timed if e.get("cat") == "cpu_op"]
    for event in sorted(operators, key=lambda e: (e["ts"], -e.get("dur", 0))):
        lane, end_us = f"thread {_text(event.get('tid'))}", float(event["ts"]) + float(event.get("dur", 0))
        if float(event["ts"]) >= ends.get(lane, -math.inf):
            ends[lane] = end_us
            name = _text(event.get("name", ""))
            category: Category = "communication" if _is_communication(name) else "compute"
            outermost.append(ObservedEvent(name, lane, category, *_seconds(event, start_us)))
    return outermost


def _marks(timed: Sequence[Mapping[str, Any]], category: str, start_us: float) -> tuple[StepMark, ...]:
    marks: dict[str, StepMark] = {}
    for event in timed:
        name = _text(event.get("name", ""))
        if event.get("cat") == category and name.startswith("ProfilerStep#"):
            start_s, duration_s = _seconds(event, start_us)
            before = marks.get(name)
            # A GPU's marks occur once per stream.
            start_s, end_s = (
                (start_s, start_s + duration_s)
                if before is None
                else (min(start_s, before.start_s), max(start_s + duration_s, before.end_s))
            )
            marks[name] = StepMark(name, start_s, end_s)
    return tuple(sorted(marks.values(), key=lambda mark: mark.start_s))


def _memory(instants: Sequence[Mapping[str, Any]], start_us: float) -> tuple[ObservedMemory, ...]:
    """Return the bytes that the profiler reports as allocated on each device, a GPU's if it reports any."""
    by_device: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in instants:
        args = event.get("args")
        total = args.get("Total Allocated") if isinstance(args, Mapping) else None
        if isinstance(args, Mapping) and _number(total):
            kind, number = args.get("Device Type"), args.get("Device Id")
            if type(kind) is int and type(number) is int:
                by_device.setdefault((kind, number), []).append((float(event["ts"]), float(total or 0)))
    gpus = {key: points for key, points in by_device.items() if key[0] == 1}
    memories = []
    for (kind, number), points in sorted((gpus or by_device).items()):
        times, sizes = np.array(sorted(points)).T
        name = _DEVICES.get(kind, f"device type {kind}") + (f":{number}" if number >= 0 else "")
        memories.append(ObservedMemory(name, (times - start_us) * _MICRO, np.maximum(sizes, 0.0)))
    return tuple(memories)
