"""The timing of a rank's step for many strategies: computation, and collectives in the order of issue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from tensoropt.simulate.candidates import Overlap
from tensoropt.simulate.readings import Axes
from tensoropt.simulate.step_schedule import StepSchedule
from tensoropt.types import Floats, Indices


@dataclass
class Issue:
    """Collectives over one set of mesh axes that are issued at one moment, one after another.

    Attributes:
        position: the moment after whose computation they are issued.
        seconds: (n,) their total duration in each of n strategies; 0 if a strategy sends none.
        until: what waits for them: ``block`` (the next block), ``step`` (the optimizer) or "" (the next
            computation).
        only: their only micro-batch, ``first`` or ``last``; "" for all.
        product_s: (n,) the last seconds of the moment's computation, which they overlap; None for none.
        kind: the kind of a coalesced collective, such as ``all_gather``; "" for others.
    """

    position: int
    axes: Axes
    seconds: Floats
    until: str = ""
    only: str = ""
    product_s: Floats | None = None
    kind: str = ""


class _Entry(NamedTuple):
    """One event of a rank: collectives are issued, or a block or phase begins or ends.

    Attributes:
        code: the kind of event, a constant from :data:`BLOCKS` to :data:`STEPS`.
        position: the moment after whose computation it happens.
        issue: the index of the issued collectives; -1 for none.
        only: -1 to issue in all micro-batches, 0 in the first one only, 1 in the last one only.
    """

    code: int
    position: int
    issue: int = -1
    only: int = -1


BLOCKS, AHEAD, REDUCES, BEGINS, BACK, BACKWARD, STEPS = range(7)
"""Codes of entries: collectives for which the next computation, the next block, or the optimizer waits; then
a block begins, backward ends, backward begins, the optimizer's step begins."""


def program(schedule: StepSchedule, issues: Sequence[Issue], overlap: Overlap) -> tuple[list[_Entry], int]:
    """Return a micro-batch's events followed by those of the step's end, and the number of the former."""
    last, step = schedule.last, max(schedule.position("optimizer", "step", ""), schedule.last)
    ahead = overlap.beside and any(issue.kind and issue.until != "step" for issue in issues)
    begins = frozenset(schedule.beginnings if ahead else ())
    turns: list[tuple[int, int, int, _Entry]] = [(at, 0, 0, _Entry(BEGINS, at)) for at in begins]
    for number, issue in enumerate(issues):
        # Gradients that arrive as a block begins complete buckets before anything else is sent.
        order = 1 if issue.until == "step" and issue.position in begins else 2
        turns.append((issue.position, order, number, _turn(issue, number, overlap)))
    # When backward ends, nothing follows with which a collective could overlap.
    if last - 1 in begins:
        turns.append((last - 1, 3, 0, _Entry(BACK, last - 1)))
    if last > schedule.forward_end:
        turns.append((schedule.forward_end, -1, 0, _Entry(BACKWARD, schedule.forward_end - 1)))
    turns.append((step, -1, 0, _Entry(STEPS, step - 1)))
    turns.sort()
    return [turn for *_, turn in turns], sum(position < last for position, *_ in turns)


def _turn(issue: Issue, number: int, overlap: Overlap) -> _Entry:
    code = {"": BLOCKS, "block": AHEAD, "step": REDUCES}[issue.until] if overlap.beside else BLOCKS
    only = ("first", "last").index(issue.only) if issue.only else -1
    return _Entry(code, issue.position, number, only)


@dataclass(frozen=True)
class Clocked:
    """The timing of a step on the device, for n strategies and several simulated micro-batches (runs).

    Attributes:
        device_s, compute_s, communication_s: (n,) seconds of the step, of computation, and of all
            collectives.
        beside_s: (n,) seconds by which collectives slow down computation; part of ``compute_s``.
        forward_s, backward_s, scattering_s: (n, runs) seconds of a micro-batch's forward, of its backward,
            and of the wait for reduce-scatters at the end of backward.
        end_s, reducing_s: (n,) seconds after the last backward, and those of them spent waiting for buckets.
        times: (runs + 1, events, 4) seconds, of one strategy, in each run and at the step's end: when an
            event is issued, starts and ends, and when computation goes on; NaN if it does not happen.
    """

    device_s: Floats
    compute_s: Floats
    communication_s: Floats
    beside_s: Floats
    forward_s: Floats
    backward_s: Floats
    scattering_s: Floats
    end_s: Floats
    reducing_s: Floats
    times: Floats


def clock(
    schedule: StepSchedule,
    work: Floats,
    issues: Sequence[Issue],
    overlap: Overlap,
    repeats: Sequence[int],
    turns: tuple[list[_Entry], int] | None = None,
) -> Clocked:
    """Return the timing of a step in which micro-batches follow one another, for n strategies.

    Args:
        work: (moments, n) seconds of computation.
        repeats: for each simulated micro-batch, how many equal ones it stands for, such as 1, 6, 1 of eight.
        turns: the program of one strategy (:func:`program`), to return the times of its events, too.
    """
    count = work.shape[1]
    entries, tail = turns or program(schedule, issues, overlap)
    # To the last bit, no strategy's time may depend on when others send, so work is summed from the beginning
    # of the step, and not from one collective to the next.
    done = np.zeros((len(work) + 1, count))
    np.cumsum(work, axis=0, out=done[1:])
    rows = np.array([turn.position + 1 for turn in entries] + [schedule.last, len(work)], dtype=np.int64)
    names = sorted({name for issue in issues for name in overlap.links(issue.axes)})
    links = np.array(
        [sum(1 << names.index(name) for name in overlap.links(issue.axes)) for issue in issues], np.int64
    )
    seconds, product = np.zeros((2, len(issues) + 1, count))
    for number, issue in enumerate(issues):
        seconds[number] = issue.seconds
        if issue.product_s is not None and overlap.beside:
            product[number] = issue.product_s
    shape = (len(repeats) + 1, len(entries), 4) if turns is not None else (0, 0, 0)
    times = np.full(shape, np.nan)
    totals, of_runs = np.zeros((6, count)), np.zeros((3, count, len(repeats)))
    _clock(
        np.array([(turn.code, turn.issue, turn.only) for turn in entries], dtype=np.int64).reshape(-1, 3),
        tail, np.ascontiguousarray(done[rows].T), np.ascontiguousarray(seconds.T),
        np.ascontiguousarray(product.T), links, np.array(repeats, dtype=np.int64), overlap.slower,
        totals, of_runs, times,
    )  # fmt: skip
    forward, backward, scattering = of_runs
    device, compute, sent, beside, end, reducing = totals
    return Clocked(device, compute, sent, beside, forward, backward, scattering, end, reducing, times)


@njit(cache=True, nogil=True)
def _clock(
    entries: Indices,
    tail: int,
    done: Floats,
    seconds: Floats,
    product: Floats,
    links: Indices,
    repeats: Indices,
    slower: float,
    totals: Floats,
    of_runs: Floats,
    times: Floats,
) -> None:
    """Fill ``totals`` and ``of_runs`` with the fields of :class:`Clocked`, and ``times`` of one strategy.

    Args:
        entries: (events, 3) code, issue and only of each event; from ``tail`` on, of the end of the step.
        done: (n, events + 2) seconds of computation up to each event, up to the end of backward, and in all.
        seconds, product: (n, issues) as in :class:`Issue`.
        links: (issues,) the set of links that each issue uses, as bits.
    """
    runs, count = len(repeats), len(entries)
    free = np.zeros(64)
    for n in range(len(done)):
        # The time is ``worked + waited``, of which ``worked + slowed`` is computing.
        worked = waited = slowed = sent = beside = arrival = turned = scattering = 0.0
        # The remaining seconds of collectives that overlap with computation, since when, and what was
        # computed by then: during s seconds of them, s / (1 + slower) seconds of work are done.
        flying = since = computed = reducing = backward_end = 0.0
        free[:] = 0.0
        for run in range(runs + 1):
            first, last, end = (0, tail, count) if run < runs else (tail, count, count + 1)
            began, begun_slowed, begun_sent, begun_beside = waited, slowed, sent, beside
            if run < runs:
                since, computed, scattering, turned = waited, slowed, 0.0, -1.0
            for at in range(first, last):
                worked = done[n, at]
                code, issue, only = entries[at]
                if code == BACKWARD:
                    turned = worked + waited
                    continue
                took = seconds[n, issue] if issue >= 0 else 0.0
                if code <= REDUCES and (
                    took <= 0.0 or (only == 0 and run > 0) or (only == 1 and run < runs - 1)
                ):
                    continue
                if slower > 0.0 and flying > 0.0:
                    extra = min(flying, (worked + slowed - computed) * (1.0 + slower))
                    extra *= slower / (1.0 + slower)
                    waited, slowed, beside = waited + extra, slowed + extra, beside + extra
                now = worked + waited
                flying = max(flying - (now - since), 0.0)
                start = over = now
                if code <= REDUCES:
                    sent += took
                    start = now - product[n, issue]
                    for link in range(64):
                        if links[issue] >> link == 0:
                            break
                        if links[issue] >> link & 1:
                            start = max(start, free[link])
                    over = start + took
                    if code == BLOCKS:
                        extra = 0.0
                        if product[n, issue] > 0.0:
                            extra = min(max(now - start, 0.0), took / (1.0 + slower)) * slower
                        waited += extra + max(over - now - extra, 0.0)
                        slowed, beside = slowed + extra, beside + extra
                    else:
                        flying += took
                        if code == AHEAD:
                            arrival = max(arrival, over)
                    for link in range(64):
                        if links[issue] >> link == 0:
                            break
                        if links[issue] >> link & 1:
                            # Not the end of what was waited for, which may be a last bit more: a strategy
                            # would wait for itself if another one's buckets are on these links.
                            free[link] = worked + waited if code == BLOCKS else over
                elif code == STEPS:
                    waited = max(waited, np.max(free) - worked)
                    over = worked + waited
                    # Nothing is under way any longer that could slow down the optimizer.
                    reducing, flying = over - now, 0.0
                else:
                    waited = max(waited, arrival - worked)
                    over = worked + waited
                    if code == BACK:
                        scattering = over - now
                after = worked + waited
                if code == BLOCKS or code >= BEGINS:
                    flying = max(flying - (after - now), 0.0)
                since, computed = after, worked + slowed
                if len(times):
                    times[run, at, 0], times[run, at, 1] = now, start
                    times[run, at, 2], times[run, at, 3] = over, after
            worked = done[n, end]
            now = worked + waited
            if run == runs:
                break
            turned = turned if turned >= 0.0 else now
            of_runs[0, n, run], of_runs[1, n, run] = turned - began, now - turned
            of_runs[2, n, run] = scattering
            backward_end = now
            if run < runs - 1:
                # Account for equal micro-batches at once.
                times_run = float(repeats[run])
                waited = began + (now - began) * times_run
                slowed = begun_slowed + (worked + slowed - begun_slowed) * times_run
                sent = begun_sent + (sent - begun_sent) * times_run
                beside = begun_beside + (beside - begun_beside) * times_run
        totals[0, n], totals[1, n], totals[2, n] = worked + waited, worked + slowed, sent
        totals[3, n], totals[4, n], totals[5, n] = beside, worked + waited - backward_end, reducing
