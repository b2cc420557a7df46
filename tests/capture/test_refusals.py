"""Models and inputs that cannot be captured are refused before anything runs, by name.

Hooks on gradients are refused by name; those of forward are traced.
"""

from __future__ import annotations

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
from tensoropt.question.model_source import load_model

SITUATIONS = "tests/situations/gradients.py"


def test_hooks_of_backward_mean_nothing_without_one():
    built = load_model(f"{SITUATIONS}:build_tensor_hook")
    assert capture(built.model, built.args, mode="inference").graph.operators


def test_hooks_of_all_modules_are_found():
    handle = register_module_full_backward_hook(lambda module, inner, outer: None)
    try:
        with pytest.raises(CaptureError, match=r"backward runs the hook .*test_refusals\.py"):
            capture(nn.Linear(4, 4), (torch.randn(2, 4),), loss=torch.sum)
    finally:
        handle.remove()


class Several(nn.Module):
    """Registers one hook on several tensors."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        one, two = self.layer(x), self.layer(x * 2)
        torch.autograd.graph.register_multi_grad_hook((one, two), lambda grads: None)
        return (one * two).sum()


class SeveralByName(Several):
    """The same by a name that was imported before the capture."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def forward(self, x):
        one, two = self.layer(x), self.layer(x * 2)
        register_multi_grad_hook((one, two), seen, mode=self.mode)
        return (one * two).sum()


def seen(grads):
    """What a person's hook does."""


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_that_pytorch_wraps_is_named_as_it_was_written(mode):
    with pytest.raises(CaptureError, match=r"backward runs the hook seen \(.*test_refusals\.py:\d+\)"):
        capture(SeveralByName(mode), (torch.randn(2, 4),))


def test_a_hook_on_several_tensors_is_refused():
    with pytest.raises(CaptureError, match=r"backward runs the hook .*test_refusals\.py:\d+"):
        capture(Several(), (torch.randn(2, 4),))


def test_hooks_of_forward_and_parametrizations_are_traced():
    built = load_model(f"{SITUATIONS}:build_forward_hooks")
    graph = capture(built.model, built.args).graph
    assert "aten.clamp.default" in {op.target for op in graph.operators}
    assert not graph.notes


def test_registering_works_again_afterwards():
    built = load_model(f"{SITUATIONS}:build_tensor_hook")
    with pytest.raises(CaptureError):
        capture(built.model, built.args)
    built.model(*built.args).backward()
    assert built.model.first.weight.grad is not None


def test_what_changes_no_gradient_is_no_hook():
    """A checkpoint's hooks, PyTorch's own for what backward keeps, and a Function's backward."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)
            with torch.autograd.graph.save_on_cpu():
                x = Halved.apply(x.tanh())
            x.retain_grad()
            return x.square().mean()

    notes = capture(Model(), (torch.randn(2, 4),)).graph.notes
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
        (_sparse_buffer, r"`graph` is a sparse tensor.*index_select"),
        (_held_in_parts, r"`a\.weight` is partitioned by DeepSpeed"),
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
