"""Where a placed plan puts the graph of a call; what it computes: ``tests/execute``."""

from __future__ import annotations

import random

from tensoropt.placement.execute.placed_call import _placed_like
from tensoropt.placement.graph import OperatorKind
from tensoropt.placement.program import schedule_of
from tests.execute.jobs import captured_model
from tests.pipeline.execute.test_staged_call import call_and_plan
from tests.placement.execute.random_placed import random_placed


def test_parameters_stay_on_their_devices() -> None:
    """Also those of cut operators, whose pieces got them from devices of their own."""
    call, _ = call_and_plan("looking_back")
    graph, apart = captured_model("looking_back").graph, 0
    for seed in range(8):
        plan = random_placed(graph, 3, random.Random(seed), 0.6)
        placed = _placed_like(plan, call)
        schedule_of(placed)  # refuses what is in no order
        for name, planned in call.planned.items():
            assert placed.holders(name) == plan.holders(planned)[:1]
        users = dict.fromkeys(call.planned, 0)
        for group in call.groups.groups:
            for name in {*group.parameters, *group.shared} & users.keys():
                users[name] += 1
        variables = {
            op.parameters[0] for op in placed.placed_graph.operators if op.kind is OperatorKind.VARIABLE
        }
        apart += len([name for name in variables if users.get(name) == 1])
    assert apart
