"""Loops over moments, owners and strategies that the simulator runs most of its time, compiled.

Sums are made in the order in which numpy would make them, to the last bit: a strategy's figures do not depend
on which others it is simulated with.
"""

from __future__ import annotations

from numba import njit

from tensoropt.types import Floats, Indices


@njit(cache=True, nogil=True)
def add_rows(target: Floats, positions: Indices, table: Floats, which: Indices) -> None:
    """Add ``table[which[owner]]`` to row ``positions[owner]`` of ``target`` (rows, strategies), owner after
    owner.

    Args:
        table: (choices,) figures.
        which: (owners, strategies) numbers of choices.
    """
    for owner in range(which.shape[0]):
        position = positions[owner]
        for n in range(which.shape[1]):
            target[position, n] += table[which[owner, n]]


@njit(cache=True, nogil=True)
def add_all(target: Floats, table: Floats, which: Indices) -> None:
    """Add ``table[which[owner]]`` to ``target`` (strategies, figures), owner after owner.

    Args:
        table: (choices, figures).
        which: (owners, strategies) numbers of choices.
    """
    for owner in range(which.shape[0]):
        for n in range(which.shape[1]):
            for i in range(table.shape[1]):
                target[n, i] += table[which[owner, n], i]


@njit(cache=True, nogil=True)
def sum_up(rows: Floats) -> None:
    """Make each of ``rows`` (moments, strategies) the sum of all until then."""
    for moment in range(1, rows.shape[0]):
        for n in range(rows.shape[1]):
            rows[moment, n] += rows[moment - 1, n]


@njit(cache=True, nogil=True)
def peaks(kept: Floats, transient: Floats, workspace: Floats, found: Floats) -> None:
    """Fill ``found`` (strategies, 2) with what is kept and what else is there at the peak, the first of
    several.

    Args:
        kept, transient: (moments, strategies) bytes that are alive.
        workspace: (moments, strategies) bytes that are there at that moment only.
    """
    for n in range(found.shape[0]):
        found[n, 0], found[n, 1] = kept[0, n], kept[0, n] + transient[0, n] + workspace[0, n]
    for moment in range(1, kept.shape[0]):
        for n in range(found.shape[0]):
            total = kept[moment, n] + transient[moment, n] + workspace[moment, n]
            if total > found[n, 1]:
                found[n, 0], found[n, 1] = kept[moment, n], total
    for n in range(found.shape[0]):
        found[n, 1] -= found[n, 0]
