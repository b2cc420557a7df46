"""Which copies may be gathered again, what a plan says of them, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.engine.engine import unsplit_strategy
from tensoropt.errors import PlanError
from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE
from tensoropt.pipeline.stages import Cutter
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.gathered_again import gatherable, is_gathered
from tensoropt.sharding.program import GatherAgain, Move, lower_program
from tensoropt.sharding.regions import find_regions, left_as_views
from tensoropt.sharding.strategy import Strategy
from tests.costs.models import gpt2, problem, three

MESH = (1, 2)


def tensor_parallel(build) -> Strategy:
    """Products split their outputs, all else its rows, so that products gather what they read."""
    graph = problem(build).graph
    plain = unsplit_strategy(graph)
    chosen = {}
    for group in graph.groups:
        labels = {str(s.label): s for s in group.strategies}
        outputs = labels.get("out_features") or labels.get("out_features.0") if group.parameters else None
        rows = labels.get("d0") or labels.get("batch") or labels.get("none")
        chosen[group.name] = Configuration(group, (group.unsplit, outputs or rows))
    made = {n: c.layout(n) for c in chosen.values() for n in c.group.writes}
    layouts = {
        name: next(chosen[g.name].layout(name) for g in graph.groups if name in g.reads)
        for name in graph.hubs
    }
    stored = {name: (layout[0], REPLICATE) for name, layout in plain.stored.items()}
    return Strategy(graph, MESH, chosen, {n: layouts[n] for n in graph.hubs if n in made}, stored)


@given(st.lists(st.sampled_from([REPLICATE, PARTIAL, PARTIAL_GRAD, 0, 1]), min_size=2, max_size=2))
def test_a_move_to_what_is_there_or_smaller_gathers_nothing(axes):
    atoms, mesh = ((4,), (6,)), (1, 2, 2)
    layout = (REPLICATE, *axes)
    assert not is_gathered(atoms, mesh, layout, layout)
    if PARTIAL in axes:
        assert not is_gathered(atoms, mesh, layout, (REPLICATE,) * 3)
    else:
        assert is_gathered(atoms, mesh, layout, (REPLICATE,) * 3) is any(code >= 0 for code in axes)


def test_neither_results_nor_what_others_view_is_gathered_again():
    graph = problem(gpt2).graph
    found = gatherable(graph)
    assert found
    assert found.isdisjoint(graph.atoms.graph.outputs)
    assert all(found.isdisjoint(left_as_views(group)) for group in graph.groups)
    assert gatherable(problem(gpt2, "inference").graph) == frozenset()


def test_what_leaves_a_stage_is_held_and_not_gathered_again():
    cutter = Cutter(problem(gpt2).graph)
    stage = cutter.stage(0, cutter.cuts[len(cutter.cuts) // 2])
    assert stage.departing
    found = gatherable(stage.graph)
    assert found
    assert found.isdisjoint(stage.departing)
    assert found < gatherable(cutter.graph)


def test_the_program_marks_readers_behind_the_move():
    strategy = tensor_parallel(three)
    assert strategy.gatherable
    name = min(strategy.gatherable)
    program = lower_program(replace(strategy, gathered_again=frozenset((name,))))
    moves = [n for n in program.nodes if isinstance(n, Move) and n.steps.gathered_again]
    assert [move.edge.tensor for move in moves] == [name]
    (mark,) = (n for n in program.nodes if isinstance(n, GatherAgain))
    assert mark.reads[name] in moves
    assert program.gathers
    assert not any(isinstance(n, GatherAgain) for n in lower_program(strategy).nodes)


def test_plans_say_it():
    strategy = tensor_parallel(three)
    again = replace(strategy, gathered_again=strategy.gatherable)
    data = again.to_data()
    assert data["gathered_again"] == sorted(strategy.gatherable)
    assert Strategy.from_data(json.loads(json.dumps(data)), strategy.graph).to_data() == data


def test_what_is_not_gathered_is_refused():
    strategy = tensor_parallel(three)
    data = strategy.to_data()
    (loss,) = strategy.graph.atoms.graph.outputs
    kept = min(gatherable(strategy.graph) - strategy.gatherable)
    for name, says in (
        (loss, f"gathers {loss} again in backward; this is possible only for"),
        (kept, f"gathers {kept} again in backward, but no reader gathers it"),
        ("linear_77", "which this model does not make"),
    ):
        with pytest.raises(PlanError, match=says):
            Strategy.from_data({**data, "gathered_again": [name]}, strategy.graph)


def test_what_runs_again_is_not_gathered_again_as_well():
    strategy = tensor_parallel(gpt2)
    inside = {name for region in find_regions(strategy.graph) for name in region.groups}
    makers = {n: g.name for g in strategy.graph.groups for n in g.writes}
    name = min(n for n in strategy.gatherable if makers[n] in inside)
    recomputed = replace(strategy, recomputed=find_regions(strategy.graph))
    assert name not in recomputed.gatherable
    with pytest.raises(
        PlanError, match=f"gathers {name} again in backward, and also recomputes {makers[name]},"
    ):
        Strategy.from_data({**recomputed.to_data(), "gathered_again": [name]}, strategy.graph)
