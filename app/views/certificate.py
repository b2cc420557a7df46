"""The proof about a frontier, as a band in the search's sums rather than in simulated figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..state import USUAL_ACROSS, USUAL_UP, View
from .frontier import FrontierData


@dataclass(frozen=True, eq=False)
class _Certificate:
    """The band, ascending in memory; bytes and seconds as the search sums them.

    Attributes:
        upper: the summed time of the fastest shown plan that needs no more memory; holds to the right.
        lower: the bound below which no searched plan that needs no more memory sums; holds to the left.
    """

    memory: np.ndarray
    upper: np.ndarray
    lower: np.ndarray

    def outline(self) -> tuple[list[float], list[float]]:
        """Return (memory, time) of the corners: along the upper edge, and back along the lower one."""
        # An edge that holds to the right steps down where the next point begins, one that holds to the left
        # where the last one ends.
        memory, upper, lower = (list(map(float, column)) for column in (self.memory, self.upper, self.lower))
        there = [memory[0], *(at for at in memory[1:] for _ in (0, 1))]
        back = [*(at for at in memory[:-1] for _ in (0, 1)), memory[-1]]
        ups = [*(time_s for time_s in upper[:-1] for _ in (0, 1)), upper[-1]]
        downs = [lower[0], *(time_s for time_s in lower[1:] for _ in (0, 1))]
        around, times = [*there, *back[::-1]], [*ups, *downs[::-1]]
        return [*around, around[0]], [*times, times[0]]


def certificate(data: FrontierData, rows: np.ndarray) -> _Certificate | None:
    """Return the band of some rows; None if nothing is proven about any."""
    rows = rows[np.isfinite(data.column("gap")[rows])]
    if not len(rows):
        return None
    names = ("additive_memory_bytes", "additive_time_s", "gap")
    memory, time, gap = (data.column(name)[rows] for name in names)
    bound = time / (1.0 + np.maximum(gap, 0.0))
    order = np.lexsort((time, memory))
    return _Certificate(
        memory[order],
        np.minimum.accumulate(time[order]),
        # Within less memory nothing takes less than is proven within more.
        np.maximum.accumulate(bound[order][::-1])[::-1],
    )


def has_place(view: View) -> bool:
    """Return whether the plot's axes are those of the sums."""
    return (view.across, view.up) == (USUAL_ACROSS, USUAL_UP)


def certificate_sentence(data: FrontierData, view: View) -> str:
    """Say what the band means and what it does not; "" if none is requested."""
    if not view.band:
        return ""
    if not has_place(view):
        return "The certificate is of memory and time, and not drawn over these axes."
    rows = np.flatnonzero(data.passing(view) & data.on_frontier)
    if len(rows) and certificate(data, rows) is None:
        return "Nothing is proven about these points, so there is no certificate to draw."
    return (
        "The band lies in the sums that the search adds up: no plan that was searched adds up to less than "
        "its lower edge. The points are simulated, and nothing is proven of where they lie."
    )
