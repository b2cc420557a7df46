"""Stages put together: for every amount of memory the cuts, and the stages' strategies, with which a
pipeline's step is shortest.

The step of :math:`p` stages and :math:`m` micro-batches is taken for
:math:`\\sum_s f_s + (m - 1) \\max_s t_s + \\max_s e_s`: the first micro-batch passes all stages, each
further one takes what the slowest stage takes, and behind the last a stage has what is left of reducing
gradients and the optimizer (GPipe and 1F1B; Narayanan et al., SC 2021, section 2.2; Zheng et al., Alpa, OSDI
2022, section 5.2). Its memory is that of the fullest stage.

The search is a shortest path over cuts whose costs are three numbers: labels that no other label of a cut
beats in all of them go on (Martins, "On a multicriteria shortest path problem", 1984). Memory is bounded
instead: the next pipeline is the fastest in which every stage needs less than the fullest of the one before.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Generic, TypeVar

import numpy as np
from numba import njit

MOST_LABELS = 4096
"""Labels of one cut that go on; beyond, those with the least sum of seconds. None of the models tried has had
so many."""


Cut = TypeVar("Cut", bound=Hashable)
"""Where a stage begins or ends: a position, and how what crosses it lies."""


@dataclass(frozen=True)
class Offer:
    """What one stage may be: a row per strategy.

    Attributes:
        memory: (n,) bytes of a rank, with the stage's micro-batches in flight.
        first_s: (n,) of the first micro-batch, forward and backward, with the messages that it waits for.
        further_s: (n,) by which one more micro-batch makes the step longer if this stage is the slowest.
        end_s: (n,) behind the last micro-batch.
    """

    memory: np.ndarray
    first_s: np.ndarray
    further_s: np.ndarray
    end_s: np.ndarray

    def within(self, cap: float) -> np.ndarray:
        """The strategies that need no more than ``cap`` bytes and that none of these beats."""
        (rows,) = np.nonzero(self.memory <= cap)
        costs = np.stack([self.first_s, self.further_s, self.end_s], axis=1)
        return rows[unbeaten(costs[rows])]


@dataclass(frozen=True)
class Composition(Generic[Cut]):
    """Stages that make a pipeline.

    Attributes:
        stages: per stage where it begins and ends, and the row of its offer.
        memory_bytes: of the fullest stage. time_s: of the step, as the formula above has it.
        exact: whether no label was left out.
    """

    stages: tuple[tuple[tuple[Cut, Cut], int], ...]
    memory_bytes: float
    time_s: float
    exact: bool


def unbeaten(costs: np.ndarray) -> np.ndarray:
    """(k,) the rows of ``costs`` (n, d) that no other row is at most equal to in every column; of equal rows
    the first."""
    order = np.lexsort(costs.T[::-1])
    return order[_unbeaten_of_sorted(np.ascontiguousarray(costs[order], dtype=float))]


@njit(cache=True, nogil=True)
def _unbeaten_of_sorted(costs):  # type: ignore[no-untyped-def]
    """The rows of sorted ``costs`` that no row before them is at most equal to in every column."""
    # Sorted by the first column: nothing that follows can beat what is kept.
    kept = np.empty(costs.shape[0], np.int64)
    count = 0
    for row in range(costs.shape[0]):
        beaten = False
        for other in range(count):
            beaten = True
            for column in range(costs.shape[1]):
                if costs[kept[other], column] > costs[row, column]:
                    beaten = False
                    break
            if beaten:
                break
        if not beaten:
            kept[count] = row
            count += 1
    return kept[:count]


def compose(
    offers: Sequence[Mapping[tuple[Cut, Cut], Offer]], micro_batches: int, *, step: float = 0.0
) -> Iterator[Composition[Cut]]:
    """The compositions that none beats in memory and time, the fastest first.

    Args:
        offers: per stage what it may be between its ends; stages follow one another where ends are equal.
        step: by which share the memory of the next composition is at least less; 0 finds all.
    """
    cap, before = inf, None
    while (found := _fastest(offers, micro_batches, cap)) is not None:
        memory = max(float(offers[s][ends].memory[row]) for s, (ends, row) in enumerate(found.stages))
        # As fast with less memory: the one before is beaten.
        if before is not None and found.time_s > before.time_s:
            yield before
        before = replace(found, memory_bytes=memory)
        cap = float(np.nextafter(memory, 0.0)) if not step else memory * (1.0 - step)
    if before is not None:
        yield before


@dataclass(frozen=True)
class _Labels(Generic[Cut]):
    """Ways to come to one cut: (n, 3) seconds of first, slowest and longest end, and what they came by."""

    costs: np.ndarray
    came: tuple[tuple[tuple[Cut, Cut], int, int], ...]


def _fastest(
    offers: Sequence[Mapping[tuple[Cut, Cut], Offer]], micro_batches: int, cap: float
) -> Composition[Cut] | None:
    """The fastest composition in which every stage keeps within ``cap`` bytes."""
    exact = True
    starts = dict.fromkeys(start for start, _ in offers[0])
    reached: list[dict[Cut, _Labels[Cut]]] = [{start: _Labels(np.zeros((1, 3)), ()) for start in starts}]
    for of_stage in offers:
        coming: dict[Cut, list[tuple[np.ndarray, tuple[Cut, Cut], int]]] = {}
        for (start, stop), offer in of_stage.items():
            before = reached[-1].get(start)
            if before is None:
                continue
            for row in offer.within(cap).tolist():
                after = before.costs.copy()
                after[:, 0] += offer.first_s[row]
                np.maximum(after[:, 1], offer.further_s[row], out=after[:, 1])
                np.maximum(after[:, 2], offer.end_s[row], out=after[:, 2])
                coming.setdefault(stop, []).append((after, (start, stop), row))
        following: dict[Cut, _Labels[Cut]] = {}
        for stop, ways in coming.items():
            costs = np.concatenate([after for after, *_ in ways])
            came = [(ends, row, i) for after, ends, row in ways for i in range(len(after))]
            kept = unbeaten(costs)
            if len(kept) > MOST_LABELS:
                exact = False
                kept = kept[np.argsort(_step_s(costs[kept], micro_batches), kind="stable")[:MOST_LABELS]]
            following[stop] = _Labels(costs[kept], tuple(came[i] for i in kept.tolist()))
        reached.append(following)
    best: tuple[float, Cut, int] | None = None
    for stop, labels in reached[-1].items():
        seconds = _step_s(labels.costs, micro_batches)
        at = int(np.argmin(seconds))
        if best is None or seconds[at] < best[0]:
            best = float(seconds[at]), stop, at
    if best is None:
        return None
    time_s, where, at = best
    stages: list[tuple[tuple[Cut, Cut], int]] = []
    for at_cuts in reversed(reached[1:]):
        ends, row, at = at_cuts[where].came[at]
        stages.insert(0, (ends, row))
        where = ends[0]
    return Composition(tuple(stages), 0.0, time_s, exact)


def _step_s(costs: np.ndarray, micro_batches: int) -> np.ndarray:
    """(n,) seconds of steps of so many micro-batches."""
    return costs[:, 0] + (micro_batches - 1) * costs[:, 1] + costs[:, 2]
