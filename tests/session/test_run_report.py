"""What is said of figures that cannot be right.

An error of PyTorch's becomes a refusal that names operator and line; our own stays what it is.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.errors import InfeasibleError, UnsupportedError
from tensoropt.ops.families.routed_experts import EXPERTS
from tensoropt.session.run_report import _expected_rows, failures_named, implausible
from tests.models import Call


def test_the_operator_in_hand_is_named_with_its_line():
    model = Call(lambda module, x: module.body(x).sum(), body=nn.Linear(4, 4))
    graph = capture(model, (torch.ones(2, 4),)).graph

    def run(op):
        return torch.ones(2, 3) @ torch.ones(2, 3)

    words = r"^Net is not supported: .* aten\.linear\.default of `body` \(.*"
    with pytest.raises(UnsupportedError, match=words), failures_named("Net", graph):
        run(graph.operators[0])


@pytest.mark.parametrize("error", [KeyError("x"), AssertionError("y"), InfeasibleError("z"), MemoryError()])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as found, failures_named("Net"):
        raise error
    assert found.value is error


def points(memory_bytes: float, time_s: float):
    return [SimpleNamespace(memory_bytes=memory_bytes, time_s=time_s)]


def test_plans_that_fit_nowhere_and_steps_of_hours_are_noted():
    def found(needs: float, time_s: float) -> Any:
        made = points(needs, time_s)
        return SimpleNamespace(points=made, needs=np.array([needs]), device_bytes=80 * 2.0**30)

    assert not list(implausible(found(80e9, 3600.0)))
    (note,) = implausible(found(90e9, 1.0))
    assert note.startswith("no plan fits a device: the leanest needs 83.8 GiB, and a device has 80 GiB")
    (note,) = implausible(found(1e9, 6_224_548.0))
    assert note.startswith("the fastest step takes 1,729.0 hours")


@pytest.mark.parametrize(("imbalance", "share"), [
    (1.0, "as many rows as the mean (--expert-imbalance 1)"),
    (1.5, "1.5 times as many rows as the mean (--expert-imbalance 1.5)"),
    (3.0, "3 times as many rows as the mean, or all of them on fewer than 3 ranks"),
    (4.0, "all rows (--expert-imbalance 4)"),
    (100.0, "all rows (--expert-imbalance 100)"),
])  # fmt: skip
def test_no_rank_computes_more_than_all_rows_of_experts(imbalance, share):
    layer = SimpleNamespace(target=EXPERTS)
    (note,) = _expected_rows(SimpleNamespace(operators=[layer], expert_imbalance=imbalance), 4)
    assert f"the busiest rank is expected to compute {share}" in note
    assert not list(_expected_rows(SimpleNamespace(operators=[], expert_imbalance=imbalance), 4))
