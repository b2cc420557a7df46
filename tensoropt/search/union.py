"""Certificates for points from several cost graphs: meshes, micro-batch counts, device counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensoropt.search.result import SAME, TrackedFrontier
from tensoropt.types import Floats


def least_bounds(parts: Sequence[TrackedFrontier], memory: Floats) -> Floats:
    """(n,) a time that no strategy of any part within ``memory`` can beat."""
    return np.min([np.full(len(memory), np.inf), *(part.bounds(memory) for part in parts)], axis=0)


def certify(
    parts: Sequence[TrackedFrontier], memory: Floats, time: Floats
) -> tuple[Floats, NDArray[np.bool_]]:
    """(gap, exact), each (n,), of strategies with these costs against *all* strategies of all parts.

    ``gap``: how much faster, at most, any strategy with no more memory could be (time over the bound, minus
    1). ``exact``: it is proven that none is better in either cost, neither faster within that memory nor as
    fast with less. The points may come from anywhere: another part's strategy can beat a strategy of one
    part.
    """
    bounds = least_bounds(parts, memory)
    with np.errstate(divide="ignore", invalid="ignore"):
        gap = np.where(time <= bounds * (1 + SAME), 0.0, time / bounds - 1.0)
    # The memory minus what rounding cannot explain; for no memory at all, a budget that nothing fits.
    with_less = least_bounds(parts, np.where(memory > 0, memory * (1 - SAME), -1.0))
    return gap, (gap == 0) & (time < with_less)
