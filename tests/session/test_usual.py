"""The usual strategies, priced before anything is searched."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest

from tensoropt import ConstraintError, api, explore, load_model
from tensoropt.exploration.answer import answer
from tensoropt.exploration.exploration import Exploration, InterruptedExplorationError
from tensoropt.session.quick_plans import _Asking
from tensoropt.session.usual import USUAL_NOTE
from tests.session.test_interrupted import interrupted_after

CLUSTER = "dgx-h100[2]"
SEARCHED = {"epsilon": 0.2, "max_points": 8, "placements": "never", "pipelines": "never"}


@cache
def found(model: str, **chosen: Any) -> Exploration:
    return explore(load_model(f"zoo:{model}"), cluster=CLUSTER, micro_batches=(1, 2), **chosen)


@pytest.mark.parametrize("model", ["mlp", pytest.param("gpt2-tiny", marks=pytest.mark.slow)])
def test_usual_strategies_cost_what_they_cost_beside_a_search(model):
    first, whole = found(model, first=True), found(model, **SEARCHED)
    alone, beside = (answer(exploration, None).baselines for exploration in (first, whole))
    usual = ("data_parallel", "zero", "megatron")
    beside = tuple(one for one in beside if one.point.planner in usual)
    assert [one.title for one in alone] == [one.title for one in beside]
    for one, other in zip(alone, beside, strict=True):
        assert one.point.time_s == pytest.approx(other.point.time_s, rel=0.02)
        assert one.needs_bytes == pytest.approx(other.needs_bytes, rel=0.02)
    assert answer(first, None).sentence().endswith(" more buys nothing.")
    assert USUAL_NOTE in first.report["notes"]
    assert USUAL_NOTE not in whole.report["notes"]
    assert {p.planner for p in first.all_points} <= {"data_parallel", "zero", "megatron"}


def test_who_interrupts_the_first_answer_ends_the_search(monkeypatch):
    monkeypatch.setattr(api, "_FEW_GROUPS", 1)
    monkeypatch.setattr(_Asking, "ask", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    watching = Mock(spec=["first"])
    with pytest.raises(KeyboardInterrupt):
        explore(load_model("zoo:mlp"), cluster=CLUSTER, progress=watching, **SEARCHED)
    watching.first.assert_not_called()


def test_a_frontier_has_the_plans_of_the_first_answer(monkeypatch):
    """Priced once: the planners are not asked again, and none of their plans beats the frontier."""
    monkeypatch.setattr(api, "_FEW_GROUPS", 1)
    ask = Mock(wraps=_Asking.ask)
    monkeypatch.setattr(_Asking, "ask", lambda *given: ask(*given))  # a method
    whole = explore(load_model("zoo:mlp"), cluster=CLUSTER, micro_batches=(1, 2), **SEARCHED)
    asked = [call.args[1].name for call in ask.call_args_list]
    assert len(asked) == len(set(asked))
    first = found("mlp", first=True)
    own = {(p.planner, p.memory_bytes): p for p in whole.others}
    for point in first.others:
        same = own[point.planner, point.memory_bytes]
        assert same.time_s == point.time_s
        plans = (whole.plan(same), first.plan(point))
        told = [(plan.operators, plan.hubs, plan.parameters, plan.recomputed) for plan in plans]
        assert told[0] == told[1]
        assert min(p.time_s for p in whole.points if p.memory_bytes <= point.memory_bytes) <= point.time_s


def test_a_pinned_pipeline_is_no_usual_strategy():
    with pytest.raises(ConstraintError, match="leave out --first or the pin"):
        explore(load_model("zoo:mlp"), cluster=CLUSTER, first=True, constraints={"pipeline": {"stages": 2}})


def test_who_watches_is_answered_before_the_search(monkeypatch, empty_store):
    monkeypatch.setattr(api, "_FEW_GROUPS", 1)
    watching = Mock(spec=["first"])
    monkeypatch.setattr(api, "search", interrupted_after(1, api.search))
    asked = {"progress": watching, "store": empty_store, **SEARCHED}
    with pytest.raises(InterruptedExplorationError) as end:
        explore(load_model("zoo:mlp"), cluster=CLUSTER, **asked)
    assert "a step" in watching.first.call_args.args[0]
    assert "not searched: all but usual strategies" in str(end.value)
    assert answer(end.value.exploration, None).row is not None
