"""Every argument of every operator is read by its rule, means the same on a part, or forbids the split."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.ops import registry
from tensoropt.ops.index_space import need_not_ask
from tensoropt.ops.overloads import resolve_overload
from tensoropt.sharding.atoms import refine_graph
from tests.models import Call
from tests.sharding.graph_check import check_graph


def sources(rule: Any) -> Iterator[str]:
    """The source of a rule, and of the functions of its family that it hands the builder to."""
    waiting, seen = [rule], set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        source = inspect.getsource(function)
        yield source
        for name in re.findall(r"\b(\w+)\(b\b", source):
            other = inspect.unwrap(function).__globals__.get(name)
            if isinstance(other, types.FunctionType):
                waiting.append(other)


def test_every_argument_is_asked_for_or_means_the_same_on_a_part():
    found = set()
    for target, spec in registry._BY_TARGET.items():
        if spec.rule is None or not target.startswith("aten."):
            continue
        text = "".join(sources(spec.rule))
        asked = set(map(int, re.findall(r"\.(?:arg|dim)\((\d+)", text)))
        names = set(re.findall(r"\.(?:arg|dim)\([^()]*\"(\w+)\"", text))
        for position, argument in enumerate(resolve_overload(target)._schema.arguments):
            if "Tensor" in str(argument.type) or position in asked or argument.name in names:
                continue
            if not need_not_ask(spec.rule, argument.name):
                found.add((target.removeprefix("aten."), argument.name))
    assert sorted(found) == []


def test_an_argument_that_nobody_asked_for_keeps_the_operator_whole(monkeypatch: pytest.MonkeyPatch):
    graph = capture(
        Call(lambda m, x: torch.roll(x * m.w, 1, 1), w=(8,)), (torch.randn(4, 8),), mode="eval"
    ).graph
    (op,) = [op for op in graph.operators if op.target == "aten.roll.default"]
    assert any(dim.splittable for dim in registry.index_space(op, graph).dims)
    monkeypatch.setattr(registry, "_unread", lambda op, consulted: ["shifts"])
    assert not any(dim.splittable for dim in registry.index_space(op, graph).dims)


@pytest.mark.parametrize("by_frequency", [False, True])
def test_a_lookup_whose_gradient_depends_on_the_whole_batch_splits_along_hidden_units_only(
    by_frequency: bool,
):
    model = nn.Sequential(nn.Embedding(12, 8, scale_grad_by_freq=by_frequency), nn.Linear(8, 4))
    graph = capture(model, (torch.randint(0, 12, (4, 6)),), loss=lambda y: y.square().sum()).graph
    atoms = refine_graph(graph)
    (op,) = [op for op in graph.operators if op.target == "aten.embedding.default"]
    split = {dim.name for dim in atoms.spaces[op.name].dims if dim.splittable}
    assert split == ({"hidden"} if by_frequency else {"d0", "d1", "vocabulary", "hidden"})
    assert check_graph(atoms).mismatches == []
