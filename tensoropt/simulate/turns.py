"""The cost of coming from work to collectives and going back, for all collectives of a step at once.

The first collective after some work takes longer; the others that follow it find the ranks in step. The work
after them takes longer, too: of several in a row, the worst counts. The amount of work between two
collectives does not depend on when they start, so all of this is known before any time is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensoropt.costs.prices import CommunicationCosts
from tensoropt.types import Flags, Floats

Axes = tuple[int, ...]
_RUN = 2**44
"""More bytes than any collective has."""


def turns(
    communication: CommunicationCosts,
    axes: Sequence[Axes | None],
    sending: Flags,
    work: Floats,
    size: Floats,
) -> tuple[Floats, Floats]:
    """(arriving, leaving), both (k, n): the extra seconds of each collective, and the extra seconds of the
    preceding work after the collectives before it.

    Args:
        axes: those of k collectives in the order in which they are issued; None only counts the extra time of
            the work until then.
        sending: (k, n) the strategies that issue it.
        work: (k, n) the seconds of work until then.
        size: (k, n) bytes.
    """
    # Work only grows, so the maximum is what was done by the last collective.
    at_last = np.maximum.accumulate(np.where(sending, work, 0.0), axis=0)
    since = work.copy()
    since[1:] -= at_last[:-1]
    counts = np.array([one is None for one in axes])
    worked = (sending | counts[:, None]) & (since > 0)
    # Collectives without work between them form a run. One that comes from work begins the next run.
    run = np.cumsum(worked, axis=0, dtype=np.int64)
    arriving, leaving = np.zeros(work.shape), np.zeros(work.shape)
    for over in dict.fromkeys(one for one in axes if one is not None):
        rows = np.array([one == over for one in axes])
        extra = communication.arriving_s(over, since[rows], size[rows])
        arriving[rows] = np.where(sending[rows], extra, 0.0)
        # The largest of a run so far: numbers of runs in the upper digits make each new run begin at 0.
        largest = run * _RUN
        largest[rows] += np.where(sending[rows], size[rows], 0.0).astype(np.int64)
        largest = np.maximum.accumulate(largest, axis=0) - run * _RUN
        marked = worked[1:] & (largest[:-1] > 0)
        found = communication.leaving_s(over, since[1:][marked], largest[:-1][marked])
        leaving[1:][marked] = np.maximum(leaving[1:][marked], found)
    return arriving, leaving
