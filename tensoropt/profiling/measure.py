"""Measuring workloads on a pool of ranks: what the store does not know is timed, kept as it comes, and tried
again where that helps.

A workload may fail, hang, take its ranks with it or have too little memory; the others go on. What runs on
the ranks is :mod:`tensoropt.profiling.workload_timing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensoropt.profiling.eta import Eta, allowed_for, batches
from tensoropt.profiling.store import ProfileStore
from tensoropt.profiling.timers import WallTimer, timer_of
from tensoropt.profiling.workload import Workload
from tensoropt.profiling.workload_timing import (
    MIN_REPEATS,
    OUT_OF_MEMORY,
    TARGET_S,
    joined,
    time_alone,
    time_workload,
    time_workloads,
)
from tensoropt.ranks.failures import RankError
from tensoropt.ranks.pool import RankPool
from tensoropt.types import Progress, silent

_READY_S, _MAKING_S_PER_BYTE = 0.1, 2e-9
"""What getting ready for a workload and making its random tensors take, about."""


def timing_s(work: Workload, visit_s: float) -> float:
    """About how long timing a workload takes whose forward and backward take ``visit_s``."""
    size = sum(spec.bytes for _, spec, _ in work.inputs)
    copies = max(1, min(WallTimer().copies(size), int(TARGET_S / max(visit_s, 1e-6))))
    # The two first laps over all copies, and then the repeats.
    visits = 2 * copies + max(MIN_REPEATS, min(TARGET_S / max(visit_s, 1e-6), WallTimer.most_repeats))
    return _READY_S + copies * size * _MAKING_S_PER_BYTE + visits * visit_s


def measure_workloads(
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
        # Too little memory may be what earlier workloads left behind in the process: tried once more on fresh
        # ranks.
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
        """The workloads that had too little memory and may be tried ``again``; all others have a record.

        What kills ranks that had done other work before is tried again at once, on fresh ones.
        """
        short: list[Workload] = []
        while works:
            # Ranks that are not started yet: what kills them is no remainder of earlier work.
            fresh = not self.pool.process_ids
            found, failure = self._run(works)
            if failure is not None:
                # The workload after the last that was told is the culprit. It is charged only if it hung, or
                # if ranks that had done nothing else died of it; otherwise it is tried again on fresh ranks.
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
        # The pool's time-out counts from the last thing told, so that the longest workload of the batch sets
        # it.
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
        # A fork of a process that has initialised CUDA cannot use it, so that this process times the workload
        # itself.
        if self.pool.backend == "nccl":
            own = joined([time_workload(0, 1, work, self.training, timer_of("cuda:0"))])
        else:
            own = time_alone(work, self.training, allowed_for(self.pool.timeout_s, self.expected_s[work.key]))
        return own | {"alone": True}


def _registered_in_process(work: Workload) -> bool:
    """Whether it calls an operator of the user's own, which the ranks' processes may never have heard of."""
    return any(not call.is_kernel and not call.function.startswith("aten.") for call, _ in work.calls)
