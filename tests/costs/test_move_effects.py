"""Moves of all pairs of layouts at once against the effects of each."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tensoropt.costs.effects import READ, READ_BACK, Effects, additive
from tensoropt.costs.move_effects import MoveEffects
from tensoropt.costs.prices import Prices
from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE
from tensoropt.profiling.overheads import Overheads
from tests.costs.models import ToyCommunication, ToyCompute, gates, problem

OVERHEADS = Overheads(copy_s_per_byte=1.3e-9, call_s=1.7e-6, pass_s=3.1e-7)


@pytest.mark.parametrize("mesh", [(1, 2), (3, 2, 2)], ids=str)
@pytest.mark.parametrize("learns", [True, False])
def test_all_pairs_at_once_cost_what_each_does(mesh, learns):
    graph = problem(gates).graph
    prices = Prices(graph, mesh, ToyCompute(), ToyCommunication(), "adam", OVERHEADS)
    effects = MoveEffects(prices)
    name = next(n for n in graph.hubs if len(graph.atoms.atom_sizes(n)) >= 2)
    if not learns:
        effects.training = False
    codes = (0, 1, REPLICATE, PARTIAL_GRAD, PARTIAL)
    layouts = [(REPLICATE, *rest) for rest in itertools.product(codes, repeat=len(mesh) - 1)]

    forward_s, back_s = effects.moving_s(name, layouts, layouts[::-1])

    passed = 0
    for (i, source), (j, target) in itertools.product(enumerate(layouts), enumerate(layouts[::-1])):
        there, back = effects.there_and_back(name, source, target, READ, READ_BACK)
        assert forward_s[i, j] * mesh[0] == additive(Effects((there,)), prices).communication
        assert back_s[i, j] * mesh[0] == additive(Effects((back,)), prices).communication
        passed += there.passing.device_s > 0
    assert np.any(forward_s > 0)
    assert bool(passed) == learns == bool(np.any(back_s))
