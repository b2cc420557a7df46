"""A recomputed region gives the same gradients and keeps less; the lowered graph calls it in order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import CapturedModel, load_model
from tensoropt.engine.recompute import Recomputed
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.execute import parallelize
from tensoropt.sharding.regions import find_regions
from tests.execute import jobs


@pytest.fixture(scope="module")
def loaded() -> CapturedModel:
    return load_model(jobs.spec("transformer_dropout"))


def engine(loaded: CapturedModel, recompute: bool) -> ShardedEngine:
    strategy = unsplit_strategy(loaded.graph)
    regions = find_regions(loaded.graph) if recompute else ()
    return ShardedEngine(replace(strategy, recomputed=regions), loaded.values)


def kept_bytes(run: ShardedEngine, inputs) -> tuple[torch.Tensor, int]:
    """(loss, bytes that autograd holds when forward is through)."""
    held: dict[int, int] = {}

    def pack(value: torch.Tensor) -> torch.Tensor:
        held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        (loss,) = run(*inputs)
    return loss, sum(held.values())


def test_gradients_and_dropout_masks_are_the_same(loaded):
    found = []
    for recompute in (False, True):
        run = engine(loaded, recompute)
        for _ in range(2):  # the second step draws other masks
            run.shards.clear()
            (loss,) = run(*loaded.inputs)
            loss.backward()
        found.append((loss.detach(), {k: v.clone() for k, v in run.shards.gradients.items()}))
    (loss, gradients), (again, recomputed) = found
    assert torch.equal(loss, again)
    for name, value in gradients.items():
        assert torch.equal(value, recomputed[name]), name


@pytest.mark.slow
def test_compiled_gradients_are_the_same(loaded):
    found = []
    for compiled in (False, True):
        (model, args, kwargs) = jobs.spec("transformer_dropout").build()
        strategy = replace(unsplit_strategy(loaded.graph), recomputed=find_regions(loaded.graph))
        parallelize(model.train(), strategy, args, kwargs)
        torch._dynamo.reset()
        run = torch.compile(model, backend="aot_eager") if compiled else model
        run(*args, **kwargs)["loss"].backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_less_is_kept(loaded):
    plain, recomputed = (kept_bytes(engine(loaded, r), loaded.inputs)[1] for r in (False, True))
    assert recomputed < 0.8 * plain


def test_every_region_is_one_call_and_nothing_of_it_remains_outside(loaded):
    module = engine(loaded, True).lowered.module
    calls = [n.target for n in module.graph.nodes if n.op == "call_module"]
    assert len(calls) == len(find_regions(loaded.graph)) == 2
    assert all(isinstance(module.get_submodule(name), Recomputed) for name in calls)
    outside = {n.meta.get("operator") for n in module.graph.nodes} - {None}
    inside = {op.name for r in find_regions(loaded.graph) for g in r.groups for op in ops(loaded, g)}
    assert inside
    assert not outside & inside


def ops(loaded: CapturedModel, group: str):
    return loaded.graph.group_of[group].operators
