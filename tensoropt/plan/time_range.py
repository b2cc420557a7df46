"""Ranges of step times: how far published jobs deviate from predictions by GPU data sheets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tensoropt.cluster import job_spread
from tensoropt.types import DATA_SHEET
from tensoropt.units import format_seconds, share_words

UNLIKE = "from a data sheet; no published job resembles it"
"""Remark on a time from data sheets for which no published job shows the error."""


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A range of step times in seconds.

    Attributes:
        low_s, middle_s, high_s: a fast job's time, the predicted time, a slow job's time.
        holds: the share of jobs within such a range.
        source: its basis, in words.
    """

    low_s: float
    middle_s: float
    high_s: float
    holds: float
    source: str

    def words(self, time: Callable[[float], str] = format_seconds) -> str:
        """Return the range in words: ``306 ms to 393 ms for 80 % of published jobs``.

        Args:
            time: formats seconds.
        """
        return f"{time(self.low_s)} to {time(self.high_s)} for {share_words(self.holds)} of published jobs"


def time_range(time_s: float, sources: Mapping[str, float], *, gpus: bool) -> TimeRange | None:
    """Return the range of a predicted time; None if none of it comes from GPU data sheets.

    Measured seconds do not vary between teams, so their share narrows the range.

    Args:
        sources: shares of the seconds by source (:data:`~tensoropt.types.SOURCES`).
        gpus: whether the devices are GPUs.
    """
    share = sources.get(DATA_SHEET, 0.0) if gpus else 0.0
    if not share:
        return None
    spread = job_spread()

    def varied(factor: float) -> float:
        return time_s * (1.0 + share * (factor - 1.0))

    return TimeRange(varied(spread.well_tuned), time_s, varied(spread.slow), spread.holds, spread.source)
