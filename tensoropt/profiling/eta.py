"""Time estimates of profiling: how long it will take, before it begins and while it proceeds."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tensoropt.profiling.workload import Workload

BATCH_S = 5.0
"""The estimated seconds of workloads that are timed between progress reports and writes to the store: an
interruption loses no more than that. An assumption."""
_SLOWER = 20.0
"""How much longer than estimated a workload may take, on a busy machine or with a worse kernel than others;
an assumption."""


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


class Eta:
    """An estimate of the remaining seconds, corrected by how long the finished work really took.

    Args:
        expected_s: by the key of a workload or a link.
        start_s: the time of what is done once, before the first of them.
    """

    def __init__(
        self,
        expected_s: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
        *,
        start_s: float = 0.0,
    ):
        self.expected_s = expected_s
        self._left = dict(expected_s)
        self._start_s = start_s
        self._clock = clock
        self._began = clock()

    def done(self, keys: Iterable[str]) -> None:
        """Record that these are done."""
        for key in keys:
            self._left.pop(key, None)

    @property
    def left_s(self) -> float:
        """The remaining seconds: the estimates of unfinished work, scaled by how the finished work's
        estimates turned out."""
        left_s = sum(self._left.values())
        done_s = sum(self.expected_s.values()) - left_s
        if done_s <= 0:
            return self._start_s + left_s
        # The ratio over all finished work, not over the last item: single estimates are inaccurate.
        return left_s * (self._clock() - self._began) / (self._start_s + done_s)

    @property
    def words(self) -> str:
        """``about 14 s, estimated`` before anything is done; ``about 9 s left`` afterwards."""
        begun = len(self._left) < len(self.expected_s)
        return f"about {rounded(self.left_s)} {'left' if begun else 'in all (estimated)'}"


_AHEAD = re.compile(r"^about [0-9.]+ (?:s|min|h) (?:left|in all \(estimated\))(?:, |$)")


def without_eta(what: str) -> str:
    """A progress report without its remaining time."""
    return _AHEAD.sub("", what)


def rounded(seconds: float) -> str:
    """``20 s``, ``3 min``, ``2.1 h``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
