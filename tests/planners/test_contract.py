"""What every planner must keep, whatever it does inside."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

import pytest

from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.pipeline.points import pipelined_strategy
from tensoropt.placement.points import placed_strategy
from tensoropt.plan.plan import load_plan
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.placed import cut_search, local_search, netsplit, pesto, pesto_extended
from tensoropt.planners.placed.cut_search import CutSearch
from tensoropt.planners.placed.exact import solver as exact
from tensoropt.planners.placed.local_search import LocalSearch
from tensoropt.planners.registry import ENTRIES, planner
from tensoropt.planners.sharded import flexflow as flexflow_module
from tensoropt.units import format_bytes
from tests.planners.problems import frontier, searched, small

CASES = [("two layers", ((2,),), (1,)), ("gpt2", ((2,),), (1,)), ("gpt2", ((4,), (2, 2)), (1, 2))]
IDS = ["layers 2", "gpt2 2", "gpt2 4 and 2x2"]
PLACED = [name for name, entry in ENTRIES.items() if entry.kind == "placed"]
SHARDED = [name for name, entry in ENTRIES.items() if entry.kind == "sharded"]


@pytest.fixture(autouse=True)
def short_walks(monkeypatch):
    monkeypatch.setattr(flexflow_module, "_PROPOSALS", 12)
    monkeypatch.setattr(exact, "_EFFORT_PER_SECOND", 2e-3)  # not seconds, which depend on the machine
    for module in (netsplit, pesto, pesto_extended):
        monkeypatch.setattr(module, "DEFAULTS", replace(module.DEFAULTS, most_blocks=12))
    monkeypatch.setattr(cut_search, "DEFAULTS", CutSearch(seconds=1.0))
    monkeypatch.setattr(local_search, "DEFAULTS", LocalSearch(seconds=1.0))


def plans(name: str, question, limit=None, seed: int = 0):
    """A planner's plans; none when it says that it cannot treat the problem."""
    try:
        return planner(name)(question, limit, seed)
    except UnsuitableError:
        return ()
    except InfeasibleError as refusal:
        if "which have no such rule" not in str(refusal):  # two layers, one too heavy for Pesto's balance
            raise
        return ()


@cache
def answered(name: str, case):
    """The plans of a planner for a problem, without a limit: asked for once."""
    return plans(name, small(*case))


def check_executable(plan, graph) -> None:
    """The plan describes something of this model that an executor can run."""
    if plan.stages is not None and plan.stages.schedule:
        assert pipelined_strategy(plan, graph).devices == prod(plan.mesh.shape)
    elif plan.stages is None:
        plan.strategy(graph)
    else:
        found = placed_strategy(plan, graph)
        assert len(found.placement.device) == len(plan.operators)
        assert found.micro_batches == plan.micro_batches


@pytest.mark.parametrize("case", [*CASES[:2], pytest.param(CASES[2], marks=pytest.mark.slow)], ids=IDS)
@pytest.mark.parametrize("name", ENTRIES)
def test_plans_are_feasible_and_load_again(name, case, tmp_path):
    question = small(*case)
    found = answered(name, case)
    assert found or name in ("megatron", "pesto")
    memory = [p.predicted.memory_bytes for p in found]
    assert memory == sorted(memory)
    # Published methods keep what they gather.
    assert not any(part.gathered_again for plan in found for part in (plan, *plan.info.stages))
    for number, plan in enumerate(found[:3]):
        assert plan.planner == name
        check_executable(plan, question.prepared.graph)
        plan.save(tmp_path / f"{number}.json")
        assert load_plan(tmp_path / f"{number}.json") == plan


@pytest.mark.parametrize("name", ENTRIES)
def test_one_seed_gives_one_answer(name):
    first, second = answered(name, CASES[1]), plans(name, small(*CASES[1]))
    assert [(p.operators, p.hubs, p.parameters, p.stages) for p in first] == [
        (p.operators, p.hubs, p.parameters, p.stages) for p in second
    ]


@pytest.mark.parametrize("name", ENTRIES)
def test_a_memory_limit_is_kept_under_the_simulator_or_refused(name):
    question = small(*CASES[1])
    points = frontier(*CASES[1])
    limit = points[len(points) // 4].memory_bytes
    try:
        found = plans(name, question, limit)
    except InfeasibleError:
        return
    assert all(p.predicted.memory_bytes <= limit for p in found)
    assert len(found) <= 1


@pytest.mark.parametrize("name", ENTRIES)
def test_an_impossible_limit_is_refused(name):
    question = small(*CASES[1])
    with pytest.raises(TensorOptError, match=r"finds no plan within 1 B|no solution within"):
        planner(name)(question, 1.0, 0)


@pytest.mark.parametrize("name", PLACED)
def test_a_refusal_names_the_limit_that_was_asked_for(name):
    """Not what the model's constants leave of it."""
    question = small(*CASES[1])
    beside = sum(question.placing().problem.devices.terms.values())
    assert beside > 0
    limit = beside + 50 * 1024
    with pytest.raises(InfeasibleError, match=rf"within {format_bytes(limit)}\b"):
        planner(name)(question, limit, 0)
    with pytest.raises(
        InfeasibleError, match=rf"within 1 B: {beside:.0f} B of every device are taken before any tensor"
    ):
        planner(name)(question, 1.0, 0)


@pytest.mark.parametrize("name", SHARDED)
def test_nobody_beats_the_frontier_in_what_is_added_up(name):
    case = CASES[1]
    best = searched(*case)  # the simulator may find the leanest of them worse than another
    for plan in answered(name, case):
        mine = plan.predicted
        within = [p for p in best if p.additive_memory_bytes <= mine.additive_memory_bytes * (1 + 1e-9)]
        assert within
        fastest = min(p.additive_time_s for p in within)
        assert mine.additive_time_s >= fastest * (1 - 1e-9)


@pytest.mark.parametrize("name", PLACED)
def test_placing_planners_run_every_count_or_say_why_not(name):
    question = small("gpt2", ((2,),), (1, 2))
    try:
        found = planner(name).points(question, None, 0)
    except UnsuitableError:  # Pesto, where it finds no balance
        assert planner(name).one_batch
        return
    counts = {question.base.spaces[each.point.space].micro_batches for each in found}
    notes = {note for each in found for note in each.notes}
    told = {note for note in notes if note.startswith("runs one micro-batch only: ")}
    if planner(name).one_batch:
        assert counts == {1}
        assert told
    else:
        assert counts <= {1, 2}
        assert not told
        # What is kept of both is there together, but what passes is half as large.
        assert 2 in counts


@pytest.mark.parametrize("name", [name for name in PLACED if planner(name).one_batch])
def test_micro_batches_that_a_planner_cannot_have_are_refused(name):
    question = replace(small("gpt2", ((2,),), (1, 2)), placed_counts=(2,))
    with pytest.raises(UnsuitableError, match=f"{name} runs one micro-batch only: .* asked for 2, allow 1"):
        planner(name)(question, None, 0)
