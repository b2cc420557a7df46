"""Measuring workloads on this machine's ranks, all ranks at once.

Ranks share caches and memory bandwidth: a lone measurement is too kind. Every rank therefore times the
same workload at the same moment, one thread each. What counts is how long the slower one takes each time:
in a step the other waits for it, at the next collective at the latest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tensoropt.costs.pool import RankError, RankPool
from tensoropt.costs.store import ProfileStore
from tensoropt.costs.workload import Workload, differentiable, random_tensor, run
from tensoropt.errors import MeasurementError
from tensoropt.sharding.kernels import SingleDevice

MIN_REPEATS, MAX_REPEATS, TARGET_S = 5, 12, 0.12
"""A workload is repeated until ``TARGET_S`` is spent, but within these bounds."""
CACHE_BYTES = 24 * 2**20
"""Data walked through before each timed run, so that no workload is timed on a cache it would not find."""
WAYS = ("forward", "backward")
Progress = Callable[[int, int, str], None]


def time_workload(rank: int, world_size: int, work: Workload, training: bool) -> dict[str, Any]:
    """Forward and backward seconds of a workload on this rank, each time (runs in the pool)."""
    forward: list[float] = []
    backward: list[float] = []
    try:
        tensors = {name: random_tensor(spec) for name, spec, _ in work.inputs}
        if world_size > 1:
            dist.barrier()
        repeats = None
        while repeats is None or len(forward) < repeats:
            elapsed = _once(work, tensors, training)
            if repeats is None:  # the first run warms up and decides how often to repeat
                elapsed = _once(work, tensors, training)
                wanted = int(TARGET_S / max(sum(elapsed), 1e-6))
                repeats = min(MAX_REPEATS, max(MIN_REPEATS, wanted))
                if world_size > 1:  # all ranks repeat equally often, so that none ever runs alone
                    count = torch.tensor(repeats)
                    dist.all_reduce(count, op=dist.ReduceOp.MIN)
                    repeats = int(count)
            forward.append(elapsed[0])
            backward.append(elapsed[1])
    except Exception as error:  # whatever it is, the other workloads go on
        return {"error": str(error).splitlines()[0] if str(error) else type(error).__name__}
    return {"forward": forward, "backward": backward}


def _spread(values: Sequence[float]) -> float:
    """Interquartile range over median."""
    if len(values) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle if middle else 0.0


_OTHER_DATA = torch.zeros(0)


def _leave_cache() -> None:
    """Walk through other data, as the rest of a step does between two visits to an operator's tensors."""
    global _OTHER_DATA
    if not _OTHER_DATA.numel():
        _OTHER_DATA = torch.zeros(CACHE_BYTES // 4)
    _OTHER_DATA.add_(1.0)


def _once(work: Workload, given: Mapping[str, torch.Tensor], training: bool) -> tuple[float, float]:
    tensors = dict(given)
    _leave_cache()
    with torch.set_grad_enabled(training):
        start = time.perf_counter()
        run(work, tensors, SingleDevice())
        middle = time.perf_counter()
    results, leaves = differentiable(work, tensors) if training else ([], [])
    if not results or not leaves:
        return middle - start, 0.0
    gradients = [torch.ones_like(r) for r in results]
    _leave_cache()
    begin = time.perf_counter()
    torch.autograd.grad(results, leaves, gradients, allow_unused=True)
    return middle - start, time.perf_counter() - begin


def time_workloads(
    rank: int, world_size: int, works: Sequence[Workload], training: bool
) -> list[dict[str, Any]]:
    """:func:`time_workload` for several, in one trip to the pool."""
    return [time_workload(rank, world_size, work, training) for work in works]


def measure(
    works: Iterable[Workload],
    pool: RankPool,
    store: ProfileStore,
    prefix: str,
    *,
    training: bool,
    describe: Callable[[Workload], Mapping[str, Any]] = lambda work: {},
    progress: Progress | None = None,
    batch: int = 8,
) -> dict[str, dict[str, Any]]:
    """Time what the store does not know yet; the store is written after every few workloads.

    Args:
        prefix: says on what device and how it is measured; part of the key.
        describe: what a record says beside its seconds.
        progress: called with (done, total, description).

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
    for start in range(0, len(missing), batch):
        chunk = missing[start : start + batch]
        if progress is not None:
            progress(start, len(missing), chunk[0].describe())
        fresh = _time_together(pool, chunk, training)
        for work in chunk:
            if "error" in fresh[work.key] and _registered_here(work):
                fresh[work.key] = joined([time_workload(0, 1, work, training)]) | {"alone": True}
        fresh = {work.key: {**fresh[work.key], **describe(work)} for work in chunk}
        store.put_many({f"{prefix}/{key}": record for key, record in fresh.items()})
        records.update(fresh)
    if progress is not None and missing:
        progress(len(missing), len(missing), "done")
    return records


def _registered_here(work: Workload) -> bool:
    """Whether it calls an operator of the user's own, which the ranks' processes may never have heard of."""
    return any(not call.is_kernel and not call.function.startswith("aten.") for call, _ in work.calls)


def _time_together(pool: RankPool, works: Sequence[Workload], training: bool) -> dict[str, dict[str, Any]]:
    """Records of some workloads; if a rank dies or hangs, each is tried alone and the culprit marked."""
    try:
        per_rank = pool.run(time_workloads, works, training)
    except RankError as error:
        if len(works) == 1:
            return {works[0].key: {"error": str(error).splitlines()[0]}}
        return {k: r for work in works for k, r in _time_together(pool, [work], training).items()}
    return {work.key: joined([ranks[i] for ranks in per_rank]) for i, work in enumerate(works)}


def joined(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record of a workload from what each rank found: ``forward_s`` and ``backward_s`` as they are for
    the last rank, ``spread`` (interquartile range over median) and ``repeats``; or an ``error``."""
    for record in ranks:
        if "error" in record:
            return record
    forward, backward = ([max(t) for t in zip(*(r[way] for r in ranks), strict=True)] for way in WAYS)
    return {
        "forward_s": usual(forward),
        "backward_s": usual(backward),
        "spread": _spread([f + b for f, b in zip(forward, backward, strict=True)]),
        "repeats": len(forward),
    }


def usual(values: Sequence[float]) -> float:
    """The mean, as many of them add up in a step, without what another process disturbed (beyond Tukey's
    fence: 1.5 interquartile ranges above the upper quartile)."""
    if len(values) < 4:
        return statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return statistics.fmean(v for v in values if v <= high + 1.5 * (high - low))


def time_optimizer(rank: int, world_size: int, name: str, elements: int) -> float:
    """Seconds of one optimizer step over ``elements`` float32 parameters on this rank."""
    parameters = [torch.randn(elements // 8).requires_grad_() for _ in range(8)]
    flat = torch.randn(elements // 8 * 8)
    for parameter, piece in zip(parameters, flat.split(elements // 8), strict=True):
        parameter.grad = piece
    optimizer = make_optimizer(name, parameters)
    optimizer.step()
    seconds = []
    for _ in range(5):
        if world_size > 1:
            dist.barrier()
        start = time.perf_counter()
        flat.zero_()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


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
