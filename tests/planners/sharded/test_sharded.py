"""The sharded methods, each on a case that can be followed by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tensoropt.costs.restrictions import Restriction
from tensoropt.evaluation.evaluate import space_of
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.registry import planner
from tensoropt.planners.results import simulated_points
from tensoropt.planners.sharded import flexflow, zero
from tensoropt.planners.sharded.common.restricted import batch_labels
from tensoropt.planners.sharded.megatron import inner_labels
from tensoropt.planners.sharded.tofu import _WHOLE
from tensoropt.planners.tables import TableSpace
from tensoropt.planners.task import PlanningTask
from tensoropt.sharding.configurations import enumerate_configurations
from tensoropt.sharding.groups import Group
from tensoropt.simulate.recording import MEMORY_KINDS
from tests.costs.models import tables_of
from tests.planners.problems import small

TWO, GPT = ("two layers", ((2,),), (1,)), ("gpt2", ((2,),), (1,))
FOUR = ("gpt2", ((4,), (2, 2)), (1,))


def test_data_parallelism_splits_the_batch_everywhere_and_reduces_gradients_once():
    (plan,) = planner("data_parallel")(small(*TWO), None, 0)
    batch = batch_labels(small(*TWO).prepared.graph)
    assert {name: set(op.axes.values()) for name, op in plan.operators.items()} == {
        name: {batch[name]} for name in plan.operators
    }
    assert {p.stored for p in plan.parameters.values()} == {("R/P", "R/P")}
    # 24·32 + 32·8 float32 gradients in one bucket; the mean loss leaves as a sum over ranks
    reduced = [c for c in plan.predicted.collectives if c.bytes == 4 * (24 * 32 + 32 * 8)]
    assert [(c.kind, c.count) for c in reduced] == [("all_reduce", 1)]
    assert all(c.kind == "all_reduce" for c in plan.predicted.collectives)


def test_zero_stores_a_share_and_gathers():
    """Two matrices of 768 and 256 elements on two devices, float32, Adam."""
    (whole,) = planner("data_parallel")(small(*TWO), None, 0)
    found = planner("zero")(small(*TWO), None, 0)
    leanest = found[0]
    assert leanest.settings["notes"] == ["stage 3"]
    for kind in ("parameters", "gradients", "optimizer"):
        assert leanest.predicted.memory[kind] == whole.predicted.memory[kind] / 2
    assert all(any(s.startswith("S") for s in p.stored) for p in leanest.parameters.values())
    assert all(p.stored[0] != "held" for p in leanest.parameters.values())


def test_zero_2_holds_what_it_gathered_and_shards_the_rest():
    question = small("two layers", ((2,),), (2,))
    (whole,) = planner("data_parallel")(question, None, 0)
    plans = {s.notes[0]: s for s in zero.select(question, None, 0)}
    assert set(plans) == {"stage 1", "stage 2", "stage 3"}
    points = dict(zip(plans, simulated_points(question, "zero", list(plans.values())), strict=True))
    memory = {n: dict(zip(MEMORY_KINDS, p.memory, strict=True)) for n, p in points.items()}
    size = whole.predicted.memory["parameters"]
    assert memory["stage 3"]["parameters"] == size / 2
    assert memory["stage 1"]["parameters"] == memory["stage 2"]["parameters"] == size + size / 2
    assert memory["stage 2"]["gradients"] == memory["stage 3"]["gradients"] == size / 2
    assert memory["stage 1"]["gradients"] == size + size / 2
    state = whole.predicted.memory["optimizer"]
    assert {m["optimizer"] for m in memory.values()} == {state / 2}
    # two micro-batches: gathered once per step, and in stage 3 in each forward and again where it is needed
    sent = {
        n: {(k, count) for k, _, _, count in p.collectives if k != "all_reduce"} for n, p in points.items()
    }
    assert sent["stage 1"] == {("all_gather", 1), ("reduce_scatter", 1)}
    assert sent["stage 2"] == {("all_gather", 1), ("reduce_scatter", 2)}
    assert sent["stage 3"] == {("all_gather", 2), ("all_gather", 4), ("reduce_scatter", 2)}


def test_with_one_micro_batch_no_gradient_waits():
    notes = [s.notes[0] for s in zero.select(small(*TWO), None, 0)]
    assert sorted(set(notes)) == ["stage 2", "stage 3"]


def test_megatron_makes_columns_then_rows():
    question = small(*FOUR)
    graph = question.prepared.graph
    inner = inner_labels(graph, batch_labels(graph))
    matrices = [g for g in graph.groups if any("addmm" in op.target for op in g.operators)]
    kinds = ["column" if all("out_features" in x for x in inner[g.name]) else "row" for g in matrices]
    assert kinds == ["column", "row"] * (len(matrices) // 2)
    attention = [g.name for g in graph.groups if "attention" in g.anchor.target]
    assert all(label.startswith("heads") for name in attention for label in inner[name])
    plans = planner("megatron")(question, None, 0)
    assert plans
    for plan in plans:
        inside = plan.mesh.names[-1]
        assert plan.operators[attention[0]].axes[inside].startswith("heads")


def test_megatron_refuses_what_has_no_heads():
    with pytest.raises(UnsuitableError, match="attention heads"):
        planner("megatron")(small(*TWO), None, 0)


def test_tofu_splits_everything_it_can_step_by_step():
    (plan,) = planner("tofu")(small(*FOUR), None, 0)
    assert plan.mesh.shape == (2, 2)
    split = [op for op in plan.operators.values() if not set(op.axes.values()) & _WHOLE]
    assert len(split) >= len(plan.operators) // 2
    ddp = planner("data_parallel")(small(*FOUR), None, 0)[0]
    assert plan.predicted.memory["parameters"] < 0.7 * ddp.predicted.memory["parameters"]


def only_split_on_both(question: PlanningTask, group: Group) -> TableSpace:
    """The 2x2 space where a group's configurations are those that split it on both axes, as where it is
    pinned on all axes, or where a mesh combines what others use."""
    prepared, space = question.prepared, question.spaces[1]
    found = enumerate_configurations(prepared.graph.atoms, group, (1, 2, 2), prepared.micro[group.name])
    kept = tuple(i for i, c in enumerate(found) if all(str(s.label) not in _WHOLE for s in c.strategies[1:]))
    assert 0 < len(kept) < len(found)
    tables = tables_of(prepared, (1, 2, 2), restriction=Restriction(kept={group.name: kept}))
    return TableSpace(space.mesh, tables, space_of(prepared, space.mesh, tables, ()))


def test_tofu_takes_a_coarser_mesh_where_a_split_of_the_first_axis_alone_is_not_allowed():
    question = small("two layers", ((4,), (2, 2)), (1,))
    (plan,) = planner("tofu")(question, None, 0)
    assert plan.mesh.shape == (2, 2)
    restricted = only_split_on_both(question, question.prepared.graph.groups[0])
    (plan,) = planner("tofu")(replace(question, spaces=(question.spaces[0], restricted)), None, 0)
    assert plan.mesh.shape == (4,)
    with pytest.raises(UnsuitableError, match="no mesh of this cluster"):
        planner("tofu")(replace(question, spaces=(restricted,)), None, 0)


@pytest.mark.parametrize(("seconds", "late"), [(60.0, False), (0.0, True)])
def test_a_walk_never_ends_worse_than_it_started_and_says_when_its_time_is_over(seconds, late):
    chain = flexflow._Chain(small(*GPT), 0, None)
    start = chain.data_parallel()
    assert start is not None
    cost, choice, was_late = flexflow._metropolis_hastings(chain, start, 25, random.Random(0), seconds)
    assert was_late is late
    assert chain.cost(choice) == cost <= chain.cost(start)
