"""Functions that time workloads on a pool of ranks, unless the profile store has their times already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensoropt.profiling import workload_timing
from tensoropt.profiling.store import ProfileStore
from tensoropt.profiling.timers import WallTimer
from tensoropt.profiling.workload import Workload
from tensoropt.ranks.pool import RankPool
from tensoropt.ranks.worker_process import RankError
from tensoropt.types import Progress, silent

_BATCH_S, _BATCH = 5.0, 8
"""The most seconds and workloads between two saves, which an interruption may lose; assumptions."""
_SLOWER = 20.0
"""The ratio of a workload's time to its estimate above which it counts as hanging; an assumption."""


def _allowed_for(timeout_s: float, expected_s: float) -> float:
    return timeout_s / 2 + _SLOWER * expected_s


def _batches(works: Sequence[Workload], expected_s: Mapping[str, float]) -> Iterator[list[Workload]]:
    """Yield consecutive workloads in batches of at most ``_BATCH_S`` seconds and ``_BATCH`` workloads."""
    batch: list[Workload] = []
    for work in works:
        took_s = sum(expected_s[other.key] for other in [*batch, work])
        if batch and (len(batch) == _BATCH or took_s > _BATCH_S):
            yield batch
            batch = []
        batch.append(work)
    if batch:
        yield batch


_READY_S, _MAKING_S_PER_BYTE = 0.1, 2e-9
"""The approximate time, in seconds, to prepare a workload, and to make a byte of random tensors."""


def _timing_s(work: Workload, visit_s: float) -> float:
    """Return the estimated seconds of measuring a workload; one forward and backward take ``visit_s``."""
    size = sum(spec.bytes for _, spec, _ in work.inputs)
    copies = max(1, min(WallTimer().copies(size), int(workload_timing.TARGET_S / max(visit_s, 1e-6))))
    # The first two laps over all copies, followed by the repeats.
    visits = 2 * copies + workload_timing.repeats_within(visit_s)
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
    begins: Callable[[int, float], None] = lambda count, seconds: None,
) -> dict[str, dict[str, Any]]:
    """Time the workloads that the store lacks, and return the records of all workloads.

    Args:
        prefix: the beginning of store keys, which names the device and how it is measured.
        describe: a function that returns further fields of a workload's record.
        expected_s: a function that estimates the seconds of forward and backward, for progress and timeouts.
        progress: receives reports of the stage ``measure``.
        begins: called once before measuring, with the number of workloads and the estimated seconds.

    Returns:
        workload key -> record; a workload that could not run has the field ``error``.
    """
    wanted = {work.key: work for work in works}
    stored = store.get_many([f"{prefix}/{key}" for key in wanted])
    records = {key: stored[f"{prefix}/{key}"] for key in wanted if f"{prefix}/{key}" in stored}
    missing = [work for key, work in wanted.items() if key not in records]
    seconds = {work.key: _timing_s(work, expected_s(work)) for work in missing}
    if missing:
        begins(len(missing), sum(seconds.values()))

    def keep(fresh: Mapping[str, dict[str, Any]]) -> None:
        described = {key: {**record, **describe(wanted[key])} for key, record in fresh.items()}
        records.update(described)
        store.put_many({f"{prefix}/{key}": record for key, record in described.items()})

    def time_all(works: Sequence[Workload], *, again: bool) -> list[Workload]:
        short: list[Workload] = []
        for chunk in _batches(works, seconds):
            done = len(seconds.keys() & records.keys())
            progress("measure", done, len(missing), chunk[0].describe())
            short += _Batch(pool, training, seconds, keep).time(chunk, again=again)
        return short

    if short := time_all(missing, again=True):
        # Earlier workloads in the process may have caused the lack of memory: it is tried once more on fresh
        # ranks.
        pool.restart()  # ranks hold on to what they have used
        time_all(short, again=False)
        pool.restart()
    if missing:
        progress("measure", len(missing), len(missing), "done")
    return records


@dataclass
class _Batch:
    """A few workloads that one run of the pool times."""

    pool: RankPool
    training: bool
    expected_s: Mapping[str, float]
    keep: Callable[[Mapping[str, dict[str, Any]]], None]

    def time(self, works: Sequence[Workload], *, again: bool) -> list[Workload]:
        """Time workloads and save their records. With ``again``, return workloads that ran out of memory
        instead of saving their errors, so that they can be tried once more."""
        short: list[Workload] = []
        while works:
            # These ranks are not started yet, so if they die, no leftover of earlier work is the reason.
            fresh = not self.pool.process_ids
            results, failure = self._run(works)
            if failure is not None:
                # The workload after the last reported one is the culprit. It is charged only if it hung, or
                # if ranks that had done nothing else died of it; otherwise it is tried again on fresh ranks.
                if failure.kind == "hung" or (fresh and not results):
                    allowed_s = _allowed_for(self.pool.timeout_s, self.expected_s[works[len(results)].key])
                    hung = f"it did not end within {allowed_s:.0f} s"
                    results.append({"error": hung if failure.kind == "hung" else failure.summary})
                if not results:
                    self.pool.restart()
            lacking = [
                again and r.get("error", "").startswith(workload_timing.OUT_OF_MEMORY) for r in results
            ]
            done = list(zip(works, results, lacking, strict=False))
            short += [work for work, _, lacks in done if lacks]
            self.keep({work.key: record for work, record, lacks in done if not lacks})
            works = works[len(results) :]
        return short

    def _run(self, works: Sequence[Workload]) -> tuple[list[dict[str, Any]], RankError | None]:
        messages: list[list[dict[str, Any]]] = [[] for _ in range(self.pool.world_size)]
        # The pool's time-out counts from the last message, so the longest workload of the batch determines
        # it.
        allowed_s = max(_allowed_for(self.pool.timeout_s, self.expected_s[work.key]) for work in works)
        failure = None
        try:
            self.pool.run(
                workload_timing.time_workloads,
                works,
                self.training,
                timeout_s=allowed_s,
                on_message=lambda rank, record: messages[rank].append(record),
            )
        except RankError as error:
            failure = error
        except BaseException:  # interrupted: received records are kept
            self.keep(
                {
                    w.key: workload_timing.joined(ranks)
                    for w, ranks in zip(works, zip(*messages, strict=False), strict=False)
                    if not any("error" in record for record in ranks)
                }
            )
            raise
        return [workload_timing.joined(ranks) for ranks in zip(*messages, strict=False)], failure
