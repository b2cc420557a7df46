"""What a plan says of its model's call and of what runs where."""

import json

import pytest
import torch

from tensoropt.errors import PlanError
from tensoropt.plan.plan import describe_call, example_call
from tests.plan.explorations import small_exploration


def test_shapes_and_numbers_come_back():
    args = (torch.randn(4, 3), (torch.arange(4), None), [1, 2.5])
    kwargs = {"labels": torch.ones(4, dtype=torch.int64), "options": {"scale": True}}
    again, named = example_call(json.loads(json.dumps(describe_call(args, kwargs))))
    assert again[0].shape == (4, 3)
    assert again[0].dtype == torch.float32
    assert isinstance(again[1], tuple)
    assert again[1][0].dtype == torch.int64
    assert again[1][1] is None
    assert again[2] == [1, 2.5]
    assert named["labels"].shape == (4,)
    assert named["options"] == {"scale": True}


def test_what_json_cannot_hold_is_not_described():
    assert describe_call((object(),), {}) is None


@pytest.mark.parametrize("data", [
    {},
    {"args": []},
    {"args": 3, "kwargs": {}},
    {"args": [{"tensor": [2], "dtype": "float99"}], "kwargs": {}},
])  # fmt: skip
def test_a_damaged_description_is_refused(data):
    with pytest.raises(PlanError, match="example call cannot be read"):
        example_call(data)


def test_a_plan_says_what_runs_where():
    plan = small_exploration().plan(0)
    data = plan.strategy_data()
    assert data["mesh"] == [4, 2]
    assert data["groups"] == {"linear": ["rows", "rows"], "loss": ["rows", "rows"]}
    assert data["hubs"] == {"hidden": ["R", "S(0)"]}
    assert data["stored"] == {"p_weight": ["R", "S(0)"], "p_tied": ["R", "R"]}
    assert (plan.devices, plan.predicted.collectives[0].kind) == (2, "all_reduce")
