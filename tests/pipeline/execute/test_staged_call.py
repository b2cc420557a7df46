"""The parts in which a pipeline runs the graph of a call; what they compute: ``tests/execute``."""

import random
from dataclasses import replace

import pytest

from tensoropt.capture import WithResults, capture
from tensoropt.engine.lowered_call import CallGraph
from tensoropt.errors import PlanError
from tensoropt.ops.layouts import REPLICATE
from tensoropt.pipeline.execute.staged_call import _parts
from tensoropt.pipeline.stages import departing_group
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.evaluating import results_by_rows
from tensoropt.sharding.groups import batch_inputs, group_operators
from tensoropt.verify.random_strategies import random_pipeline
from tests.execute.jobs import captured_model, spec


def call_and_plan(
    name: str, axes: tuple[int, ...] = (), seed: int = 0
) -> tuple[CallGraph, PipelinedStrategy]:
    """The call of a model for all that it returns, and a pipeline of two places."""
    plan = random_pipeline(captured_model(name).graph, (2, 2, *axes), "1f1b", random.Random(seed))
    model, args, kwargs = spec(name).build()
    graph = capture(WithResults(model), args, kwargs, mode="inference", compare=False).graph
    groups = group_operators(refine_graph(graph))
    names = {str(t.key): t.name for t in plan.graph.atoms.graph.parameters}
    planned = {
        t.name: names[key] for t in graph.parameters if (key := str(t.key).removeprefix("model.")) in names
    }
    by_rows = results_by_rows(groups)
    return CallGraph(groups, planned, frozenset(batch_inputs(graph)), by_rows), plan


def test_groups_run_where_their_parameters_are():
    call, plan = call_and_plan("looking_back")
    parts = _parts(plan, call, (1,))
    assert [part.place for part in parts] == [0, 1, 0]
    for part in parts:
        for tensor in part.stage.graph.atoms.graph.parameters:
            holders = {plan.place_of(stage) for stage in plan.holders(call.planned[tensor.name])}
            assert part.place in holders
    made = [name for part in parts for name in part.outputs]
    assert {*made, *call.source.inputs} >= {*call.source.outputs}
    # Nothing passes through a part that does not read it.
    for part in parts:
        reads = {name for group in part.stage.graph.groups for name in group.reads}
        assert {*part.stage.arriving} <= reads


def test_tensors_cross_in_the_shards_of_their_makers():
    cut = 0
    for seed in range(4):
        call, plan = call_and_plan("tagged", (2,), seed)
        layouts = {}
        for part in _parts(plan, call, (1, 2)):
            for name in part.stage.arriving:
                assert part.strategy.made[name] == layouts[name]
            for name in part.stage.departing:
                layout = part.strategy.configurations[departing_group(name)].layout(name)
                layouts[name] = layout
                assert layout[1] in (part.strategy.made[name][1], REPLICATE)
                cut += layout[1] >= 0
    assert cut


def test_parameters_of_different_stages_in_one_group_are_refused():
    call, plan = call_and_plan("tagged")
    (group,) = (group for group in call.groups.groups if "p_model_head_bias" in group.parameters)
    names = {call.planned[name]: name for name in call.planned}
    first = next(t.name for t in plan.parts[0].graph.atoms.graph.parameters if t.name in names)
    bias = group.parameters[-1]
    assert plan.holders(call.planned[bias]) != plan.holders(first)
    with pytest.raises(PlanError, match=rf"no stage of the plan has all parameters that {group.name} reads"):
        _parts(plan, replace(call, planned={**call.planned, bias: first}), (1,))
