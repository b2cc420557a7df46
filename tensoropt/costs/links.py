"""What the links really do: collectives timed on a mesh's groups, fitted to lines, kept in the store.

``t = alpha + bytes / beta`` by least squares with relative weights (an error of 10 % weighs the same at
1 KiB and at 64 MiB), as several lines where one is wrong: small messages are dominated by wake-ups
and may go by another algorithm, large ones no longer fit into caches, the largest are fresh pages.
What ``bytes`` counts, per kind:

    all_reduce      the tensor            all_gather      the gathered output of one rank
    reduce_scatter  the input of one rank all_to_all      the input of one rank
    broadcast       the tensor            send            the message (point to point, one way)
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensoropt.cluster import Cluster, Mesh
from tensoropt.costs.link_timing import COLLECTIVES, time_collective, time_pair
from tensoropt.costs.pool import RankError, RankPool
from tensoropt.costs.store import ProfileStore
from tensoropt.errors import MeasurementError
from tensoropt.units import format_bytes, format_seconds

logger = logging.getLogger(__name__)

# Five decades in KiB, closer together where caches, algorithms and the allocator (at 32 MiB) change.
QUICK_SIZES = tuple(
    1024 * kib for kib in (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 24576, 32768, 65536)
)
PAIR_SIZES = (1024, 16 * 1024, 256 * 1024, 4 * 1024**2, 64 * 1024**2)
_BUDGET_S = 0.12  # per size: the larger, the fewer repeats
_MOST_REPEATS, _FEWEST_REPEATS = 50, 5
# A further line is kept when the residual is above the first figure and falls to the second's share.
_GOOD_RESIDUAL = 0.05
_WORTH_A_LINE = 0.7
_MOST_LINES = 4
_FEWEST_POINTS_PER_LINE = 2
_TITLE = 40  # columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One line, for messages from ``from_bytes`` (0 for the first) to ``up_to_bytes`` (inf for the last)."""

    alpha_s: float
    seconds_per_byte: float
    from_bytes: float = 0.0
    up_to_bytes: float = math.inf

    def time_s(self, num_bytes: float) -> float:
        """The line's value, wherever it is asked."""
        return self.alpha_s + num_bytes * self.seconds_per_byte

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """beta; inf for a flat line."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """What was measured of one kind of communication in one group, and its lines.

    Attributes:
        kind: a collective, or ``send``.
        group: the ranks.
        segments: ascending in ``up_to_bytes``.
        residual: root mean square of the relative errors of the lines at the points.
        points: ``(bytes, seconds, spread)``: the mean, and half the interquartile range by the median.
    """

    kind: str
    group: tuple[int, ...]
    segments: tuple[Segment, ...]
    residual: float
    points: tuple[tuple[int, float, float], ...] = field(default=(), repr=False)

    def time_s(self, num_bytes: float) -> float:
        """Predicted seconds, never less than for a smaller message; interpolated between two lines."""
        floor, end = 0.0, 0.0
        for segment in self.segments:
            if num_bytes < segment.from_bytes:
                start = max(floor, segment.time_s(segment.from_bytes))
                return floor + (start - floor) * (num_bytes - end) / (segment.from_bytes - end)
            if num_bytes <= segment.up_to_bytes:
                return max(floor, segment.time_s(num_bytes))
            floor, end = max(floor, segment.time_s(segment.up_to_bytes)), segment.up_to_bytes
        raise AssertionError("the last segment has no end")

    def to_dict(self) -> dict[str, Any]:
        return {
            "group": list(self.group),
            "segments": [
                [
                    s.alpha_s,
                    s.seconds_per_byte,
                    s.from_bytes,
                    None if math.isinf(s.up_to_bytes) else s.up_to_bytes,
                ]
                for s in self.segments
            ],
            "residual": self.residual,
            "points": [list(point) for point in self.points],
        }

    @classmethod
    def from_dict(cls, kind: str, data: Mapping[str, Any]) -> LinkFit:
        return cls(
            kind=kind,
            group=tuple(data["group"]),
            segments=tuple(
                Segment(
                    alpha_s=alpha,
                    seconds_per_byte=slope,
                    from_bytes=start,
                    up_to_bytes=math.inf if end is None else end,
                )
                for alpha, slope, start, end in data["segments"]
            ),
            residual=data["residual"],
            points=tuple((int(size), seconds, spread) for size, seconds, spread in data["points"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFits:
    """All fits of one mesh.

    Attributes:
        collectives: by ``(kind, axes)``, one fit per group; the groups ran at the same time, as they do
            in a job, so that sharing a link is in the figures.
        pairs: point-to-point fits by ``(low rank, high rank)``, each measured alone.
        failed: what could not be measured, and why.
    """

    collectives: Mapping[tuple[str, tuple[int, ...]], tuple[LinkFit, ...]]
    pairs: Mapping[tuple[int, int], LinkFit] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def table(self) -> str:
        """A table for people: the slowest group of each kind and axes."""
        lines = [f"{'what':<{_TITLE}}{'latency':>10}{'bandwidth':>14}{'residual':>10}"]
        for (kind, axes), fits in self.collectives.items():
            worst = max(fits, key=lambda fit: fit.time_s(1e6))
            lines += _rows(f"{kind} axes {','.join(map(str, axes))}", worst)
        for (low, high), fit in self.pairs.items():
            lines += _rows(f"send {low}-{high}", fit)
        lines += [f"{what:<{_TITLE}}not measured: {why}" for what, why in self.failed.items()]
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


def fit_line(sizes: Sequence[float], seconds: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """``(alpha, seconds per byte)``, both at least 0, least squares of the relative errors."""
    x, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    design = np.stack([1 / t, x / t], axis=1)
    scale = np.linalg.norm(design, axis=0)
    scale[scale == 0] = 1.0
    alpha, slope = np.linalg.lstsq(design / scale, np.ones_like(t), rcond=None)[0] / scale
    if alpha < 0:  # the best line through the origin
        alpha, slope = 0.0, float((x / t).sum() / (x**2 / t**2).sum())
    if slope < 0:  # the best flat line
        alpha, slope = float((1 / t).sum() / (1 / t**2).sum()), 0.0
    if slope * x.max() < 1e-9 * alpha:  # rounding of a flat line
        slope = 0.0
    return float(alpha), float(slope)


def fit_segments(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[tuple[Segment, ...], float]:
    """As many lines as the points need, at most four; and the residual.

    A larger message bounds the time of a smaller one, so a time that noise has lifted above that of a
    larger message is lowered to it before fitting. The residual is against the times as measured.

    Args:
        sizes: bytes, ascending; at least two.
        seconds: above 0.
    """
    if len(sizes) < 2 or len(sizes) != len(seconds) or min(seconds) <= 0:
        raise MeasurementError(f"a line needs at least two sizes with times above 0, not {list(seconds)}")
    cleaned = np.minimum.accumulate(np.asarray(seconds, dtype=float)[::-1])[::-1]
    best: tuple[float, tuple[Segment, ...]] | None = None
    for lines in range(1, _MOST_LINES + 1):
        candidates = [_piecewise(sizes, cleaned, cuts) for cuts in _cuts(len(sizes), lines)]
        if not candidates:
            break
        scored = [(_residual(segments, sizes, seconds), segments) for segments in candidates]
        least = min(scored, key=lambda item: item[0])
        if best is None or least[0] <= _WORTH_A_LINE * best[0]:
            best = least
        if best[0] <= _GOOD_RESIDUAL:
            break
    assert best is not None
    return best[1], best[0]


def _cuts(points: int, lines: int) -> Iterable[tuple[int, ...]]:
    """Where to cut so that each line has enough points; no cut at all for one line."""
    for cuts in itertools.combinations(range(1, points), lines - 1):
        bounds = (0, *cuts, points)
        if lines == 1 or all(b - a >= _FEWEST_POINTS_PER_LINE for a, b in itertools.pairwise(bounds)):
            yield cuts


def _piecewise(sizes: Sequence[float], seconds: np.ndarray, cuts: tuple[int, ...]) -> tuple[Segment, ...]:
    segments = []
    for start, stop in itertools.pairwise((0, *cuts, len(sizes))):
        alpha, slope = fit_line(sizes[start:stop], seconds[start:stop])
        segments.append(
            Segment(
                alpha_s=alpha,
                seconds_per_byte=slope,
                from_bytes=0.0 if start == 0 else sizes[start],
                up_to_bytes=math.inf if stop == len(sizes) else sizes[stop - 1],
            )
        )
    return tuple(segments)


def _residual(segments: tuple[Segment, ...], sizes: Sequence[float], seconds: Sequence[float]) -> float:
    fit = LinkFit(kind="", group=(), segments=segments, residual=0.0)
    errors = [fit.time_s(size) / time - 1 for size, time in zip(sizes, seconds, strict=True)]
    return math.sqrt(statistics.fmean(error**2 for error in errors))


def repeats_for(size: int) -> int:
    """How often a size is measured: about the same total time for each."""
    expected_s = 300e-6 + size / 0.8e9
    return int(min(_MOST_REPEATS, max(_FEWEST_REPEATS, _BUDGET_S / expected_s)))


def measure_links(
    cluster: Cluster,
    mesh: Mesh,
    pool: RankPool,
    store: ProfileStore | None = None,
    *,
    kinds: Sequence[str] = COLLECTIVES,
    sizes: Sequence[int] = QUICK_SIZES,
    pairs: bool = True,
    functional: bool = True,
    refresh: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> LinkFits:
    """Time every collective on the groups of every set of mesh axes, and every pair of ranks.

    All groups of one set of axes run at once. What the store already has is not measured again, and each
    measurement is saved as soon as it is made, so an interrupted call goes on where it stopped.

    Args:
        pool: ranks of this cluster, as many as the mesh has.
        store: where fits are kept, by cluster fingerprint, backend, kind and groups.
        sizes: bytes, ascending. The default takes a few seconds on two gloo ranks.
        pairs: also measure point to point.
        functional: time the functional collectives, which resharding issues; else those in place.
        refresh: measure again what the store has.
        progress: called with ``(done, total, what)`` before each measurement and at the end.

    Raises:
        MeasurementError: the pool does not fit the mesh. A measurement that fails or hangs is noted in
            ``failed`` instead, and tried again by the next call.
    """
    if pool.world_size != mesh.size or mesh.size != cluster.device_count:
        raise MeasurementError(
            f"mesh {mesh.label} of {cluster.name} needs {mesh.size} ranks of {cluster.device_count} devices,"
            f" but the pool has {pool.world_size}; make a pool of {mesh.size}"
        )
    unknown = [kind for kind in kinds if kind not in COLLECTIVES]
    if unknown:
        raise MeasurementError(f"unknown collective '{unknown[0]}'; valid: {', '.join(COLLECTIVES)}")
    jobs: list[tuple[str, tuple[tuple[int, ...], ...]]] = [
        (kind, groups) for groups in _partitions(mesh) for kind in kinds
    ]
    if pairs:
        jobs += [("send", (pair,)) for pair in itertools.combinations(range(mesh.size), 2)]
    keys = {job: _key(cluster, pool.backend, functional, *job) for job in jobs}
    known = {} if refresh or store is None else store.get_many(keys.values(), "collective")
    found = {job: known[key] for job, key in keys.items() if "fits" in known.get(key, {})}
    failed: dict[str, str] = {}
    for done, job in enumerate(jobs):
        kind, groups = job
        what = f"{kind} {';'.join(','.join(map(str, group)) for group in groups)}"
        if progress is not None:
            progress(done, len(jobs), what)
        if job in found:
            continue
        try:
            record = _measure(pool, kind, groups, PAIR_SIZES if kind == "send" else sizes, functional)
            found[job] = record
        except RankError as error:
            failed[what] = str(error).split("\n", 1)[0]
            record = {"failed": failed[what]}
            logger.warning("%s could not be measured: %s", what, failed[what])
        if store is not None:
            store.put(keys[job], record, "collective")
    if progress is not None:
        progress(len(jobs), len(jobs), "links")
    return _fits(mesh, found, failed)


def load_links(
    cluster: Cluster, mesh: Mesh, store: ProfileStore, backend: str | None = None, functional: bool = True
) -> LinkFits:
    """The fits that the store has for a mesh; what is missing is left out, nothing is measured."""
    backend = backend or ("nccl" if cluster.device_type == "cuda" else "gloo")
    jobs: list[tuple[str, tuple[tuple[int, ...], ...]]] = [
        (kind, groups) for groups in _partitions(mesh) for kind in COLLECTIVES
    ]
    jobs += [("send", (pair,)) for pair in itertools.combinations(range(mesh.size), 2)]
    keys = {job: _key(cluster, backend, functional, *job) for job in jobs}
    known = store.get_many(keys.values(), "collective")
    return _fits(mesh, {job: known[key] for job, key in keys.items() if "fits" in known.get(key, {})}, {})


def _partitions(mesh: Mesh) -> list[tuple[tuple[int, ...], ...]]:
    """The different ways in which sets of axes group the ranks, without groups of one."""
    partitions = (mesh.groups(axes) for axes in mesh.axis_subsets())
    return list(dict.fromkeys(groups for groups in partitions if len(groups[0]) > 1))


def _key(
    cluster: Cluster, backend: str, functional: bool, kind: str, groups: Iterable[tuple[int, ...]]
) -> str:
    text = ";".join(",".join(map(str, group)) for group in groups)
    how = "functional" if functional and kind != "send" else "in place"
    how += "/mean after work"
    return f"{cluster.fingerprint}|{backend}|{how}|{kind}|{text}"


def _measure(
    pool: RankPool, kind: str, groups: tuple[tuple[int, ...], ...], sizes: Sequence[int], functional: bool
) -> dict[str, Any]:
    plan = [(size, repeats_for(size)) for size in sizes]
    if kind == "send":
        stamps = pool.run(time_pair, groups[0], plan)
    else:
        stamps = pool.run(time_collective, kind, groups, functional, plan)
    fits = []
    for group in groups:
        points = []
        for index, (size, _) in enumerate(plan):
            # Stamps are of one machine's monotonic clock: from the last rank's start to the last one's end.
            starts = np.max([stamps[rank][index][0] for rank in group], axis=0)
            ends = np.max([stamps[rank][index][1] for rank in group], axis=0)
            seconds = (ends - starts) / (2 if kind == "send" else 1)  # there and back
            low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75])
            spread = (high - low) / 2 / middle
            # A step adds up hundreds of collectives, stalls included: their mean is what it pays.
            points.append((size, float(np.mean(seconds)), float(spread)))
        segments, residual = fit_segments([point[0] for point in points], [point[1] for point in points])
        fit = LinkFit(kind=kind, group=group, segments=segments, residual=residual, points=tuple(points))
        fits.append(fit.to_dict())
    return {"fits": fits}


def _fits(
    mesh: Mesh,
    found: Mapping[tuple[str, tuple[tuple[int, ...], ...]], Mapping[str, Any]],
    failed: Mapping[str, str],
) -> LinkFits:
    collectives = {}
    for axes in mesh.axis_subsets():
        for kind in COLLECTIVES:
            record = found.get((kind, mesh.groups(axes)))
            if record is not None:
                collectives[kind, axes] = tuple(LinkFit.from_dict(kind, fit) for fit in record["fits"])
    pairs = {
        groups[0]: LinkFit.from_dict(kind, record["fits"][0])
        for (kind, groups), record in found.items()
        if kind == "send"
    }
    return LinkFits(collectives=collectives, pairs=pairs, failed=failed)  # type: ignore[arg-type]
