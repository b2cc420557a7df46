"""Functions that time a workload on each rank, and join the ranks' times to one record.

All ranks time the same workload at once, as they share caches, bandwidth and power. The figure of the slowest
rank counts (:mod:`tensoropt.profiling.timers`). The maximum over ranks is not taken repeat by repeat, because
delays even out between collectives.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import ceil
from typing import Any

import torch
import torch.distributed as dist

from tensoropt.ops.kernels import SingleDevice
from tensoropt.profiling.timers import DeviceTimer, Span, end_if_lost, local_timer, timed, timer_of
from tensoropt.profiling.workload import Workload, differentiable, makes_tensors, random_tensor, run_workload
from tensoropt.ranks.worker import tell

MIN_REPEATS, _MOST_REPEATS, TARGET_S = 5, 50, 0.12
"""The fewest and most repeats of a workload, and their total duration in seconds; assumptions."""
_BOTH_WAYS = 3
"""The ratio of the duration of forward plus backward to that of forward."""
_STARTS, _NODES = 50, 41
"""Repeats of timing the start of a backward, and autograd nodes of the longer of the two timed chains."""
_WAYS = ("forward", "backward")
WAITS = "waits"
"""The field of a GPU's record: its host could not run ahead, so durations may contain gaps."""
_ELSEWHERE = "another rank could not run it"


OUT_OF_MEMORY = "out of memory"
"""The beginning of the error text of a workload that ran out of memory."""


def time_workload(
    rank: int, world_size: int, work: Workload, training: bool, timer: DeviceTimer | None = None
) -> dict[str, Any]:
    """Measure a workload's forward and backward on this rank, for each repeat (runs in the pool).

    Args:
        timer: by default this rank's.

    Returns:
        Lists of seconds, one for each repeat: ``forward`` and ``backward`` on the device with cold caches; on
            GPUs also ``forward_host`` and ``backward_host``, the host's time to launch them, and ``waits`` if
            it could not launch ahead of the device. After a failure, such as too little memory, only an
            ``error``.
    """
    timer = timer or local_timer()
    record: dict[str, Any]
    try:
        with _default_device(work, timer):
            record = _time(work, training, world_size, timer)
    # Not a failure of this workload: measuring continues with fresh ranks.
    except _ApartError:
        raise
    except Exception as error:  # whatever it is, the other workloads proceed
        record = {"error": _reason(error)}
    if "error" in record:  # only now, because the error held the workload's tensors
        timer.release()
    return record


class _ApartError(RuntimeError):
    """The ranks failed to synchronise, which need not be the workload's fault."""


def _meet(meeting: Callable[[], object]) -> None:
    try:
        meeting()
    except Exception as error:
        raise _ApartError(f"the ranks failed to synchronise: {error}") from error


def _reason(error: Exception) -> str:
    """Return the first line of an error's text; out-of-memory errors all begin with ``OUT_OF_MEMORY``."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    # PyTorch's CPU allocator raises a plain RuntimeError that says "can't allocate memory".
    short = isinstance(error, MemoryError | torch.OutOfMemoryError) or "t allocate memory" in text
    return f"{OUT_OF_MEMORY}: {text}" if short else text


def _default_device(work: Workload, timer: DeviceTimer) -> contextlib.AbstractContextManager[Any]:
    """Return a context with the GPU as default device if a call makes a tensor; else none, for speed."""
    if timer.device.type == "cpu" or not makes_tensors(work):
        return contextlib.nullcontext()
    return timer.device


def _time(work: Workload, training: bool, world_size: int, timer: DeviceTimer) -> dict[str, Any]:
    if world_size > 1:
        _meet(dist.barrier)
    given: dict[str, torch.Tensor] = {}
    copies: list[Mapping[str, torch.Tensor]] = []
    laps: list[_Lap] = []

    def copies_wanted() -> int:
        given.update({name: random_tensor(spec, timer.device) for name, spec, _ in work.inputs})
        return _copies_wanted(work, given, training, timer)

    count = _agreed(copies_wanted, world_size, timer)

    def laps_wanted() -> int:
        copies[:] = _copies(work, given, count)
        # The first lap does not count: it loads kernels and touches fresh pages.
        _lap(work, copies, training, timer)
        laps.append(_lap(work, copies, training, timer))
        visit = sum(sum(timer.seconds([span for span in spans if span])) for spans in laps[0]) / count
        return ceil(repeats_within(visit) / count)

    wanted = _agreed(laps_wanted, world_size, timer)
    laps += [_lap(work, copies, training, timer) for _ in range(wanted - 1)]
    record: dict[str, Any] = {}
    if timer.host_apart:
        # Laps in which the host was not ahead do not count, and are timed again: by now the timer has a
        # better estimate of the lead that the host needs.
        enough = _agreed(lambda: 1 + (_ahead(laps) >= MIN_REPEATS), world_size, timer)
        if enough < 2:
            laps += [_lap(work, copies, training, timer) for _ in range(wanted)]
            enough = _agreed(lambda: 1 + (_ahead(laps) >= MIN_REPEATS), world_size, timer)
        if enough < 2:
            laps = [_lap(work, copies, training, timer, ahead=False) for _ in range(wanted)]
            record[WAITS] = True
    record |= _seconds(laps, timer)
    # A call of autograd belongs to the host, and a GPU does not see it.
    issued = "backward_host" if timer.host_apart else "backward"
    start_s = _start_of_backward_s(timer.device)
    record[issued] = [max(s - start_s, 0.0) for s in record[issued]]
    return record


def repeats_within(visit_s: float) -> float:
    """Return how often to time a workload, given the seconds of one forward and backward."""
    return min(max(MIN_REPEATS, TARGET_S / max(visit_s, 1e-6)), _MOST_REPEATS)


def _agreed(wanted: Callable[[], int], world_size: int, timer: DeviceTimer) -> int:
    """Return the least number that any rank wants, so that all repeat equally often; raise if one fails."""

    def least(mine: int) -> int:
        if world_size == 1:
            return mine
        count = torch.tensor(mine, device=timer.device)
        _meet(lambda: dist.all_reduce(count, op=dist.ReduceOp.MIN))
        return int(count)

    try:
        mine = wanted()
    except Exception:
        least(0)  # a failing rank takes part; otherwise the others would wait in the all-reduce forever
        raise
    if not (agreed := least(mine)):
        raise RuntimeError(_ELSEWHERE)
    return agreed


def _copies_wanted(
    work: Workload, given: Mapping[str, torch.Tensor], training: bool, timer: DeviceTimer
) -> int:
    tensors = dict(given)
    with torch.set_grad_enabled(training):
        _, span = timed(timer, lambda: run_workload(work, tensors, SingleDevice()))
        (took,) = timer.seconds([span])
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    return max(1, min(timer.copies(size), int(TARGET_S / (_BOTH_WAYS * took))))


def _copies(
    work: Workload, given: Mapping[str, torch.Tensor], count: int
) -> list[Mapping[str, torch.Tensor]]:
    """Return ``count`` copies of the workload's inputs, as if of identical layers of one model."""
    common = {name for name, spec, role in work.inputs if role == "read" or spec.looped}
    others = ({n: t if n in common else _anew(t) for n, t in given.items()} for _ in range(count - 1))
    return [given, *others]


def _anew(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


_Visit = tuple[Span, Span | None]
"""The timed spans of forward and of backward (if any) of one copy of the workload."""
_Lap = list[_Visit]


def _lap(
    work: Workload,
    copies: Sequence[Mapping[str, torch.Tensor]],
    training: bool,
    timer: DeviceTimer,
    *,
    ahead: bool = True,
) -> _Lap:
    """Run a step of a model made of the copies: forward through all of them, then backward in reverse order.

    The activations that a copy reads are made just before its forward, as in a step.

    Args:
        ahead: let the host launch work ahead of the device.
    """
    ways = [_forward(work, own, training, timer, ahead=ahead) for own in copies]
    kept: list[Any] = []  # gradients stay, as they do until the optimizer's step
    lap: _Lap = []
    while ways:
        # pop() takes the last copy first, as backward does, and releases its tensors afterwards.
        forward, tensors = ways.pop()
        results, leaves = differentiable(work, tensors) if training else ([], [])
        if not results or not leaves:
            lap.append((forward, None))
            continue
        # Before the span: in a step the gradients come from the operator after this one.
        gradients = [torch.ones_like(r) for r in results]
        timer.leave_cache()
        begun = timer.begin(ahead=ahead)
        kept.append(torch.autograd.grad(results, leaves, gradients, allow_unused=True))
        lap.append((forward, timer.end(begun)))
    return lap


def _forward(
    work: Workload,
    own: Mapping[str, torch.Tensor],
    training: bool,
    timer: DeviceTimer,
    *,
    ahead: bool,
) -> tuple[Span, dict[str, torch.Tensor]]:
    tensors = {n: _anew(own[n]) if role == "read" else own[n] for n, _, role in work.inputs}
    timer.leave_cache()
    with torch.set_grad_enabled(training):
        begun = timer.begin(ahead=ahead)
        run_workload(work, tensors, SingleDevice())
        span = timer.end(begun)
    return span, tensors if training else {}


@cache
def _start_of_backward_s(device: torch.device) -> float:
    """Return the seconds of a call of autograd without any node, which a step pays only once."""
    x, gradient = torch.zeros((), device=device, requires_grad=True), torch.ones((), device=device)
    seconds: dict[int, list[float]] = {1: [], _NODES: []}
    for _ in range(_STARTS):
        for count, taken in seconds.items():
            y = x
            for _ in range(count):
                y = y.view_as(y)
            start = time.perf_counter()
            torch.autograd.grad([y], [x], [gradient], allow_unused=True)
            taken.append(time.perf_counter() - start)
    single, chain = map(timer_of(str(device)).counting_s, seconds.values())
    # The longer chain shows the time of one node, which is then subtracted from the call with a single node.
    return max(single - (chain - single) / (_NODES - 1), 0.0)


def _ahead(laps: Sequence[_Lap]) -> int:
    return sum(all(span.ahead for span in visit if span) for lap in laps for visit in lap)


def _seconds(laps: Sequence[_Lap], timer: DeviceTimer) -> dict[str, list[float]]:
    """Return the seconds of all undisturbed runs of copies, or of all runs if every one was disturbed."""
    visits = [visit for lap in laps for visit in lap]
    visits = [v for v in visits if not any(span.disturbed for span in v if span)] or visits
    record = {
        "forward": timer.seconds([forward for forward, _ in visits]),
        "backward": [timer.seconds([back])[0] if back else 0.0 for _, back in visits],
    }
    if timer.host_apart:
        record["forward_host"] = [forward.host_s for forward, _ in visits]
        record["backward_host"] = [back.host_s if back else 0.0 for _, back in visits]
    return record


def time_workloads(
    rank: int, world_size: int, works: Sequence[Workload], training: bool
) -> list[dict[str, Any]]:
    """Time several workloads on this rank, one after another, and send each record to the pool at once."""
    records = []
    for work in works:
        records.append(time_workload(rank, world_size, work, training))
        tell(records[-1])
        if "error" in records[-1]:
            end_if_lost(local_timer(), f"{work.describe()}: {records[-1]['error']}")
    return records


def _spread(values: Sequence[float]) -> float:
    if len(values) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle if middle else 0.0


def joined(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of a workload from the records of all ranks.

    Its fields are ``forward_s`` and ``backward_s`` of the slowest rank, ``spread`` (interquartile range over
    median) and ``repeats``; on GPUs also ``forward_host_s``, ``backward_host_s`` and ``waits``. If a rank
    failed, it has only the ``error``, preferably of the rank that failed first.
    """
    errors = [record for record in ranks if "error" in record]
    if errors:
        # False sorts before True: a rank's own error comes before that of one that only heard of it.
        return min(errors, key=lambda record: record["error"] == _ELSEWHERE)
    of = usual if "forward_host" in ranks[0] else min
    slowest = max(ranks, key=lambda r: sum(of(r[way]) for way in _WAYS))
    both = [f + b for f, b in zip(*(slowest[way] for way in _WAYS), strict=True)]
    seconds = {f"{way}_s": of(times) for way, times in slowest.items() if way != WAITS}
    waits = {WAITS: True} if any(WAITS in record for record in ranks) else {}
    return {**seconds, **waits, "spread": _spread(both), "repeats": len(both)}


def usual(values: Sequence[float]) -> float:
    """Return the mean of the values below Tukey's fence (upper quartile plus 1.5 interquartile ranges)."""
    if len(values) < 4:
        return statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return statistics.fmean(v for v in values if v <= high + 1.5 * (high - low))
