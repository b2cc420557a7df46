"""Estimates of remaining time: before work begins and while it proceeds.

The seconds that work is expected to take are one machine's; the pace of another machine follows from the
finished work.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from tensoropt.profiling.workload import Workload

BATCH_S = 5.0
"""The estimated seconds of workloads that are timed between progress reports and writes to the store: an
interruption loses no more than that. An assumption."""
_SLOWER = 20.0
"""How much longer than estimated a workload may take, on a busy machine or with a worse kernel than others;
an assumption."""
START_S = 3.0
"""Seconds at the expected pace that are added to those of the finished parts, so that the first part does not
decide alone; an assumption."""
LEAST_LEFT = 0.3
"""When a part takes longer than expected, at least this share of what was left at its beginning is reported
as left; an assumption."""


def allowed_for(timeout_s: float, expected_s: float) -> float:
    """Seconds after which a workload is considered to hang: half of a pool run's limit, plus its own time."""
    return timeout_s / 2 + _SLOWER * expected_s


def batches(
    works: Sequence[Workload], expected_s: Mapping[str, float], most: int
) -> Iterator[list[Workload]]:
    """Groups of neighbouring workloads of up to ``BATCH_S`` together, with at least one and at most ``most``
    each."""
    batch: list[Workload] = []
    for work in works:
        took_s = sum(expected_s[other.key] for other in [*batch, work])
        if batch and (len(batch) == most or took_s > BATCH_S):
            yield batch
            batch = []
        batch.append(work)
    if batch:
        yield batch


class Remaining:
    """The remaining seconds of announced parts of the work, corrected by how long the finished ones took."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._left: dict[str, float] = {}
        self._done_s = self._took_s = START_S
        self._since = clock()

    def expect(self, part: str, seconds: float) -> None:
        """Announce the remaining seconds of a part; fewer than before if some of it was done since."""
        now = self._clock()
        done_s = self._left.get(part, 0.0) - seconds
        if done_s > 0:
            # The pace over all finished work, not over the last item: single estimates are inaccurate.
            self._done_s += done_s
            self._took_s += now - self._since
        self._left[part] = seconds
        self._since = now

    @property
    def left_s(self) -> float:
        """Return the remaining seconds of all parts."""
        left_s = sum(self._left.values()) * self._took_s / self._done_s
        return max(left_s - (self._clock() - self._since), LEAST_LEFT * left_s)

    def before(self, what: str) -> str:
        """Return a progress report with the remaining time in front, such as ``about 20 s left, mesh 8``; as
        it is if nothing is left."""
        return f"about {rounded(self.left_s)} left, {what}" if any(self._left.values()) else what


_AHEAD = re.compile(r"^about [0-9.]+ (?:s|min|h) left(?:, |$)")


def without_eta(what: str) -> str:
    """A progress report without its remaining time."""
    return _AHEAD.sub("", what)


def rounded(seconds: float) -> str:
    """``20 s``, ``3 min``, ``2.1 h``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
