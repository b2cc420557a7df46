"""The cost of moving from work to a collective and back, and its derivation from clock stamps.

In a loop of nothing but collectives, each finds its code and buffers in the caches. In a step it comes after
work that has pushed them out, and it does the same to the work that follows. Work with collectives and work
without them take turns (:mod:`tensoropt.profiling.transition_timing`), because the machine's pace changes by
more than the effect being measured: figures of one lap are compared, and the median over laps counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensoropt.profiling.transition_timing import LAYER_KINDS, Turns

TRANSITION_SIZES = (4 * 2**10, 64 * 2**10, 512 * 2**10, 2 * 2**20, 8 * 2**20)
TURNS = (
    # The effect of small collectives on caches is soon over, waiting grows with the work; large ones take
    # long themselves.
    (TRANSITION_SIZES[:3], {0: 8, 1: 2 * LAYER_KINDS, 4: LAYER_KINDS, 16: 2}, 24),
    (TRANSITION_SIZES[3:], {0: 3, 1: LAYER_KINDS, 4: LAYER_KINDS // 2, 16: 2}, 8),
)
"""The sizes of collectives, the number of blocks by layers of work per block (some 0.1 ms each), and laps."""
_WARM_LAPS = 2
"""The laps that do not count: in the first ones ranks still create code and memory that later ones reuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The cost of moving from work to a collective and back, on either side.

    Attributes:
        works_s: (w,) seconds of work before the collective or after it, ascending from 0.
        sizes: (s,) bytes of the collective, ascending.
        arriving_s: (w, s) how many seconds longer the collective takes after that much work: the network's
            code and buffers have left the caches, and a rank that waited for another sleeps.
        leaving_s: (w, s) how many seconds longer that much work takes after it: now the operators' have left
            the caches.
    """

    works_s: tuple[float, ...]
    sizes: tuple[int, ...]
    arriving_s: tuple[tuple[float, ...], ...]
    leaving_s: tuple[tuple[float, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, which :meth:`from_dict` reads back."""
        return {
            "works_s": list(self.works_s),
            "sizes": list(self.sizes),
            "arriving_s": [list(row) for row in self.arriving_s],
            "leaving_s": [list(row) for row in self.leaving_s],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Transition:
        """Return the transition that :meth:`to_dict` wrote."""
        return cls(
            works_s=tuple(data["works_s"]),
            sizes=tuple(data["sizes"]),
            arriving_s=tuple(map(tuple, data["arriving_s"])),
            leaving_s=tuple(map(tuple, data["leaving_s"])),
        )

    def arriving(self, work_s: Any, num_bytes: Any) -> Any:
        """How many seconds longer a collective takes after ``work_s`` (numbers or arrays of one shape);
        constant beyond the first and last figures, and interpolated between sizes by their logarithms."""
        return self._between(self.arriving_s, work_s, num_bytes)

    def leaving(self, work_s: Any, num_bytes: Any) -> Any:
        """How many seconds longer ``work_s`` takes after a collective; interpolated in the same way."""
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
    """The turns for every amount of work with a collective of every size, for work alone and for collectives
    alone.

    Args:
        sizes: bytes of the collectives.
        blocks: layers per block of work -> number of such blocks that are timed.
    """
    turns = itertools.product(blocks.items(), (0, *sizes))
    return [Turns(layers, size, count) for (layers, count), size in turns if layers or size]


def transition_of(
    parts: Sequence[tuple[Sequence[Turns], Sequence[Any]]], groups: Iterable[tuple[int, ...]]
) -> Transition:
    """The :class:`Transition` of the group that loses most with the longest work, among groups that ran at
    once.

    Args:
        parts: plans, and for each rank the stamps that
            :func:`~tensoropt.profiling.transition_timing.time_transitions` returned for them.
    """
    found = []
    for group in groups:
        of_group = [(plan, [stamps[rank] for rank in group]) for plan, stamps in parts]
        found.append(transition_of_group(of_group))
    # All groups meet in the next collective over other axes, so the worst group counts.
    return max(found, key=lambda one: sum(one.arriving_s[-1]) + sum(one.leaving_s[-1]))


def transition_of_group(parts: Sequence[tuple[Sequence[Turns], Sequence[Any]]]) -> Transition:
    """The transition that follows from plans and the stamps of one group's ranks. Longer work adds and
    suffers no less than shorter work, and a larger collective leaves no less than a smaller one."""
    arriving: dict[tuple[int, int], float] = {}
    leaving: dict[tuple[int, int], float] = {}
    works: dict[int, float] = {0: 0.0}
    for plan, stamps in parts:
        laps = (zip(*ranks, strict=True) for ranks in zip(*(s[_WARM_LAPS:] for s in stamps), strict=True))
        seconds = np.array(
            [[_block(ranks, turns.size > 0) for turns, ranks in zip(plan, lap, strict=True)] for lap in laps]
        )
        worked, sent = (dict(zip(plan, seconds[:, :, i].T, strict=True)) for i in (0, 1))
        alone = {turns.layers: turns for turns in plan if not turns.size}
        at_once = {turns.size: turns for turns in plan if not turns.layers}
        works.update({layers: float(np.median(worked[turns])) for layers, turns in alone.items()})
        for turns in plan:
            if turns.layers and turns.size and not np.isnan(sent[turns]).any():
                # The machine's pace is that of the same lap.
                key = turns.layers, turns.size
                arriving[key] = float(np.median(sent[turns] - sent[at_once[turns.size]]))
                leaving[key] = float(np.median(worked[turns] - worked[alone[turns.layers]]))
    return Transition(
        works_s=tuple(_ascending(list(works.values()))),
        sizes=TRANSITION_SIZES,
        arriving_s=_table(arriving, tuple(works), by_size=False),
        leaving_s=_table(leaving, tuple(works), by_size=True),
    )


def _table(
    found: Mapping[tuple[int, int], float], works: Sequence[int], *, by_size: bool
) -> tuple[tuple[float, ...], ...]:
    """(works, sizes) starting at 0, ascending with work and, if ``by_size``, with size; the longest timed
    work stands for longer work, and the largest size for larger ones."""
    columns = [[0.0] * len(works)]
    for size in TRANSITION_SIZES:
        # Noise may make small extras negative or disordered, which isotonic regression corrects with the
        # least change.
        known = _ascending([max(found[w, size], 0.0) for w in works if (w, size) in found])
        whole = [0.0, *known, *known[-1:] * (len(works) - 1 - len(known))]
        columns.append(whole if known else columns[-1])
    columns = columns[1:]
    rows = zip(*columns, strict=True)
    return tuple(tuple(_ascending(row)) if by_size else row for row in rows)


def _ascending(values: Sequence[float]) -> list[float]:
    """The ascending numbers nearest to these."""
    from scipy.optimize import isotonic_regression  # slow to import, and only measuring needs it

    return list(map(float, isotonic_regression(values).x))


def _block(ranks: Sequence[Any], sent: bool) -> tuple[float, float]:
    """The mean seconds of work and of the collective, over the blocks that a group's ranks did in turns; NaN
    without blocks.

    Args:
        sent: whether there was a collective. Work then counts from the end of the last one to the moment when
            the slower rank has done its own, because the other waits for it.
    """
    if not ranks[0]:
        return math.nan, math.nan
    starts, middles, ends = np.moveaxis(np.array(ranks), 2, 0)
    if not sent:
        return (middles - starts).mean(axis=1).max(), 0.0
    came, went = middles.max(axis=0), ends.max(axis=0)
    begun = np.append(starts[:, :1].max(axis=0), went[:-1])
    return (came - begun).mean(), (went - came).mean()
