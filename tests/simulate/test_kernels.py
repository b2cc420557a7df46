"""Loops that are compiled, and what keeps them inside of their arrays."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tensoropt.simulate.kernels import _add_rows, add_all, add_rows, peaks


def test_figures_are_added_owner_after_owner():
    target = np.zeros((3, 2))
    which = np.array([[0, 1], [1, 1]])
    add_rows(target, np.array([2, 0]), np.array([1.0, 10.0]), which)
    assert target.tolist() == [[10.0, 10.0], [0.0, 0.0], [1.0, 10.0]]


@pytest.mark.skipif(
    os.environ.get("NUMBA_BOUNDSCHECK") == "0", reason="kernels are tested as people run them"
)
def test_a_compiled_kernel_does_not_read_past_its_arrays():
    with pytest.raises(IndexError):
        _add_rows(np.zeros((2, 1)), np.array([0]), np.ones(1), np.zeros((2, 1), np.int64))
    with pytest.raises(IndexError):
        _add_rows(np.zeros((2, 1)), np.array([5]), np.ones(1), np.zeros((1, 1), np.int64))


def test_too_few_positions_are_not_taken():
    with pytest.raises(AssertionError, match="2 positions for 3 owners"):
        add_rows(np.zeros((4, 1)), np.array([0, 1]), np.ones(1), np.zeros((3, 1), np.int64))


@pytest.mark.parametrize("position", [-2, 4])
def test_no_row_outside_is_taken(position):
    with pytest.raises(AssertionError, match="of 4"):
        add_rows(np.zeros((4, 1)), np.array([position]), np.ones(1), np.zeros((1, 1), np.int64))


def test_figures_for_other_strategies_are_not_taken():
    with pytest.raises(AssertionError, match="2 columns for 1 strategies"):
        add_rows(np.zeros((4, 2)), np.array([0]), np.ones(1), np.zeros((1, 1), np.int64))
    with pytest.raises(AssertionError):
        add_all(np.zeros((1, 3)), np.ones((1, 2)), np.zeros((1, 1), np.int64))
    with pytest.raises(AssertionError, match="several shapes"):
        peaks(np.zeros((2, 1)), np.zeros((3, 1)), np.zeros((2, 1)))
