"""Models and inputs that cannot be captured are refused before anything runs, by name.

Hooks on gradients are refused by name; those of forward are traced.
"""

import io
import logging

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules.module import register_module_full_backward_hook

from tensoropt.capture import capture
from tensoropt.errors import CaptureError
from tests.models import Call
from tests.situations import gradients


def test_hooks_of_backward_mean_nothing_without_one():
    assert capture(*gradients.build_tensor_hook(), mode="inference").graph.operators


def test_hooks_of_all_modules_are_found():
    handle = register_module_full_backward_hook(lambda module, inner, outer: None)
    try:
        with pytest.raises(CaptureError, match=r"backward runs the hook .*test_refusals\.py"):
            capture(nn.Linear(4, 4), (torch.randn(2, 4),), loss=torch.sum)
    finally:
        handle.remove()


def seen(grads):
    """What a person's hook does."""


@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize(
    "register", [register_multi_grad_hook, torch.autograd.graph.register_multi_grad_hook]
)
def test_a_hook_on_several_tensors_is_named_as_it_was_written(register, mode):
    def forward(m, x):
        one, two = m.layer(x), m.layer(x * 2)
        register_multi_grad_hook((one, two), seen, mode=mode)
        return (one * two).sum()

    with pytest.raises(CaptureError, match=r"backward runs the hook seen \(.*test_refusals\.py:\d+\)"):
        capture(Call(forward, layer=nn.Linear(4, 4)), (torch.randn(2, 4),))


def test_hooks_of_forward_and_parametrizations_are_traced():
    graph = capture(*gradients.build_forward_hooks()).graph
    assert "aten.clamp.default" in {op.target for op in graph.operators}
    assert not graph.notes


def test_what_changes_no_gradient_is_no_hook():
    """A checkpoint's hooks, PyTorch's own for what backward keeps, and a Function's backward."""

    def forward(m, x):
        x = torch.utils.checkpoint.checkpoint(m.layer, x, use_reentrant=False)
        with torch.autograd.graph.save_on_cpu():
            x = Halved.apply(x.tanh())
        x.retain_grad()
        return x.square().mean()

    notes = capture(Call(forward, layer=nn.Linear(4, 4)), (torch.randn(2, 4),)).graph.notes
    assert [note for note in notes if "checkpointing" not in note] == []


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x, batch=None, *, scale=1.0):
        return self.a(x if batch is None else batch["x"]).sum() * scale


@pytest.mark.parametrize(
    ("args", "kwargs", "pattern"),
    [
        ((torch.ones(2, 4), {"x": torch.ones(0, 4)}), {}, r"input `batch\['x'\]` of shape \(0, 4\) is empty"),
        ((torch.ones(2, 4),), {"scale": torch.ones(0)}, r"input `scale` of shape \(0,\) is empty"),
        ((torch.eye(4).to_sparse_csr(),), {}, r"input `x` is a sparse tensor.*to_dense"),
    ],
)
def test_inputs_that_no_plan_can_hold_are_named(args, kwargs, pattern):
    with pytest.raises(CaptureError, match=pattern):
        capture(Net(), args, kwargs)


def test_models_that_are_wrapped_or_unfinished_are_named():
    net = Net()
    net.register_buffer("graph", torch.eye(4).to_sparse())
    with pytest.raises(CaptureError, match=r"`graph` is a sparse tensor.*index_select"):
        capture(net, (torch.ones(2, 4),))
    net.a.weight.ds_id = 0
    with pytest.raises(CaptureError, match=r"`a\.weight` is partitioned by DeepSpeed"):
        capture(net, (torch.ones(2, 4),))


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


def test_tensors_in_the_same_memory_are_refused_if_one_changes():
    def captured(weight, **held):
        model = Call(lambda m, x: (x @ m.weight * m.part[0]).square().mean(), **held)
        model.weight = nn.Parameter(weight)
        return capture(model, (torch.randn(4, 8),))

    flat = torch.randn(2, 8, 8)
    for part in (flat[0], flat[0, 2:4]):
        with pytest.raises(CaptureError, match="`weight` and `part` are two tensors in the same memory"):
            captured(flat[0], part=part)
    # Neighbours, columns that lie between each other, and what nothing changes.
    assert captured(flat[0], part=flat[1], again=flat[1, 2:4]).graph.operators
    wide = torch.randn(8, 16)
    assert captured(wide[:, :8], part=wide[:, 8:]).graph.operators
