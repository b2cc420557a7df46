"""Batches of strategies: what one leaves behind for the next changes nothing of that.

Loops that are compiled stay inside of their arrays.
"""

import os
import random
from functools import partial

import numpy as np
import pytest
import torch

from tensoropt.evaluation.evaluate import Evaluator
from tensoropt.simulate.batch import add_rows
from tensoropt.simulate.candidates import BLOCKING
from tensoropt.simulate.readings import distinct
from tests.costs.models import problem, tables_of
from tests.simulate.test_simulator import any_choice, assert_as_one_by_one
from tests.situations.readers import WIDTH, Twice, siamese


def test_figures_are_added_owner_after_owner():
    target = np.zeros((3, 2))
    which = np.array([[0, 1], [1, 1]])
    add_rows(target, np.array([2, 0]), np.array([1.0, 10.0]), which)
    assert target.tolist() == [[10.0, 10.0], [0.0, 0.0], [1.0, 10.0]]


def test_combinations_are_told_apart_beyond_the_largest_code():
    column = np.array([3, 2**40, 3, 0])
    for columns in ([column], [column] * 3):
        firsts, which = distinct(columns)
        assert column[firsts][which].tolist() == column.tolist()
        assert sorted(firsts.tolist()) == [0, 1, 3]


@pytest.mark.skipif(
    os.environ.get("NUMBA_BOUNDSCHECK") == "0", reason="kernels are tested as people run them"
)
def test_a_compiled_kernel_does_not_read_past_its_arrays():
    with pytest.raises(IndexError):
        add_rows(np.zeros((2, 1)), np.array([0]), np.ones(1), np.zeros((2, 1), np.int64))
    with pytest.raises(IndexError):
        add_rows(np.zeros((2, 1)), np.array([5]), np.ones(1), np.zeros((1, 1), np.int64))


def both(layers, apart):
    return *siamese(layers, apart), {}


def twice():
    return Twice(4), (torch.randn(8, WIDTH),), {}


MODELS = {
    "both trained": partial(both, 4, "trained"), "one without gradient": partial(both, 3, "no_grad"),
    "one detached": partial(both, 3, "detach"), "twice in each block": twice,
}  # fmt: skip


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_strategy_costs_the_same_whatever_was_simulated_before(name, mesh):
    """Of a batch in which parameters are stored whole their readers have nothing in common, and are of other
    kinds than in the next."""
    tables, rng = tables_of(problem(MODELS[name]), mesh, beside=True), random.Random(f"{name}{mesh}")
    evaluator, whole = Evaluator(tables, BLOCKING), dict.fromkeys(tables.graph.shared, True)
    assert whole
    for kept_whole in (0, len(whole), 1, len(whole) - 1, 0):
        names = rng.sample(list(whole), kept_whole)
        assert_as_one_by_one(evaluator, tables, [any_choice(tables, rng, names) for _ in range(3)])
