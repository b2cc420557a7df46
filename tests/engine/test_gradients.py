"""Where gradients lie: in buckets that are reduced, else in the tensors that autograd made.

A loss whose backward is the engine's: it comes once, with the gradient of the loss.
"""

import pytest
import torch
from torch import nn

from tensoropt.engine import parameters
from tensoropt.engine.gradients import DeferredStep, Gradients, Pending, defer_backward, storage_key
from tensoropt.engine.runtime import Runtime
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.sharding.buckets import Bucket, gradient_buckets
from tensoropt.sharding.strategy import Scattered
from tensoropt.simulate.collectives import Collective
from tensoropt.verify.fake_ranks import fake_job
from tensoropt.verify.recorder import CollectiveRecorder
from tests.engine.loops import captured_of
from tests.engine.threads import unsplit_engine
from tests.simulate.strategies import written


def deferred() -> tuple[torch.Tensor, DeferredStep, list[float]]:
    given: list[float] = []
    step = DeferredStep()
    anchor = torch.zeros((), requires_grad=True)
    loss = defer_backward(anchor, torch.tensor(3.0), step, lambda _, gradient: given.append(float(gradient)))
    return loss, step, given


def test_backward_finishes_the_step_with_the_gradient_of_the_loss():
    loss, step, given = deferred()
    assert float(loss.detach()) == 3.0
    assert not step.done
    (0.5 * loss).backward()
    assert step.done
    assert given == [0.5]


def test_a_second_backward_is_refused():
    loss, _, given = deferred()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already used for backward"):
        loss.backward()
    assert given == [1.0]


X = torch.randn(4, 8)


def engine_of(model: nn.Module) -> ShardedEngine:
    return unsplit_engine(*captured_of(model, X, loss=torch.sum))


def step(engine: ShardedEngine) -> dict[str, torch.Tensor]:
    engine.shards.clear()
    engine(X)[0].backward()
    return dict(engine.shards.gradients)


def test_what_nothing_reduces_stays_where_autograd_made_it():
    """A new tensor each step, so one that somebody kept keeps its values; later calls add to it in place."""
    engine = engine_of(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)))
    first = step(engine)
    values = {name: value.clone() for name, value in first.items()}
    for value in first.values():
        value.mul_(3)
    second = step(engine)
    assert {storage_key(v) for v in first.values()}.isdisjoint(storage_key(v) for v in second.values())
    assert all(torch.equal(second[n], v) and torch.equal(first[n], 3 * v) for n, v in values.items())
    engine(X)[0].backward()
    assert all(engine.shards.gradients[n] is v and torch.equal(v, 2 * values[n]) for n, v in second.items())
    assert all(leaf.grad is second[name] for name, leaf in engine.shards.leaves.items())
    engine.shards.leaves[min(values)].grad = None  # the others go on
    engine(X)[0].backward()
    for name, value in engine.shards.gradients.items():
        torch.testing.assert_close(value, values[name] * (1 if name == min(values) else 3))


class Twice(torch.autograd.Function):
    """A sum of two operands whose gradients are two views of one tensor."""

    @staticmethod
    def forward(ctx, a, b):
        return a + b.view(a.shape)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.view(4, 8), gradient.view(32)


def test_gradients_that_share_memory_are_told_apart():
    leaves = {"a": torch.randn(4, 8, requires_grad=True), "b": torch.randn(32, requires_grad=True)}
    book = Gradients(Runtime((1,), rank=0), (Bucket((), "float32", ("a", "b"), 64),), leaves)
    book.occupy()
    Twice.apply(*leaves.values()).mul(X).sum().backward()
    book.finish()
    one, other = book.views.values()
    assert torch.equal(one, X)
    assert torch.equal(other, X.flatten())
    assert storage_key(one) != storage_key(other)


def test_buckets_start_in_the_backward_of_the_last_micro_batch(monkeypatch):
    """Each with its last gradient, which the second layer's backward makes first; the script's ``backward()``
    only waits for them."""
    monkeypatch.setattr(parameters, "gradient_buckets", lambda strategy: gradient_buckets(strategy, 1))
    layers = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    graph, values = captured_of(layers, X, loss=torch.sum)
    loss_sum, arrived = Collective("all_reduce", (1,), 4), list[int]()
    with fake_job(0, 2), CollectiveRecorder((2, 2)) as recorder:
        engine = ShardedEngine(written(graph, (2, 2), ["d0", "d0"], ["R", "R/P"]), values)
        for leaf in engine.shards.leaves.values():
            leaf.register_post_accumulate_grad_hook(lambda _: arrived.append(len(recorder.issued)))
        loss = engine(X)[0]
        buckets = [Collective("all_reduce", (1,), size * 4) for size in (4, 24, 6, 48)]
        in_call = recorder.issued.copy()
        loss.backward()
    assert sorted(in_call[2:]) == sorted(buckets)
    assert in_call[:2] == [loss_sum] * 2
    assert recorder.issued == in_call
    # One after the other, as gradients come: nothing in the first micro-batch.
    assert arrived == [1] * 4 + [3, 4, 5, 6]


def test_what_comes_late_of_an_earlier_micro_batch_completes_no_bucket():
    """A bucket is reduced once: what is added to it then would be reduced a second time, or never."""
    leaves = {"a": torch.zeros(4, requires_grad=True)}
    book = Gradients(Runtime((1,), rank=0), (Bucket((), "float32", ("a",), 16),), leaves)
    book.delivered = {"a": Scattered(sums=1, others=False)}
    step = Pending()
    book.occupy(step)
    book.begin_last()
    started = []
    book._start = started.append
    with book.of_earlier():
        book.add_late("a", torch.ones(4))
    assert not started
    book.add_late("a", torch.ones(4))
    assert started == [0]
    assert torch.equal(book.views["a"], torch.full((4,), 2.0))
    # As little does the part of one of several calls whose backward runs at once.
    book.one_call = False
    book.occupy()
    book.add_late("a", torch.ones(4))
    assert started == [0]
