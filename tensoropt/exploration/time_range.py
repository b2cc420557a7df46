"""The range of a predicted step time, by how far published jobs deviate from data-sheet predictions."""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.cluster import job_spread
from tensoropt.exploration.rates import for_gpus
from tensoropt.plan.findings import Findings
from tensoropt.types import DATA_SHEET
from tensoropt.units import format_seconds, share_words

UNLIKE = "from a data sheet; no published job resembles it"
"""The text for a predicted time without a range."""


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A range of step times in seconds.

    Attributes:
        low_s, high_s: the step time of a well-tuned job and of a slow job.
        holds: the share of published jobs whose time is within such a range.
        source: the published jobs behind the range, in words.
    """

    low_s: float
    high_s: float
    holds: float
    source: str

    @property
    def words(self) -> str:
        """The range in words: ``306 ms to 393 ms for 80 % of published jobs``."""
        ends = f"{format_seconds(self.low_s)} to {format_seconds(self.high_s)}"
        return f"{ends} for {share_words(self.holds)} of published jobs"


def range_of(findings: Findings, index: int) -> TimeRange | None:
    """Return the range of a point's step time.

    None unless the time is predicted from GPU data sheets and the point resembles published jobs: dense
    transformers trained in 16 bits, not bound by the host. The range is narrower by the share of the time
    that was measured, since measured durations do not vary between teams.
    """
    point, spread, graph = findings.all_points[index], job_spread(), findings.graph_facts
    share = point.sources.get(DATA_SHEET, 0.0)
    trains = findings.model.mode == "train" and findings.settings.get("dtype") in ("bfloat16", "float16")
    alike = trains and not point.host_bound and graph is not None and graph.dense_transformer
    if not (share and alike and for_gpus(findings.cluster)):
        return None

    def varied(factor: float) -> float:
        return point.time_s * (1.0 + share * (factor - 1.0))

    return TimeRange(varied(spread.well_tuned), varied(spread.slow), spread.holds, spread.source)


def range_words(findings: Findings, index: int) -> str:
    """Return the range of a point's step time in words. If the point resembles no published job, return the
    remark :data:`UNLIKE`; if its time is not from GPU data sheets, ""."""
    spread = range_of(findings, index)
    if spread is not None:
        return spread.words
    share = findings.all_points[index].sources.get(DATA_SHEET, 0.0)
    return UNLIKE if share and for_gpus(findings.cluster) else ""
