"""Measuring workloads on this machine's ranks, all ranks at once.

Ranks share caches and memory bandwidth (GPUs: power and the way to the host): a lone measurement is too kind.
Every rank therefore times the same workload at the same moment, one thread each. What counts is the rank that
is usually slower. The slower one of each repeat would be too much: what holds up one rank here and the other
there evens out over the operators between two collectives, where ranks wait for each other.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

import torch
import torch.distributed as dist

from tensoropt.cluster import pin_rank, rank_cores
from tensoropt.errors import MeasurementError
from tensoropt.profiling.eta import Eta, allowed_for, batches
from tensoropt.profiling.store import ProfileStore
from tensoropt.profiling.timers import DeviceTimer, Mark, WallTimer, end_if_lost, local_timer, timer_of
from tensoropt.profiling.workload import Workload, differentiable, makes_tensors, random_tensor, run
from tensoropt.ranks.allocator import keep_freed_memory
from tensoropt.ranks.pool import RankError, RankPool
from tensoropt.ranks.timeouts import forked
from tensoropt.ranks.worker import tell
from tensoropt.sharding.kernels import SingleDevice
from tensoropt.types import Progress, silent

MIN_REPEATS, TARGET_S = 5, 0.12
"""A workload is repeated until ``TARGET_S`` is spent, but so often, and at most as the timer says; in
whole laps over its copies."""
_BOTH_WAYS = 3
"""Forward and backward over forward, about."""
_STARTS, _NODES = 50, 41
_READY_S, _MAKING_S_PER_BYTE = 0.1, 2e-9
"""What getting ready for a workload and making its random tensors take, about."""
WAYS = ("forward", "backward")
_ELSEWHERE = "another rank could not run it"
OUT_OF_MEMORY = "out of memory"
"""Begins the error of a workload that had too little of it."""


def time_workload(
    rank: int, world_size: int, work: Workload, training: bool, timer: DeviceTimer | None = None
) -> dict[str, Any]:
    """Forward and backward seconds of a workload on this rank, each time (runs in the pool).

    Args:
        timer: times the device; that of this rank for None.

    Returns:
        ``forward`` and ``backward``, both cold; ``forward_warm`` and ``backward_warm`` where the timer
        times those too; or an ``error``, such as too little memory.
    """
    timer = timer or local_timer()
    found: dict[str, Any]
    try:
        with _default_device(work, timer):
            found = _time(work, training, world_size, timer)
    except _ApartError:
        raise
    except Exception as error:  # whatever it is, the other workloads go on
        found = {"error": _reason(error)}
    if "error" in found:  # only now, as the error held on to the workload's tensors
        timer.release()
    return found


class _ApartError(RuntimeError):
    """Ranks lost one another, which says nothing of the workload that they were at."""


def _meet(meeting: Callable[[], object]) -> None:
    """Do with the other ranks what all of them do."""
    try:
        meeting()
    except Exception as error:
        raise _ApartError(f"the ranks lost one another: {error}") from error


def _reason(error: Exception) -> str:
    """In one line, with a common start for too little memory."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    short = isinstance(error, MemoryError | torch.OutOfMemoryError) or "t allocate memory" in text
    return f"{OUT_OF_MEMORY}: {text}" if short else text


def _default_device(work: Workload, timer: DeviceTimer) -> contextlib.AbstractContextManager[Any]:
    """Where a call makes a tensor from nothing, it is made on the device. Elsewhere none is set, as PyTorch
    then looks at every call in Python."""
    if timer.device.type == "cpu" or not makes_tensors(work):
        return contextlib.nullcontext()
    return timer.device


def _time(work: Workload, training: bool, world_size: int, timer: DeviceTimer) -> dict[str, Any]:
    if world_size > 1:
        _meet(dist.barrier)
    given: dict[str, torch.Tensor] = {}
    copies: list[Mapping[str, torch.Tensor]] = []
    laps: list[Lap] = []

    def copies_wanted() -> int:
        given.update({name: random_tensor(spec, timer.device) for name, spec, _ in work.inputs})
        return _copies_wanted(work, given, training, timer)

    count = _agreed(copies_wanted, world_size, timer)
    if not count:
        return {"error": _ELSEWHERE}

    def laps_wanted() -> int:
        copies[:] = _copies(work, given, count)
        _lap(work, copies, training, timer)
        laps.append(_lap(work, copies, training, timer))
        visit = sum(map(sum, _seconds(laps, timer).values())) / count
        return ceil(min(timer.most_repeats, max(MIN_REPEATS, TARGET_S / max(visit, 1e-6))) / count)

    wanted = _agreed(laps_wanted, world_size, timer)
    if not wanted:
        return {"error": _ELSEWHERE}
    laps += [_lap(work, copies, training, timer) for _ in range(wanted - 1)]
    found = _seconds(laps, timer)
    if isinstance(timer, WallTimer):  # a GPU's queue hides it
        found["backward"] = [max(s - _start_of_backward_s(), 0.0) for s in found["backward"]]
    if timer.also_warm:
        warm = _seconds([_lap(work, copies[:1], training, timer, cold=False) for _ in laps], timer)
        found |= {f"{way}_warm": seconds for way, seconds in warm.items()}
    return found


def _agreed(wanted: Callable[[], int], world_size: int, timer: DeviceTimer) -> int:
    """The least number that a rank wants: all repeat equally often, so that none ever runs alone. None where
    one of them fails, as the others must not wait for it."""
    try:
        mine = wanted()
    except Exception:
        if world_size > 1:
            none = torch.tensor(0, device=timer.device)
            _meet(lambda: dist.all_reduce(none, op=dist.ReduceOp.MIN))
        raise
    if world_size == 1:
        return mine
    count = torch.tensor(mine, device=timer.device)
    _meet(lambda: dist.all_reduce(count, op=dist.ReduceOp.MIN))
    return int(count)


def _copies_wanted(
    work: Workload, given: Mapping[str, torch.Tensor], training: bool, timer: DeviceTimer
) -> int:
    """As many as the timer wants of tensors so large, but no more than there is time for."""
    tensors = dict(given)
    with torch.set_grad_enabled(training):
        start = timer.mark()
        run(work, tensors, SingleDevice())
        (took,) = timer.seconds([(start, timer.mark())])
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    return max(1, min(timer.copies(size), int(TARGET_S / (_BOTH_WAYS * took))))


def _copies(
    work: Workload, given: Mapping[str, torch.Tensor], count: int
) -> list[Mapping[str, torch.Tensor]]:
    """What the workload is given, several times: layers that are alike but for their tensors. Activations it
    reads are common to all, and made anew for each visit; so are parameters of a loop."""
    common = {name for name, spec, role in work.inputs if role == "read" or spec.looped}
    others = ({n: t if n in common else anew(t) for n, t in given.items()} for _ in range(count - 1))
    return [given, *others]


def anew(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf with the same content, lying alike in memory of its own."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def timing_s(work: Workload, visit_s: float) -> float:
    """About how long timing a workload takes whose forward and backward take ``visit_s``."""
    size = sum(spec.bytes for _, spec, _ in work.inputs)
    copies = max(1, min(WallTimer().copies(size), int(TARGET_S / max(visit_s, 1e-6))))
    visits = 2 * copies + max(MIN_REPEATS, min(TARGET_S / max(visit_s, 1e-6), WallTimer.most_repeats))
    return _READY_S + copies * size * _MAKING_S_PER_BYTE + visits * visit_s


Lap = list[tuple[Mark, Mark, Mark, Mark]]
"""Begin and end of forward, begin and end of backward of each copy."""


def _lap(
    work: Workload,
    copies: Sequence[Mapping[str, torch.Tensor]],
    training: bool,
    timer: DeviceTimer,
    *,
    cold: bool = True,
) -> Lap:
    """A step of a model made of the copies: forward through all of them, backward in the other order.

    As in a model, what a visit reads was made just before it, and what the copy has of its own was last
    touched when all others had not been yet.
    """
    ways = [_forward(work, own, training, timer, cold) for own in copies]
    kept: list[Any] = []  # gradients stay, as they do until the optimizer's step
    lap: Lap = []
    while ways:
        start, middle, tensors = ways.pop()
        results, leaves = differentiable(work, tensors) if training else ([], [])
        if not results or not leaves:
            lap.append((start, middle, middle, middle))
            continue
        gradients = [torch.ones_like(r) for r in results]
        if cold:
            timer.leave_cache()
        begin = timer.mark()
        kept.append(torch.autograd.grad(results, leaves, gradients, allow_unused=True))
        lap.append((start, middle, begin, timer.mark()))
    return lap


def _forward(
    work: Workload, own: Mapping[str, torch.Tensor], training: bool, timer: DeviceTimer, cold: bool
) -> tuple[Mark, Mark, dict[str, torch.Tensor]]:
    """Begin and end of one copy's forward, and its tensors; without training only what it was given."""
    tensors = {n: anew(own[n]) if role == "read" else own[n] for n, _, role in work.inputs}
    if cold:
        timer.leave_cache()
    with torch.set_grad_enabled(training):
        start = timer.mark()
        run(work, tensors, SingleDevice())
        middle = timer.mark()
    return start, middle, tensors if training else {}


@cache
def _start_of_backward_s() -> float:
    """Seconds of a call of autograd beside its nodes: a step pays them once, not for every group."""
    x, one = torch.zeros((), requires_grad=True), torch.ones(())
    seconds: dict[int, list[float]] = {1: [], _NODES: []}
    for _ in range(_STARTS):
        for count, taken in seconds.items():
            y = x
            for _ in range(count):
                y = y.view_as(y)
            start = time.perf_counter()
            torch.autograd.grad([y], [x], [one], allow_unused=True)
            taken.append(time.perf_counter() - start)
    single, chain = (statistics.median(taken) for taken in seconds.values())
    return max(single - (chain - single) / (_NODES - 1), 0.0)


def _seconds(laps: Sequence[Lap], timer: DeviceTimer) -> dict[str, list[float]]:
    """Of each visit, once the device has done all of them."""
    marks = [m for lap in laps for m in lap]
    seconds = timer.seconds([span for m in marks for span in ((m[0], m[1]), (m[2], m[3]))])
    return {"forward": seconds[::2], "backward": seconds[1::2]}


def time_workloads(
    rank: int, world_size: int, works: Sequence[Workload], training: bool
) -> list[dict[str, Any]]:
    """:func:`time_workload` for several, in one trip to the pool; each is told as soon as it is timed.

    A rank that lost its device by one of them ends.
    """
    found = []
    for work in works:
        found.append(time_workload(rank, world_size, work, training))
        tell(found[-1])
        if "error" in found[-1]:
            end_if_lost(local_timer(), f"{work.describe()}: {found[-1]['error']}")
    return found


def measure(
    works: Iterable[Workload],
    pool: RankPool,
    store: ProfileStore,
    prefix: str,
    *,
    training: bool,
    describe: Callable[[Workload], Mapping[str, Any]] = lambda work: {},
    expected_s: Callable[[Workload], float] = lambda work: 0.0,
    progress: Progress = silent,
    batch: int = 8,
) -> dict[str, dict[str, Any]]:
    """Time what the store does not know yet; the store is written after every few workloads.

    Args:
        prefix: says on what device and how it is measured; part of the key.
        describe: what a record says beside its seconds.
        expected_s: about how long forward and backward take, for what is said in advance and for how long a
            workload is waited for.
        progress: is told of the stage ``measure``: what is timed next and how long all of it will take.

    Returns:
        records by workload key; a record with ``error`` marks what could not run.
    """
    wanted = {work.key: work for work in works}
    known = store.get_many([f"{prefix}/{key}" for key in wanted])
    records = {key: known[f"{prefix}/{key}"] for key in wanted if f"{prefix}/{key}" in known}
    missing = [work for key, work in wanted.items() if key not in records]
    plain = {key: {**r, **describe(wanted[key])} for key, r in records.items() if "class" not in r}
    if any(plain[key] != records[key] for key in plain):  # kept before records said what they are of
        store.put_many({f"{prefix}/{key}": record for key, record in plain.items()})
    eta = Eta({work.key: timing_s(work, expected_s(work)) for work in missing})

    def keep(fresh: Mapping[str, dict[str, Any]]) -> None:
        found = {key: {**record, **describe(wanted[key])} for key, record in fresh.items()}
        store.put_many({f"{prefix}/{key}": record for key, record in found.items()})
        records.update(found)
        eta.done(found)

    def time_all(works: Sequence[Workload], *, again: bool) -> list[Workload]:
        short: list[Workload] = []
        for chunk in batches(works, eta.expected_s, batch):
            done = sum(work.key in records for work in missing)
            progress("measure", done, len(missing), f"{eta.words}, {chunk[0].describe()}")
            short += _Batch(pool, training, eta.expected_s, keep).time(chunk, again=again)
        return short

    if short := time_all(missing, again=True):
        pool.restart()  # what ranks have used they hold on to
        time_all(short, again=False)
        pool.restart()
    if missing:
        progress("measure", len(missing), len(missing), "done")
    return records


@dataclass
class _Batch:
    """Timing of a few workloads, each of which may fail, hang or take its ranks with it.

    Args:
        expected_s: by workload key.
        keep: is given records by workload key, as they come.
    """

    pool: RankPool
    training: bool
    expected_s: Mapping[str, float]
    keep: Callable[[Mapping[str, dict[str, Any]]], None]

    def time(self, works: Sequence[Workload], *, again: bool) -> list[Workload]:
        """Keeps a record of each but of those, returned, that had too little memory and may be tried
        ``again``. What kills ranks that had done other work before is tried again at once, on fresh ones."""
        short: list[Workload] = []
        while works:
            fresh = not self.pool.process_ids
            found, failure = self._run(works)
            if failure is not None:
                if failure.kind == "hung" or (fresh and not found):
                    found.append({"error": self._words(failure, works[len(found)])})
                if not found:
                    self.pool.restart()
            records = [self._alone(work, r) for work, r in zip(works, found, strict=False)]
            lacking = [again and r.get("error", "").startswith(OUT_OF_MEMORY) for r in records]
            done = list(zip(works, records, lacking, strict=False))
            short += [work for work, _, lacks in done if lacks]
            self.keep({work.key: record for work, record, lacks in done if not lacks})
            works = works[len(found) :]
        return short

    def _run(self, works: Sequence[Workload]) -> tuple[list[dict[str, Any]], RankError | None]:
        """Records of the first of them, and what kept the ranks from the next."""
        told: list[list[dict[str, Any]]] = [[] for _ in range(self.pool.world_size)]
        allowed_s = max(allowed_for(self.pool.timeout_s, self.expected_s[work.key]) for work in works)
        failure = None
        try:
            self.pool.run(
                time_workloads,
                works,
                self.training,
                timeout_s=allowed_s,
                told=lambda rank, record: told[rank].append(record),
            )
        except RankError as error:
            failure = error
        except BaseException:  # interrupted: what was told is kept
            self.keep(
                {
                    w.key: joined(ranks)
                    for w, ranks in zip(works, zip(*told, strict=False), strict=False)
                    if not any("error" in record for record in ranks)
                }
            )
            raise
        return [joined(ranks) for ranks in zip(*told, strict=False)], failure

    def _words(self, failure: RankError, work: Workload) -> str:
        if failure.kind != "hung":
            return failure.summary
        return f"it did not end within {allowed_for(self.pool.timeout_s, self.expected_s[work.key]):.0f} s"

    def _alone(self, work: Workload, record: dict[str, Any]) -> dict[str, Any]:
        """The record, or another try in a process that knows operators which were registered in this one."""
        if "error" not in record or not _registered_in_process(work):
            return record
        if self.pool.backend == "nccl":
            own = joined([time_workload(0, 1, work, self.training, timer_of("cuda:0"))])
        else:
            own = time_alone(work, self.training, allowed_for(self.pool.timeout_s, self.expected_s[work.key]))
        return own | {"alone": True}


def _registered_in_process(work: Workload) -> bool:
    """Whether it calls an operator of the user's own, which the ranks' processes may never have heard of."""
    return any(not call.is_kernel and not call.function.startswith("aten.") for call, _ in work.calls)


def time_alone(work: Workload, training: bool, allowed_s: float) -> dict[str, Any]:
    """The record of a workload timed in a fork of this process, so that it may hang or crash."""

    def child() -> dict[str, Any]:
        pin_rank((rank_cores(1) or [None])[0])
        keep_freed_memory()
        torch.set_num_threads(1)
        return time_workload(0, 1, work, training, timer_of("cpu"))

    try:
        return joined([forked(child, allowed_s)])
    except MeasurementError as error:
        return {"error": str(error)}


def _spread(values: Sequence[float]) -> float:
    """Interquartile range over median."""
    if len(values) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle if middle else 0.0


def joined(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record of a workload from what each rank found: ``forward_s`` and ``backward_s`` of the slower
    rank, ``spread`` (interquartile range over median) and ``repeats``; on GPUs ``forward_warm_s``
    and ``backward_warm_s`` as well; or an ``error``, that of a rank which could not rather than of one that
    was told so."""
    errors = [record for record in ranks if "error" in record]
    if errors:
        return min(errors, key=lambda record: record["error"] == _ELSEWHERE)
    slowest = max(ranks, key=lambda r: sum(usual(r[way]) for way in WAYS))
    both = [f + b for f, b in zip(*(slowest[way] for way in WAYS), strict=True)]
    seconds = {f"{way}_s": usual(times) for way, times in slowest.items()}
    return {**seconds, "spread": _spread(both), "repeats": len(both)}


def usual(values: Sequence[float]) -> float:
    """The mean, as many of them add up in a step, without what another process disturbed (beyond Tukey's
    fence: 1.5 interquartile ranges above the upper quartile)."""
    if len(values) < 4:
        return statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return statistics.fmean(v for v in values if v <= high + 1.5 * (high - low))


def time_optimizer(rank: int, world_size: int, name: str, elements: int) -> float:
    """Seconds of one optimizer step over ``elements`` float32 parameters on this rank."""
    timer = local_timer()
    parameters = [torch.randn(elements // 8, device=timer.device).requires_grad_() for _ in range(8)]
    flat = torch.randn(elements // 8 * 8, device=timer.device)
    for parameter, piece in zip(parameters, flat.split(elements // 8), strict=True):
        parameter.grad = piece
    optimizer = make_optimizer(name, parameters)
    optimizer.step()
    spans = []
    for _ in range(5):
        if world_size > 1:
            dist.barrier()
        start = timer.mark()
        flat.zero_()
        optimizer.step()
        spans.append((start, timer.mark()))
    return statistics.median(timer.seconds(spans))


def make_optimizer(name: str, parameters: Iterable[torch.Tensor], lr: float = 1e-3) -> torch.optim.Optimizer:
    """The optimizer called ``sgd``, ``momentum`` or ``adam``, multi-tensor implementation."""
    if name == "adam":
        return torch.optim.Adam(parameters, lr=lr, foreach=True)
    if name in ("sgd", "momentum"):
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9 if name == "momentum" else 0.0, foreach=True)
    raise MeasurementError(f"unknown optimizer '{name}'; use sgd, momentum or adam")


OPTIMIZER_SIZES = (1 << 18, 1 << 22)


def measure_optimizer(pool: RankPool, store: ProfileStore, prefix: str, name: str) -> float:
    """Seconds per element of an optimizer step, from the slope between two sizes."""
    key = f"{prefix}/optimizer-{name}"
    record = store.get(key)
    if record is None:
        small, large = (max(pool.run(time_optimizer, name, n)) for n in OPTIMIZER_SIZES)
        slope = max(large - small, 0.0) / (OPTIMIZER_SIZES[1] - OPTIMIZER_SIZES[0])
        record = {"seconds_per_element": slope}
        store.put(key, record)
    return float(record["seconds_per_element"])
