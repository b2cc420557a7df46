"""Calls as data: what comes back has the shapes that went in."""

from __future__ import annotations

import json

import pytest
import torch

from tensoropt.errors import PlanError
from tensoropt.plan.call import describe_call, example_call


def test_shapes_and_numbers_come_back() -> None:
    args = (torch.randn(4, 3), (torch.arange(4), None), [1, 2.5])
    kwargs = {"labels": torch.ones(4, dtype=torch.int64), "options": {"scale": True}}
    described = json.loads(json.dumps(describe_call(args, kwargs)))
    again, named = example_call(described)
    assert again[0].shape == (4, 3)
    assert again[0].dtype == torch.float32
    assert isinstance(again[1], tuple)
    assert again[1][0].dtype == torch.int64
    assert again[1][1] is None
    assert again[2] == [1, 2.5]
    assert named["labels"].shape == (4,)
    assert named["options"] == {"scale": True}


def test_what_json_cannot_hold_is_not_described() -> None:
    assert describe_call((object(),), {}) is None


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"args": []},
        {"args": 3, "kwargs": {}},
        {"args": [{"tensor": [2], "dtype": "float99"}], "kwargs": {}},
    ],
)
def test_a_damaged_description_is_refused(data: object) -> None:
    with pytest.raises(PlanError, match="does not say readably how the model is called"):
        example_call(data)
