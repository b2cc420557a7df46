"""Batches of strategies: what one leaves behind for the next changes nothing of that."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch

from tensoropt.evaluation.evaluate import Evaluator
from tensoropt.simulate.candidates import BLOCKING
from tests.costs.models import problem, tables_of
from tests.situations.readers import WIDTH, Twice, siamese


def both(layers, apart):
    return *siamese(layers, apart), {}


def twice():
    return Twice(4), (torch.randn(8, WIDTH),), {}


MODELS = {
    "both trained": partial(both, 4, "trained"),
    "one without gradient": partial(both, 3, "no_grad"),
    "one detached": partial(both, 3, "detach"),
    "twice in each block": twice,
}


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
        chosen = []
        for _ in range(3):
            choice = {v.key: rng.randrange(len(v.memory)) for v in tables.variables}
            choice |= {v.key: 0 for v in tables.variables if getattr(v.key, "name", "") in names}
            options = {v.key: rng.randrange(len(v.memory[choice[v.key]])) for v in tables.variables}
            chosen.append((choice, options))
        (together,) = evaluator(chosen)
        for row, one in enumerate(chosen):
            (alone,) = Evaluator(tables, BLOCKING)([one])
            for field in ("memory", "time_s", "compute_s", "communication_s", "sources"):
                expected = getattr(alone.metrics, field)[0]
                assert np.allclose(getattr(together.metrics, field)[row], expected, rtol=1e-12), field
            assert together.collectives(row) == alone.collectives(0)
