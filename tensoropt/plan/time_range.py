"""The range of a step's time: how far published jobs lie from data sheets of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tensoropt.cluster import job_spread
from tensoropt.types import DATA_SHEET
from tensoropt.units import format_seconds, share_words

UNLIKE = "from a data sheet; no published job is like it"
"""What is said of a time from data sheets where the published jobs say nothing of how far it may be off."""


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A range of seconds.

    Attributes:
        low_s, middle_s, high_s: the time of a fast job, the predicted time, and that of a slow one.
        holds: the share of jobs that lie in such a range.
        source: what it rests on, in words.
    """

    low_s: float
    middle_s: float
    high_s: float
    holds: float
    source: str

    def words(self, time: Callable[[float], str] = format_seconds) -> str:
        """Return the range in a few words: ``306 ms to 393 ms for 80 % of published jobs``.

        Args:
            time: writes seconds.
        """
        return f"{time(self.low_s)} to {time(self.high_s)} for {share_words(self.holds)} of published jobs"


def time_range(time_s: float, sources: Mapping[str, float], *, gpus: bool) -> TimeRange | None:
    """Return the range of a predicted time; None if none of it comes from data sheets of GPUs.

    What was measured does not vary from team to team: the range of data sheets is narrower by its share.

    Args:
        sources: the share of the seconds by their source (:data:`~tensoropt.types.SOURCES`).
        gpus: whether the devices are GPUs.
    """
    share = sources.get(DATA_SHEET, 0.0) if gpus else 0.0
    if not share:
        return None
    spread = job_spread()

    def varied(factor: float) -> float:
        return time_s * (1.0 + share * (factor - 1.0))

    return TimeRange(varied(spread.well_tuned), time_s, varied(spread.slow), spread.holds, spread.source)
