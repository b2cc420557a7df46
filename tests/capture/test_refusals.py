"""Models and inputs that cannot be captured are refused before anything runs, by name."""

from __future__ import annotations

import io
import logging

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.errors import CaptureError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x, batch=None, *, scale=1.0):
        return self.a(x if batch is None else batch["x"]).sum() * scale


@pytest.mark.parametrize(
    ("args", "kwargs", "pattern"),
    [
        ((torch.ones(0, 4),), {}, r"input `x` of shape \(0, 4\) is empty"),
        ((torch.ones(2, 4), {"x": torch.ones(0, 4)}), {}, r"input `batch\['x'\]` of shape \(0, 4\) is empty"),
        ((torch.ones(2, 4),), {"scale": torch.ones(0)}, r"input `scale` of shape \(0,\) is empty"),
        ((torch.eye(4).to_sparse(),), {}, r"input `x` is a sparse tensor.*to_dense"),
        ((torch.eye(4).to_sparse_csr(),), {}, r"input `x` is a sparse tensor.*to_dense"),
        ((torch.nested.nested_tensor([torch.ones(2, 4)], layout=torch.jagged),), {}, "`x` is a nested.*pad"),
    ],
)
def test_inputs_that_no_plan_can_hold_are_named(args, kwargs, pattern):
    with pytest.raises(CaptureError, match=pattern):
        capture(Net(), args, kwargs)


def _with(name, value):
    net = Net()
    setattr(net, name, value)
    return net


def _sparse_buffer():
    net = Net()
    net.register_buffer("graph", torch.eye(4).to_sparse())
    return net


def _held_in_parts():
    net = Net()
    net.a.weight.ds_id = 0
    return net


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: nn.DataParallel(Net()), r"the model is wrapped in DataParallel.*\.module"),
        (lambda: _with("b", nn.DataParallel(Net())), r"`b` is wrapped in DataParallel"),
        (lambda: _with("b", nn.LazyLinear(4)), r"`b\.weight` has no shape yet.*once"),
        (lambda: _with("b", torch.jit.script(nn.Linear(4, 4))), r"`b` was made by torch\.jit"),
        (_sparse_buffer, r"`graph` is a sparse tensor.*index_select"),
        (_held_in_parts, r"`a\.weight` is held in parts by DeepSpeed"),
    ],
)
def test_models_that_are_wrapped_or_unfinished_are_named(make, pattern):
    with pytest.raises(CaptureError, match=pattern):
        capture(make(), (torch.ones(2, 4),))


def test_pytorchs_log_is_quiet_during_a_capture_only():
    shown = io.StringIO()
    handler = logging.StreamHandler(shown)

    class Compiled(Net):
        def forward(self, x):
            logging.getLogger("torch.fx").error("a graph")
            return super().forward(x)

    logging.getLogger("torch.fx").addHandler(handler)
    try:
        capture(Compiled(), (torch.ones(2, 4),))
        assert shown.getvalue() == ""
        logging.getLogger("torch.fx").error("afterwards")
        assert shown.getvalue() == "afterwards\n"
    finally:
        logging.getLogger("torch.fx").removeHandler(handler)
