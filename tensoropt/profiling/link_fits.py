"""Lines fitted to the times of messages, and the additional time between work and collectives.

``t = alpha + bytes / beta`` by least squares of relative errors, in several segments: small messages are
dominated by wake-ups, large ones leave the caches. A collective after work, and work after a collective, find
cold caches; both are timed in turns (:mod:`tensoropt.profiling.link_timing`), and the smallest lap counts.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tensoropt.errors import MeasurementError
from tensoropt.profiling.link_timing import LAYER_KINDS, Turns
from tensoropt.types import Floats

_TRANSITION_SIZES = (4 * 2**10, 64 * 2**10, 512 * 2**10, 2 * 2**20, 8 * 2**20)
TURNS = (
    # The effect of small collectives on caches is soon over, waiting grows with the work; large ones take
    # long themselves.
    (_TRANSITION_SIZES[:3], {0: 8, 1: 2 * LAYER_KINDS, 4: LAYER_KINDS, 16: 2}, 24),
    (_TRANSITION_SIZES[3:], {0: 3, 1: LAYER_KINDS, 4: LAYER_KINDS // 2, 16: 2}, 8),
)
"""The sizes of collectives, blocks by layers of work per block (0.1 ms each), and laps."""
WARM_LAPS = 2
"""Laps that do not count, in which ranks still create code and memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The additional seconds between work and a collective.

    Attributes:
        works_s: (w,) seconds of work, ascending from 0.
        sizes: (s,) bytes of the collective, ascending.
        arriving_s: (w, s) of the collective after that much work (cold caches, sleeping ranks).
        leaving_s: (w, s) of that much work after it.
    """

    works_s: tuple[float, ...]
    sizes: tuple[int, ...]
    arriving_s: tuple[tuple[float, ...], ...]
    leaving_s: tuple[tuple[float, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "works_s": list(self.works_s),
            "sizes": list(self.sizes),
            "arriving_s": [list(row) for row in self.arriving_s],
            "leaving_s": [list(row) for row in self.leaving_s],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Transition:
        return cls(
            works_s=tuple(data["works_s"]),
            sizes=tuple(data["sizes"]),
            arriving_s=tuple(map(tuple, data["arriving_s"])),
            leaving_s=tuple(map(tuple, data["leaving_s"])),
        )

    def arriving(self, work_s: Any, num_bytes: Any) -> Any:
        """Return the additional seconds of a collective after ``work_s`` (numbers or arrays of one shape).

        Constant beyond the first and last figures, interpolated by the logarithm of sizes.
        """
        return self._between(self.arriving_s, work_s, num_bytes)

    def leaving(self, work_s: Any, num_bytes: Any) -> Any:
        """Return the additional seconds of ``work_s`` after a collective, interpolated likewise."""
        return self._between(self.leaving_s, work_s, num_bytes)

    def _between(self, table: Sequence[Sequence[float]], work_s: Any, num_bytes: Any) -> Any:
        work_s, num_bytes = np.broadcast_arrays(work_s, num_bytes)
        if not np.any(table):  # as for data sheets, which do not give it
            return np.zeros(work_s.shape)
        # Sizes are spread over decades; numpy.interp is constant beyond both ends.
        place = np.interp(np.log(np.maximum(num_bytes, 1)), np.log(self.sizes), range(len(self.sizes)))
        low = np.floor(place).astype(int)
        high = np.minimum(low + 1, len(self.sizes) - 1)
        columns = np.stack([np.interp(work_s, self.works_s, extra_s) for extra_s in zip(*table, strict=True)])
        below, above = (np.take_along_axis(columns, i[None], 0)[0] for i in (low, high))
        return below + (above - below) * (place - low)


def plan_of_turns(sizes: Sequence[int], blocks: Mapping[int, int]) -> list[Turns]:
    """Return the turns of all amounts of work and sizes of collectives, and of each alone.

    Args:
        sizes: bytes of the collectives.
        blocks: layers per block of work -> number of timed blocks.
    """
    turns = itertools.product(blocks.items(), (0, *sizes))
    return [Turns(layers, size, count) for (layers, count), size in turns if layers or size]


def transition_of(
    parts: Sequence[tuple[Sequence[Turns], Sequence[Any]]], groups: Iterable[tuple[int, ...]]
) -> Transition:
    """Return the :class:`Transition` of the group that loses most with the longest work.

    Args:
        parts: plans with each rank's stamps of :func:`~tensoropt.profiling.link_timing.time_transitions`.
    """
    transitions = []
    for group in groups:
        of_group = [(plan, [stamps[rank] for rank in group]) for plan, stamps in parts]
        transitions.append(_transition_of_group(of_group))
    # All groups meet in the next collective over other axes, so the worst group counts.
    return max(transitions, key=lambda t: sum(t.arriving_s[-1]) + sum(t.leaving_s[-1]))


def _transition_of_group(parts: Sequence[tuple[Sequence[Turns], Sequence[Any]]]) -> Transition:
    """Return one group's transition from plans and stamps, made monotonic in work and size."""
    arriving: dict[tuple[int, int], float] = {}
    leaving: dict[tuple[int, int], float] = {}
    works: dict[int, float] = {0: 0.0}
    for plan, stamps in parts:
        laps = (zip(*ranks, strict=True) for ranks in zip(*stamps, strict=True))
        seconds = np.array(
            [[_block(ranks, turns.size > 0) for turns, ranks in zip(plan, lap, strict=True)] for lap in laps]
        )
        worked, sent = (dict(zip(plan, seconds[:, :, i].T, strict=True)) for i in (0, 1))
        alone = {turns.layers: turns for turns in plan if not turns.size}
        at_once = {turns.size: turns for turns in plan if not turns.layers}
        works.update({layers: float(np.min(worked[turns])) for layers, turns in alone.items()})
        for turns in plan:
            if turns.layers and turns.size and not np.isnan(sent[turns]).any():
                # Others only ever make a lap longer, so the smallest of each counts.
                key = turns.layers, turns.size
                arriving[key] = float(np.min(sent[turns]) - np.min(sent[at_once[turns.size]]))
                leaving[key] = float(np.min(worked[turns]) - np.min(worked[alone[turns.layers]]))
    return Transition(
        works_s=tuple(_ascending(list(works.values()))),
        sizes=_TRANSITION_SIZES,
        arriving_s=_table(arriving, tuple(works), by_size=False),
        leaving_s=_table(leaving, tuple(works), by_size=True),
    )


def _table(
    extra_s: Mapping[tuple[int, int], float], works: Sequence[int], *, by_size: bool
) -> tuple[tuple[float, ...], ...]:
    """Return (works, sizes) additional seconds from 0, ascending with work and, if ``by_size``, with size."""
    columns = [[0.0] * len(works)]
    for size in _TRANSITION_SIZES:
        # Noise may make small extras negative or disordered, which isotonic regression corrects with the
        # least change.
        ascending = _ascending([max(extra_s[w, size], 0.0) for w in works if (w, size) in extra_s])
        whole = [0.0, *ascending, *ascending[-1:] * (len(works) - 1 - len(ascending))]
        columns.append(whole if ascending else columns[-1])
    columns = columns[1:]
    rows = zip(*columns, strict=True)
    return tuple(tuple(_ascending(row)) if by_size else row for row in rows)


def _ascending(values: Sequence[float]) -> list[float]:
    from scipy.optimize import isotonic_regression  # slow to import, and only measuring needs it

    return list(map(float, isotonic_regression(values).x))


def _block(ranks: Sequence[Any], sent: bool) -> tuple[float, float]:
    """Return the mean seconds of work and of the collective in a group's turns; NaN without blocks.

    Args:
        sent: whether there was a collective; work then lasts until the slower rank is done.
    """
    if not ranks[0]:
        return math.nan, math.nan
    starts, middles, ends = np.moveaxis(np.array(ranks), 2, 0)
    if not sent:
        return (middles - starts).mean(axis=1).max(), 0.0
    came, went = middles.max(axis=0), ends.max(axis=0)
    begun = np.append(starts[:, :1].max(axis=0), went[:-1])
    return (came - begun).mean(), (went - came).mean()


# A further line is kept if the residual is above the first figure and falls to the second's share; all three
# figures are assumptions.
_GOOD_RESIDUAL = 0.05
_WORTH_A_LINE = 0.7
_MOST_LINES = 4
_FEWEST_POINTS_PER_LINE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    alpha_s: float
    seconds_per_byte: float
    from_bytes: float = 0.0
    up_to_bytes: float = math.inf

    def time_s(self, num_bytes: float) -> float:
        return self.alpha_s + num_bytes * self.seconds_per_byte

    @property
    def bandwidth_bytes_per_s(self) -> float:
        return 1 / self.seconds_per_byte if self.seconds_per_byte > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """The measurements of one kind of communication in one group, and its lines.

    Attributes:
        kind: a collective, or ``send``.
        group: the ranks.
        segments: ascending in ``up_to_bytes``.
        residual: root mean square of the relative errors.
        points: ``(bytes, seconds, spread, longest)``; spread is half the interquartile range over the median.
    """

    kind: str
    group: tuple[int, ...]
    segments: tuple[Segment, ...]
    residual: float
    points: tuple[tuple[int, float, float, float], ...] = field(default=(), repr=False)

    def time_s(self, num_bytes: float) -> float:
        """Return the predicted seconds, monotonic in size and interpolated between lines."""
        # Between two lines is a gap without measurements. A jump at a guessed border inside it, such as where
        # the allocator changes its behaviour, would misprice messages in the gap several times over; hence
        # the interpolation.
        floor, end = 0.0, 0.0
        for segment in self.segments:
            if num_bytes < segment.from_bytes:
                start = max(floor, segment.time_s(segment.from_bytes))
                return floor + (start - floor) * (num_bytes - end) / (segment.from_bytes - end)
            if num_bytes <= segment.up_to_bytes:
                return max(floor, segment.time_s(num_bytes))
            floor, end = max(floor, segment.time_s(segment.up_to_bytes)), segment.up_to_bytes
        raise AssertionError("the last segment has no end")

    def slowed(self, factor: float) -> LinkFit:
        """Return the fit of ``factor`` times the seconds; ``points`` stay."""
        segments = tuple(
            replace(s, alpha_s=factor * s.alpha_s, seconds_per_byte=factor * s.seconds_per_byte)
            for s in self.segments
        )
        return replace(self, segments=segments)

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
            points=tuple((int(point[0]), *point[1:]) for point in data["points"]),
        )


def _fit_line(sizes: Sequence[float], seconds: Sequence[float] | Floats) -> tuple[float, float]:
    """Return ``(alpha, seconds per byte)``, both at least 0, by least squares of the relative errors."""
    x, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    # Divided by t, every equation is about a relative error. Columns are scaled to one norm, because seconds
    # and seconds per byte differ by many orders of magnitude.
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
    """Return as many lines as the points need, at most four, and the relative residual.

    A time above that of a larger message is lowered to it before fitting.

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
        # A further line always fits a little better; it has to be worth its two parameters.
        if best is None or least[0] <= _WORTH_A_LINE * best[0]:
            best = least
        if best[0] <= _GOOD_RESIDUAL:
            break
    assert best is not None
    return best[1], best[0]


def _cuts(points: int, lines: int) -> Iterable[tuple[int, ...]]:
    # All cuts are tried, because there are few ways to cut 14 sizes into four lines.
    for cuts in itertools.combinations(range(1, points), lines - 1):
        bounds = (0, *cuts, points)
        if lines == 1 or all(b - a >= _FEWEST_POINTS_PER_LINE for a, b in itertools.pairwise(bounds)):
            yield cuts


def _piecewise(sizes: Sequence[float], seconds: Floats, cuts: tuple[int, ...]) -> tuple[Segment, ...]:
    segments = []
    for start, stop in itertools.pairwise((0, *cuts, len(sizes))):
        alpha, slope = _fit_line(sizes[start:stop], seconds[start:stop])
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
    # Scored by what is queried later, the fit with its floor and interpolation, not by the lines alone.
    fit = LinkFit(kind="", group=(), segments=segments, residual=0.0)
    errors = [fit.time_s(size) / time - 1 for size, time in zip(sizes, seconds, strict=True)]
    return math.sqrt(statistics.fmean(error**2 for error in errors))
