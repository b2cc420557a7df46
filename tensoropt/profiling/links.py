"""Functions that time collectives and messages on a mesh of ranks, fit lines to the times and store them.

The meaning of ``bytes`` for each kind:

    all_reduce      the tensor            all_gather      the gathered output of one rank
    reduce_scatter  the input of one rank all_to_all      the input of one rank
    broadcast       the tensor            send            the message (point to point, one way)

Collectives are timed in place: on CPUs from the last rank's call to the last rank's return, on GPUs on the
slowest device, queued behind other work.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from tensoropt.cluster import Cluster, Mesh
from tensoropt.errors import MeasurementError
from tensoropt.profiling.link_fits import LinkFit, fit_segments
from tensoropt.profiling.link_timing import COLLECTIVES, SizeStamps, time_collective, time_pair
from tensoropt.profiling.store import ProfileStore
from tensoropt.ranks.pool import RankPool
from tensoropt.ranks.worker_process import RankError
from tensoropt.types import Floats, Progress, silent
from tensoropt.units import format_bytes, format_seconds

_logger = logging.getLogger(__name__)

# Five decades in KiB, closer together where caches, algorithms and the allocator (at 32 MiB) change.
_QUICK_SIZES = tuple(
    1024 * kib for kib in (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 24576, 32768, 65536)
)
_SEND = "send"
"""The kind of point-to-point messages, measured besides collectives."""
# Fewer than for collectives, because there are many pairs.
_PAIR_SIZES = (1024, 16 * 1024, 256 * 1024, 4 * 1024**2, 64 * 1024**2)
_BUDGET_S = 0.12  # per size: the larger, the fewer repeats, so that no size takes most of the time
# Assumptions: fifty give a steady mean for small messages, five bound the time of the largest.
_MOST_REPEATS, _FEWEST_REPEATS = 50, 5
_MESSAGE_S, _BYTES_PER_S = 300e-6, 0.8e9
"""The approximate time of a small gloo message in seconds, and bytes per second of a large one."""
_TITLE = 40  # columns
_HOW_OF = {
    "gloo": "in place/smallest, waits, rounds, batch class",
    "nccl": "in place/mean in step without a standstill, waits, laps, batch class, in stream",
}
"""The way of measuring by each backend. It is a part of every key, so that figures measured in another way
are not reused."""
_ROUNDS = {"gloo": 3, "nccl": 1}
"""The rounds over which the repeats of each measurement are spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFits:
    """The lines fitted to the times of all collectives and all pairs of ranks of one mesh.

    Attributes:
        collectives: ``(kind, axes)`` -> one fit per group; all groups ran at once, and so shared links.
        pairs: ``(low rank, high rank)`` -> fit; each pair was measured alone.
        failed: title of a failed measurement -> reason.
    """

    collectives: Mapping[tuple[str, tuple[int, ...]], tuple[LinkFit, ...]]
    pairs: Mapping[tuple[int, int], LinkFit] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def table(self) -> str:
        """Return a text table with the fit of the slowest group of each kind and set of axes."""
        lines = [f"{'what':<{_TITLE}}{'latency':>10}{'bandwidth':>14}{'residual':>10}"]
        for (kind, axes), fits in self.collectives.items():
            worst = max(fits, key=lambda fit: fit.time_s(1e6))
            lines += _rows(f"{kind} axes {','.join(map(str, axes))}", worst)
        for (low, high), fit in self.pairs.items():
            lines += _rows(f"send {low}-{high}", fit)
        lines += [f"{title:<{_TITLE}}not measured: {why}" for title, why in self.failed.items()]
        return "\n".join(lines)


def _rows(title: str, fit: LinkFit) -> list[str]:
    rows = []
    for segment in fit.segments:
        end = "" if math.isinf(segment.up_to_bytes) else f" to {format_bytes(segment.up_to_bytes)}"
        rate = segment.bandwidth_bytes_per_s
        speed = "∞" if math.isinf(rate) else f"{rate / 1e9:.3g} GB/s"
        rows.append(
            f"{title + end:<{_TITLE}}{format_seconds(segment.alpha_s):>10}{speed:>14}{fit.residual:>10.1%}"
        )
        title = " " * len(title)
    return rows


def _repeats_for(size: int) -> int:
    """Return how often to time a message size; most sizes then take the same total time."""
    return int(min(_MOST_REPEATS, max(_FEWEST_REPEATS, _BUDGET_S / (_MESSAGE_S + size / _BYTES_PER_S))))


def _in_step(seconds: Floats) -> float:
    """Return the mean of a collective's durations, stalls included, as they also occur in a training step.

    The longest repeat is left out if it took longer than all others together: a standstill of the machine.
    """
    *others, longest = np.sort(seconds)
    return float(np.mean(others if len(others) > 1 and longest > sum(others) else seconds))


def measure_links(
    cluster: Cluster,
    mesh: Mesh,
    pool: RankPool,
    store: ProfileStore | None = None,
    *,
    kinds: Sequence[str] = COLLECTIVES,
    sizes: Sequence[int] = _QUICK_SIZES,
    pairs: bool = True,
    refresh: bool = False,
    progress: Progress = silent,
    stage: str = "links",
) -> LinkFits:
    """Time collectives on the groups of every set of mesh axes, and every pair of ranks; return the fits.

    Stored measurements are reused, and new ones are saved at once, so that an interrupted call resumes.

    Args:
        pool: ranks of this cluster.
        store: keeps measurements by cluster fingerprint, backend, kind and groups.
        sizes: message sizes in bytes, ascending.
        refresh: measure anew what is stored.
        progress: called before each measurement and at the end, with ``stage``.

    Raises:
        MeasurementError: the pool does not fit the mesh. A failed measurement goes into ``failed`` instead.
    """
    if pool.world_size != mesh.size or mesh.size != cluster.device_count:
        raise MeasurementError(
            f"mesh {mesh.label} of {cluster.name} needs {mesh.size} ranks of {cluster.device_count} devices,"
            f" but the pool has {pool.world_size}; make a pool of {mesh.size}"
        )
    unknown = [kind for kind in kinds if kind not in COLLECTIVES]
    if unknown:
        raise MeasurementError(f"unknown collective '{unknown[0]}'; valid: {', '.join(COLLECTIVES)}")
    jobs = _jobs(mesh, kinds, pairs)
    keys = {job: _key(cluster, pool.backend, *job) for job in jobs}
    stored = {} if refresh or store is None else store.get_many(keys.values(), "collective")
    # A record without fits says why measuring failed; links are tried again each time.
    records = {job: stored[key] for job, key in keys.items() if "fits" in stored.get(key, {})}
    failed: dict[str, str] = {}
    plans = {job: _PAIR_SIZES if job.kind == _SEND else sizes for job in jobs}
    missing = {job for job in jobs if job not in records}
    rounds = _ROUNDS[pool.backend]
    # What ranks told so far, of the jobs that are not finished.
    told: dict[_Job, list[Any]] = {job: [] for job in missing}
    for lap, (done, job) in itertools.product(range(rounds), enumerate(jobs)):
        kind, groups = job
        title = f"{kind} {';'.join(','.join(map(str, group)) for group in groups)}"
        progress(stage, lap * len(jobs) + done, rounds * len(jobs), title)
        if job not in missing:
            continue
        try:
            told[job].append(_measure(pool, kind, groups, plans[job], rounds))
            records[job] = _record(told[job], kind, groups, plans[job], pool.backend)
        except (RankError, _NotAheadError) as error:
            missing.discard(job)
            if job not in records:
                failed[title] = str(error).split("\n", 1)[0]
                _logger.warning("%s could not be measured: %s", title, failed[title])
        if store is not None:
            # At once, job by job: an interrupted call resumes where it stopped.
            store.put(keys[job], records.get(job, {"failed": failed.get(title)}), "collective")
    progress(stage, rounds * len(jobs), rounds * len(jobs), "links")
    return _fits(mesh, records, failed)


def load_links(cluster: Cluster, mesh: Mesh, store: ProfileStore, backend: str | None = None) -> LinkFits:
    """Return the fits that the store has for a mesh, without measuring."""
    backend = backend or ("nccl" if cluster.device_type == "cuda" else "gloo")
    jobs = _jobs(mesh, COLLECTIVES, pairs=True)
    keys = {job: _key(cluster, backend, *job) for job in jobs}
    stored = store.get_many(keys.values(), "collective")
    known = {job: stored[key] for job, key in keys.items() if "fits" in stored.get(key, {})}
    return _fits(mesh, known, {})


class _Job(NamedTuple):
    """One measurement, of a collective or of messages, in several groups of ranks at once."""

    kind: str
    groups: tuple[tuple[int, ...], ...]


def _jobs(mesh: Mesh, kinds: Sequence[str], pairs: bool) -> list[_Job]:
    jobs = [_Job(kind, groups) for groups in _partitions(mesh) for kind in kinds]
    if pairs:
        jobs += [_Job(_SEND, (pair,)) for pair in itertools.combinations(range(mesh.size), 2)]
    return jobs


def _partitions(mesh: Mesh) -> list[tuple[tuple[int, ...], ...]]:
    partitions = (mesh.groups(axes) for axes in mesh.axis_subsets())
    # Sets of axes that differ only by axes of size 1 form the same groups, which are measured once.
    return list(dict.fromkeys(groups for groups in partitions if len(groups[0]) > 1))


def _key(cluster: Cluster, backend: str, kind: str, groups: Iterable[tuple[int, ...]]) -> str:
    text = ";".join(",".join(map(str, group)) for group in groups)
    return f"{cluster.fingerprint}|{backend}|{_HOW_OF[backend]}|{kind}|{text}"


def _measure(
    pool: RankPool, kind: str, groups: tuple[tuple[int, ...], ...], sizes: Sequence[int], rounds: int
) -> list[Any]:
    plan = [(size, ceil(_repeats_for(size) / rounds)) for size in sizes]
    if kind == _SEND:
        return list(pool.run(time_pair, groups[0], plan))
    return list(pool.run(time_collective, kind, groups, plan))


def _record(
    told: Sequence[list[Any]],
    kind: str,
    groups: tuple[tuple[int, ...], ...],
    sizes: Sequence[int],
    backend: str,
) -> dict[str, Any]:
    ways = 2 if kind == _SEND else 1  # there and back
    # Others only ever make what CPU ranks do longer.
    of: Callable[[Floats], float] = min if backend == "gloo" else _in_step
    fits = []
    for group in groups:
        points = []
        for index, size in enumerate(sizes):
            rounds = [[SizeStamps(*stamps[rank][index]) for rank in group] for stamps in told]
            of_repeats = _in_stream if rounds[0][0].in_stream else _from_idle
            repeats = np.concatenate([of_repeats(ranks) for ranks in rounds]) / ways
            low, middle, high = np.quantile(repeats, [0.25, 0.5, 0.75])
            spread = (high - low) / 2 / middle
            points.append((size, float(of(repeats)), float(spread), float(np.max(repeats))))
        segments, residual = fit_segments([point[0] for point in points], [point[1] for point in points])
        fit = LinkFit(kind=kind, group=group, segments=segments, residual=residual, points=tuple(points))
        fits.append(fit.to_dict())
    return {"fits": fits}


class _NotAheadError(MeasurementError):
    """The devices reach a collective before their hosts have issued it, so its time includes waiting."""


def _from_idle(ranks: Sequence[SizeStamps]) -> Floats:
    """Return each repeat's duration on idle devices: from the last rank's start to the last rank's end."""
    starts = np.max([rank.starts for rank in ranks], axis=0)
    return np.max([rank.ends for rank in ranks], axis=0) - starts


def _in_stream(ranks: Sequence[SizeStamps]) -> Floats:
    """Return the slowest device's duration of each repeat that all hosts queued before devices reached it."""
    seconds = np.max([rank.in_stream for rank in ranks], axis=0)  # NaN if one of them is NaN
    ahead = seconds[~np.isnan(seconds)]
    if not len(ahead):
        raise _NotAheadError(
            "in every repeat a device had to wait until its host had issued the collective, so "
            "its time behind other work is unknown; measure again on less busy hosts"
        )
    return ahead


def _fits(mesh: Mesh, records: Mapping[_Job, Mapping[str, Any]], failed: Mapping[str, str]) -> LinkFits:
    collectives = {}
    for axes in mesh.axis_subsets():
        for kind in COLLECTIVES:
            record = records.get(_Job(kind, mesh.groups(axes)))
            if record is not None:
                collectives[kind, axes] = tuple(LinkFit.from_dict(kind, fit) for fit in record["fits"])
    pairs = {
        groups[0]: LinkFit.from_dict(kind, record["fits"][0])
        for (kind, groups), record in records.items()
        if kind == _SEND
    }
    return LinkFits(
        collectives=collectives,  # type: ignore[arg-type]
        pairs=pairs,  # type: ignore[arg-type]
        failed=failed,
    )
