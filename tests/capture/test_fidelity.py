"""The captured graph computes what the model computes: loss, every gradient, buffers after the step."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from tensoropt import zoo
from tensoropt.capture import capture, find_loss
from tensoropt.engine.counts import unsplit_strategy
from tensoropt.engine.models import model_values
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import group_operators
from tensoropt.verify.differences import largest_of, named_difference

QUICK = ("mlp", "lenet", "gpt-mini", "unet-tiny", "rnn-lm-tiny")
LAPTOP = [e.name for e in zoo.list_models() if e.size == "laptop" and not e.name.endswith("-dropout")]
LOSS, GRADIENT, BUFFER = 1e-5, 2e-3, 1e-4
"""Relative; gradients to the parameter's largest, but to no less than 1e-3 of the model's largest. A bias in
front of a batch norm has no gradient but rounding."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in LAPTOP]
)
def test_the_graph_is_the_model(name):
    built = zoo.build(name)
    captured = capture(built.model, built.args, dict(built.kwargs))
    engine = ShardedEngine(
        unsplit_strategy(group_operators(refine_graph(captured.graph))), model_values(captured)
    )
    inputs = [v for v in pytree.tree_leaves((built.args, dict(built.kwargs))) if isinstance(v, torch.Tensor)]
    loss = engine(*inputs)[0]
    loss.backward()
    _, wanted = find_loss(built.model(*built.args, **built.kwargs))
    wanted.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=LOSS)
    parameters = dict(built.model.named_parameters(remove_duplicate=False))
    gradients = {t.name: parameters[str(t.key)].grad for t in captured.graph.parameters}
    gradients = {n: g for n, g in gradients.items() if g is not None}
    found = {n: engine.shards.gradients[n] for n in gradients}
    assert named_difference(found, gradients, 1e-3 * largest_of(gradients.values())) <= GRADIENT
    used = set(captured.graph.aliases) | {t.key for t in captured.graph.tensors.values()}
    assert {n for n, p in parameters.items() if p.grad is not None} <= used
    buffers = dict(built.model.named_buffers())
    for name_, value in engine.buffers.items():
        want = buffers[str(captured.graph.tensors[name_].key)]
        torch.testing.assert_close(value.double(), want.double(), rtol=BUFFER, atol=1e-6)
