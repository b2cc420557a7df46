r"""Choose the cuts and the stage strategies of the fastest pipeline under each memory bound.

A step of :math:`m` micro-batches takes :math:`\sum_s f_s + (m - 1) \max_s t_s + \max_s e_s`, if stage
:math:`s` takes :math:`f_s` for the first micro-batch, :math:`t_s` for each further one and :math:`e_s` after
the last (Narayanan et al., SC 2021, section 2.2; Alpa, OSDI 2022, section 5.2). Its memory is that of the
fullest stage. The search is a shortest path over cuts with three costs: a partial pipeline (a label) is kept
if no other one to the same cut beats it in all three (Martins, "On a multicriteria shortest path problem",
1984).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Generic, TypeVar

import numpy as np
from numba import njit

_MOST_LABELS = 4096
"""The most partial pipelines (labels) kept at one cut; if there are more, the fastest are kept."""
_SLACK = 0.1
"""The share of :func:`compose`'s ``step`` by which a kept label must beat others in some cost; assumed."""


Place = TypeVar("Place", bound=Hashable)
"""The start or end of a stage: its position, and the layout of the tensors that cross there."""


@dataclass(frozen=True)
class Offer:
    """The strategies available to one stage, one per row.

    Attributes:
        memory: (n,) memory in bytes of a rank with all micro-batches in flight.
        first_s: (n,) duration in seconds of the first micro-batch, including its messages.
        further_s: (n,) duration in seconds of each further micro-batch if this stage is the slowest.
        end_s: (n,) duration in seconds from the last micro-batch to the end of the step.
    """

    memory: np.ndarray
    first_s: np.ndarray
    further_s: np.ndarray
    end_s: np.ndarray

    def within(self, cap: float) -> np.ndarray:
        """Return the rows of the non-dominated strategies that need at most ``cap`` bytes."""
        (rows,) = np.nonzero(self.memory <= cap)
        costs = np.stack([self.first_s, self.further_s, self.end_s], axis=1)
        return rows[unbeaten(costs[rows])]


@dataclass(frozen=True)
class Composition(Generic[Place]):
    """A pipeline composed of stages.

    Attributes:
        stages: for each stage, its start and end, and the row of its strategy.
        memory_bytes: the memory in bytes of the fullest stage.
        time_s: the duration of the step in seconds.
        exact: whether no partial pipeline was dropped because there were too many.
    """

    stages: tuple[tuple[tuple[Place, Place], int], ...]
    memory_bytes: float
    time_s: float
    exact: bool


def unbeaten(costs: np.ndarray, slack: float = 0.0) -> np.ndarray:
    """Return the indices (k,) of the non-dominated rows of ``costs`` (n, d); of equal rows, the first.

    Args:
        slack: a row is also dropped if no column is lower than that of a returned row by more than this
            share.
    """
    order = np.lexsort(costs.T[::-1])
    return order[_unbeaten_of_sorted(np.ascontiguousarray(costs[order], dtype=float), 1.0 - slack)]


@njit(cache=True, nogil=True)
def _unbeaten_of_sorted(costs, share):  # type: ignore[no-untyped-def]
    # Rows are sorted by the first column: no later row can beat those kept.
    kept = np.empty(costs.shape[0], np.int64)
    count = 0
    for row in range(costs.shape[0]):
        beaten = False
        for earlier in range(count):
            beaten = True
            for column in range(costs.shape[1]):
                if costs[kept[earlier], column] * share > costs[row, column]:
                    beaten = False
                    break
            if beaten:
                break
        if not beaten:
            kept[count] = row
            count += 1
    return kept[:count]


def compose(
    offers: Sequence[Mapping[tuple[Place, Place], Offer]],
    micro_batches: int,
    *,
    step: float = 0.0,
    known: Sequence[tuple[float, float]] = (),
) -> Iterator[Composition[Place]]:
    """Yield the composed pipelines on the frontier of memory and time, the fastest first.

    Args:
        offers: for each stage, (start, end) -> its strategies; each stage starts where the previous one ends.
        step: the least decrease of memory from one pipeline to the next, as a share; 0 yields all.
        known: (memory in bytes, step time in seconds) of other plans, by increasing memory and decreasing
            time. Pipelines that such a plan would beat even if they had no bubble are left out.
    """
    cap, before = inf, None
    while (composition := _fastest(offers, micro_batches, cap, step * _SLACK)) is not None:
        chosen = [(offers[s][ends], row) for s, (ends, row) in enumerate(composition.stages)]
        memory = max(float(offer.memory[row]) for offer, row in chosen)
        least_s = micro_batches * max(float(offer.further_s[row]) for offer, row in chosen)
        better = next((leaner for leaner, seconds in known if seconds < least_s), inf)
        if better <= memory:
            cap = float(np.nextafter(better, 0.0))
            continue
        # A pipeline that is as fast as the previous one, with less memory, replaces it.
        if before is not None and composition.time_s > before.time_s:
            yield before
        before = replace(composition, memory_bytes=memory)
        cap = float(np.nextafter(memory, 0.0)) if not step else memory * (1.0 - step)
    if before is not None:
        yield before


@dataclass(frozen=True)
class _Labels(Generic[Place]):
    """The partial pipelines (labels) that reach one cut.

    Attributes:
        costs: (n, 3) seconds, over the stages of each label: the sum of their times for the first
            micro-batch, the longest time for a further one, and the longest time from the last one to the end
            of the step (``first_s``, ``further_s`` and ``end_s`` of :class:`Offer`).
        ways: the stages that can end at this cut, each with the non-dominated rows of its strategies.
        came: (n, 3) three indices for each label: its last stage in ``ways``, the row of that stage, and the
            shorter label that the stage continues.
    """

    costs: np.ndarray
    ways: Sequence[tuple[tuple[Place, Place], np.ndarray]] = ()
    came: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))


def _fastest(
    offers: Sequence[Mapping[tuple[Place, Place], Offer]], micro_batches: int, cap: float, slack: float
) -> Composition[Place] | None:
    """Return the fastest pipeline whose stages need at most ``cap`` bytes each, or None if there is none.

    A partial pipeline is dropped if none of its durations is shorter than another's by more than the share
    ``slack`` (:func:`unbeaten`).
    """
    exact = True
    starts = dict.fromkeys(start for start, _ in offers[0])
    reached: list[dict[Place, _Labels[Place]]] = [{start: _Labels(np.zeros((1, 3))) for start in starts}]
    for of_stage in offers:
        coming: dict[Place, list[tuple[tuple[Place, Place], np.ndarray]]] = {}
        for ends, offer in of_stage.items():
            if ends[0] in reached[-1] and len(rows := offer.within(cap)):
                coming.setdefault(ends[1], []).append((ends, rows))
        following: dict[Place, _Labels[Place]] = {}
        for stop, ways in coming.items():
            costs, came = [], []
            for number, (ends, rows) in enumerate(ways):
                before, offer = reached[-1][ends[0]].costs, of_stage[ends]
                after = np.empty((len(rows), len(before), 3))
                after[..., 0] = before[:, 0] + offer.first_s[rows, None]
                after[..., 1] = np.maximum(before[:, 1], offer.further_s[rows, None])
                after[..., 2] = np.maximum(before[:, 2], offer.end_s[rows, None])
                costs.append(after.reshape(-1, 3))
                row, label = (each.ravel() for each in np.indices(after.shape[:2]))
                came.append(np.stack([np.full_like(row, number), row, label], axis=1))
            every = np.concatenate(costs)
            kept = unbeaten(every, slack)
            if len(kept) > _MOST_LABELS:
                exact = False
                kept = kept[np.argsort(_step_s(every[kept], micro_batches), kind="stable")[:_MOST_LABELS]]
            following[stop] = _Labels(every[kept], ways, np.concatenate(came)[kept])
        reached.append(following)
    best: tuple[float, Place, int] | None = None
    for stop, labels in reached[-1].items():
        seconds = _step_s(labels.costs, micro_batches)
        best_row = int(np.argmin(seconds))
        if best is None or seconds[best_row] < best[0]:
            best = float(seconds[best_row]), stop, best_row
    if best is None:
        return None
    time_s, where, label = best
    stages: list[tuple[tuple[Place, Place], int]] = []
    for at_cuts in reversed(reached[1:]):
        number, row, label = at_cuts[where].came[label].tolist()
        ends, rows = at_cuts[where].ways[number]
        stages.insert(0, (ends, int(rows[row])))
        where = ends[0]
    return Composition(tuple(stages), 0.0, time_s, exact)


def _step_s(costs: np.ndarray, micro_batches: int) -> np.ndarray:
    return costs[:, 0] + (micro_batches - 1) * costs[:, 1] + costs[:, 2]
