"""Lines fitted to the measured times of messages and collectives, as functions of their size.

Each line is ``t = alpha + bytes / beta``, fitted by least squares of relative errors. A fit has several lines
for ranges of sizes: the times of small messages are mostly wake-ups, and large messages leave the caches.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np

from tensoropt.errors import MeasurementError
from tensoropt.types import Floats

# A further line is kept if the residual is above the first figure and falls to the second's share; all three
# figures are assumptions.
_GOOD_RESIDUAL = 0.05
_WORTH_A_LINE = 0.7
_MOST_LINES = 4
_FEWEST_POINTS_PER_LINE = 2


@dataclass(frozen=True, slots=True)
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
    """The measurements of one kind of communication in one group of ranks, and the lines fitted to them.

    Attributes:
        kind: a collective, or ``send``.
        group: the ranks.
        segments: the lines with their ranges, ascending in ``up_to_bytes``.
        residual: root mean square of the relative errors.
        points: ``(bytes, seconds, spread, longest)``; spread is half the interquartile range over the median,
            longest the slowest repeat in seconds.
    """

    kind: str
    group: tuple[int, ...]
    segments: tuple[Segment, ...]
    residual: float
    points: tuple[tuple[int, float, float, float], ...] = field(default=(), repr=False)

    def time_s(self, num_bytes: float) -> float:
        """Return the predicted time in seconds for a size; it never falls with size, also between lines."""
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
        """Return the fit with its times multiplied by ``factor``; ``points`` stay as measured."""
        segments = tuple(
            replace(s, alpha_s=factor * s.alpha_s, seconds_per_byte=factor * s.seconds_per_byte)
            for s in self.segments
        )
        return replace(self, segments=segments)

    def to_dict(self) -> dict[str, Any]:
        return {
            "group": list(self.group),
            "segments": [[n if math.isfinite(n) else None for n in astuple(s)] for s in self.segments],
            "residual": self.residual,
            "points": [list(point) for point in self.points],
        }

    @classmethod
    def from_dict(cls, kind: str, data: Mapping[str, Any]) -> LinkFit:
        return cls(
            kind=kind,
            group=tuple(data["group"]),
            segments=tuple(
                Segment(alpha, slope, start, math.inf if end is None else end)
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
    if alpha < 0:  # e.g. a link that lets bursts pass; what is asked for beyond the sizes is as the largest
        alpha, slope = 0.0, float(t[-1] / x[-1])
    if slope < 0:  # the best flat line
        alpha, slope = float((1 / t).sum() / (1 / t**2).sum()), 0.0
    if slope * x.max() < 1e-9 * alpha:  # rounding of a flat line
        slope = 0.0
    return float(alpha), float(slope)


def fit_segments(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[tuple[Segment, ...], float]:
    """Return (as few lines as fit the times well, at most four; the root mean square of the relative errors).

    Before fitting, a time above that of a larger message is lowered to the latter.

    Args:
        sizes: message sizes in bytes, ascending; at least two.
        seconds: the times, above 0.
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
        least, most = sizes[start] if start else 0.0, sizes[stop - 1] if stop < len(sizes) else math.inf
        segments.append(Segment(alpha, slope, least, most))
    return tuple(segments)


def _residual(segments: tuple[Segment, ...], sizes: Sequence[float], seconds: Sequence[float]) -> float:
    # Scored by what is queried later, the fit with its floor and interpolation, not by the lines alone.
    fit = LinkFit(kind="", group=(), segments=segments, residual=0.0)
    errors = [fit.time_s(size) / time - 1 for size, time in zip(sizes, seconds, strict=True)]
    return math.sqrt(statistics.fmean(error**2 for error in errors))
