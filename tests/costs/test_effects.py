"""Moves of all pairs of layouts at once against the effects of each."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tensoropt.costs.effects import PARAMETERS, READ, READ_BACK, Effects, MoveEffects, additive
from tensoropt.costs.group_effects import Choice, GroupEffects
from tensoropt.costs.prices import Prices
from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE
from tensoropt.profiling.overheads import Overheads
from tensoropt.profiling.workload import workload
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.groups import is_one_reduction
from tests.costs.models import ToyCommunication, ToyCompute, facts_of, gates, problem, three
from tests.simulate.test_simulator import Hand, PerByte

OVERHEADS = Overheads(copy_s_per_byte=1.3e-9, call_s=1.7e-6, pass_s=3.1e-7)


@pytest.mark.parametrize("mesh", [(1, 2), (3, 2, 2)], ids=str)
@pytest.mark.parametrize(
    ("learns", "beside"), [(True, None), (False, None), (True, False), (True, True)], ids=str
)
def test_all_pairs_at_once_cost_what_each_does(mesh, learns, beside):
    """Also with products of weights' gradients, beside which gradients are reduced or not."""
    graph = problem(gates).graph
    more = {"beside": bool(beside), "slower_beside": 0.25}
    prices = Prices(graph, mesh, ToyCompute(), ToyCommunication(), "adam", OVERHEADS, **more)
    effects = MoveEffects(prices)
    name = next(n for n in graph.hubs if len(graph.atoms.atom_sizes(n)) >= 2)
    if not learns:
        effects.training = False
    codes = (0, 1, REPLICATE, PARTIAL_GRAD, PARTIAL)
    layouts = [(REPLICATE, *rest) for rest in itertools.product(codes, repeat=len(mesh) - 1)]
    products_s = None if beside is None else [1e-6 * number for number in range(len(layouts))]
    forward_s, back_s = effects.moving_s(name, layouts, layouts[::-1], products_s)
    passed = 0
    for (i, source), (j, target) in itertools.product(enumerate(layouts), enumerate(layouts[::-1])):
        there, back = (effects.moved(when, name, source, target) for when in (READ, READ_BACK))
        if products_s is not None and is_one_reduction(effects.steps(name, source, target)[1], mesh):
            back = replace(back, beside_work_s=products_s[j])
        assert forward_s[i, j] * mesh[0] == additive(Effects((there,)), prices).communication
        assert back_s[i, j] * mesh[0] == additive(Effects((back,)), prices).communication
        passed += there.passing.device_s > 0
    assert np.any(forward_s > 0)
    assert bool(passed) == learns == bool(np.any(back_s))


def test_what_a_second_forward_gathers_is_alive_in_all_of_it():
    """A product and its ReLU, of 8 rows per rank: beside the weight and what is kept, the product is
    alive, also while the ReLU reads no weight."""
    graph, name = problem(three).graph, "p_model_first_weight"
    group = graph.groups[1]
    along = next(s for s in group.strategies if str(s.label) == "d0")
    configuration = Configuration(group, (group.unsplit, along))
    work = workload(graph, configuration, (1, 2))
    effects = GroupEffects(Prices(graph, (1, 2), Hand(), PerByte(0.0), "sgd"))
    choice = Choice(configuration, work, facts_of(work), {name: (-1, 0)}, again=True)
    weight, rows = 24 * 32 * 4, 8 * 32 * 4
    again = [e for e in effects.group(choice).effects if e.when.phase == "again" and e.begins]
    assert [(e.begins[0].bytes, e.workspace_bytes) for e in again] == [(weight, rows), (rows, rows)]
    # The gradient is there until its shard is.
    back = [e.workspace_bytes for e in effects.group(choice).effects if e.when == PARAMETERS]
    assert max(back) == weight + weight // 2
