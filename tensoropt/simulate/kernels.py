"""Compiled loops over moments, owners and strategies, in which the simulator spends most of its time.

Sums are computed in numpy's order, to the last bit: a strategy's figures do not depend on the other
strategies in the simulation.

Compiled loops do not check array bounds: indices used for additions are checked here first, as far as that
does not take as long as the loop.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tensoropt.types import Floats, Indices


def add_rows(target: Floats, positions: Indices, table: Floats, which: Indices) -> None:
    """Add ``table[which[owner]]`` to row ``positions[owner]`` of ``target`` (rows, strategies), one owner
    after another.

    Args:
        positions: (owners,) rows; -1, for an owner without such an effect, is the last row.
        table: (choices,) figures.
        which: (owners, strategies) numbers of choices.
    """
    owners, strategies = which.shape
    assert positions.shape == (owners,), f"{len(positions)} positions for {owners} owners"
    assert target.shape[1] == strategies, f"{target.shape[1]} columns for {strategies} strategies"
    if owners:
        least, most = positions.min(), positions.max()
        assert -1 <= least <= most < len(target), f"rows {least} to {most} of {len(target)}"
        _add_rows(target, positions, table, which)


@njit(cache=True, nogil=True)
def _add_rows(target: Floats, positions: Indices, table: Floats, which: Indices) -> None:
    for owner in range(which.shape[0]):
        position = positions[owner]
        for n in range(which.shape[1]):
            target[position, n] += table[which[owner, n]]


def add_all(target: Floats, table: Floats, which: Indices) -> None:
    """Add ``table[which[owner]]`` to ``target`` (strategies, figures), one owner after another.

    Args:
        table: (choices, figures).
        which: (owners, strategies) numbers of choices.
    """
    expected = which.shape[1], table.shape[1]
    assert target.shape == expected, f"{target.shape} for strategies and figures {expected}"
    _add_all(target, table, which)


@njit(cache=True, nogil=True)
def _add_all(target: Floats, table: Floats, which: Indices) -> None:
    for owner in range(which.shape[0]):
        for n in range(which.shape[1]):
            for i in range(table.shape[1]):
                target[n, i] += table[which[owner, n], i]


@njit(cache=True, nogil=True)
def sum_up(rows: Floats) -> None:
    """Replace each of ``rows`` (moments, strategies) with the sum of all rows up to it."""
    for moment in range(1, rows.shape[0]):
        for n in range(rows.shape[1]):
            rows[moment, n] += rows[moment - 1, n]


def peaks(kept: Floats, transient: Floats, workspace: Floats) -> Floats:
    """Return (strategies, 2) what is kept, and what else is alive, at the peak; the first of several
    peaks.

    Args:
        kept, transient: (moments, strategies) bytes that are alive.
        workspace: (moments, strategies) bytes that are alive only at that moment.
    """
    shapes = kept.shape, transient.shape, workspace.shape
    assert len(set(shapes)) == 1, f"bytes of several shapes: {shapes}"
    totals = np.zeros((kept.shape[1], 2))
    if len(kept):
        _peaks(kept, transient, workspace, totals)
    return totals


@njit(cache=True, nogil=True)
def _peaks(kept: Floats, transient: Floats, workspace: Floats, totals: Floats) -> None:
    for n in range(totals.shape[0]):
        totals[n, 0], totals[n, 1] = kept[0, n], kept[0, n] + transient[0, n] + workspace[0, n]
    for moment in range(1, kept.shape[0]):
        for n in range(totals.shape[0]):
            total = kept[moment, n] + transient[moment, n] + workspace[moment, n]
            if total > totals[n, 1]:
                totals[n, 0], totals[n, 1] = kept[moment, n], total
    for n in range(totals.shape[0]):
        totals[n, 1] -= totals[n, 0]
