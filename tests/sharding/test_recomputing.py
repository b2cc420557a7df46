"""Recomputed code against PyTorch's checkpoint and against code that keeps everything."""

import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tensoropt.sharding.recomputing import recomputed


def block(x: torch.Tensor, weight: torch.Tensor, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.tanh(x @ weight)
    unused.sin()
    return hidden * x, hidden.softmax(-1)


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, weight, unused = torch.randn(4, 8), torch.randn(8, 8), torch.randn(3)
    return [t.requires_grad_() for t in (x, weight, unused)]


def gradients(results: tuple[torch.Tensor, ...], of: list[torch.Tensor]) -> list[torch.Tensor | None]:
    return list(torch.autograd.grad(sum(r.sum() for r in results), of, allow_unused=True))


def test_gradients_are_those_of_code_that_keeps_everything():
    own = inputs()
    assert_same(gradients(recomputed(block, *own), own), gradients(block(*own), own))


def assert_same(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> None:
    assert [g is None for g in ours] == [g is None for g in theirs] == [False, False, True]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_it_runs_once_in_forward_and_once_when_backward_asks():
    runs = []

    def counted(x):
        runs.append(torch.is_grad_enabled())
        return torch.tanh(x).exp()

    x = torch.randn(3, requires_grad=True)
    result = recomputed(counted, x)
    assert len(runs) == 1
    result.sum().backward()
    assert runs == [True, True]


def kept_bytes(way) -> int:
    """What lives between forward and backward beside the inputs and the result."""
    made: list[weakref.ref] = []

    def chain(x):
        for _ in range(5):
            x = torch.tanh(x)
            made.append(weakref.ref(x))
        return x.sum()

    x = torch.randn(100, requires_grad=True)
    result = way(chain, x)
    alive = sum(ref().numel() * 4 for ref in made if ref() is not None)
    del result
    return alive


def test_nothing_of_the_inside_is_kept():
    assert kept_bytes(recomputed) == 0


def test_inputs_live_as_long_as_backward_may_come():
    x = torch.randn(5, requires_grad=True) * 2
    alive = weakref.ref(x)
    result = recomputed(lambda x: x.sin(), x)
    del x
    assert alive() is not None
    result.sum().backward()
    del result
    assert alive() is None


def test_a_kept_graph_can_be_gone_back_twice():
    own = inputs()
    total = sum(r.sum() for r in recomputed(block, *own))
    first = torch.autograd.grad(total, own[:2], retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(total, own[:2]), strict=True):
        assert torch.equal(one, other)


def test_it_runs_again_in_the_precision_of_forward():
    own = inputs()
    found = []

    def noted(x, weight):
        found.append((x @ weight).dtype)
        return x @ weight

    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = recomputed(noted, *own[:2])
    result.float().sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = checkpoint(noted, *own[:2], use_reentrant=False, early_stop=False)
    assert torch.equal(own[1].grad, torch.autograd.grad(theirs.float().sum(), own[1])[0])
    assert set(found) == {torch.bfloat16}


def test_hooks_of_a_users_own_see_what_is_kept():
    seen = []
    x = torch.randn(5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        result = recomputed(lambda x: torch.tanh(x).exp(), x)
    assert seen == [x.shape]
    result.sum().backward()
    assert x.grad is not None


def test_an_input_that_was_changed_is_refused():
    x = torch.randn(4, requires_grad=True)
    scale = torch.ones(4)
    result = recomputed(lambda x, scale: (x * scale).exp(), x, scale)
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_code_that_does_other_things_the_second_time_is_refused():
    times = []

    def fickle(x):
        times.append(None)
        for _ in range(len(times)):
            x = torch.tanh(x)
        return x

    with pytest.raises(RuntimeError, match="saved 1 tensors in forward and 2 when it ran again"):
        recomputed(fickle, torch.randn(4, requires_grad=True)).sum().backward()
