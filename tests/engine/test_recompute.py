"""A recomputed region gives the same gradients and keeps less; the lowered graph calls it in order."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import CapturedModel, load_model
from tensoropt.engine.partly_recomputed import NodeRuns, PartlyRecomputed, SavingHooks
from tensoropt.engine.recompute import Recomputed
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.execute import parallelize
from tensoropt.sharding.recipes import groups_run_once
from tensoropt.sharding.regions import find_regions, fitting_once
from tensoropt.sharding.strategy import Strategy
from tests.execute import jobs


@pytest.fixture(scope="module")
def loaded():
    return load_model(jobs.spec("transformer_dropout"))


def recomputing(loaded: CapturedModel, recompute: str) -> Strategy:
    """Nothing of the blocks runs again, all of it, or what a recipe says; or what is left of ``mixed``: every
    second group runs once."""
    strategy, regions = unsplit_strategy(loaded.graph), find_regions(loaded.graph)
    if recompute == "none":
        return strategy
    if recompute == "mixed":
        once = (fitting_once(loaded.graph, region, region.groups[::2]) for region in regions)
    else:
        once = (groups_run_once(loaded.graph, region, recompute) for region in regions)
    return replace(strategy, recomputed=regions, once=frozenset().union(*once))


def engine(loaded: CapturedModel, recompute: str) -> ShardedEngine:
    return ShardedEngine(recomputing(loaded, recompute), loaded.values)


PARTS = ("full", "products", "attention core", "norms and activations", "mixed")


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
    for recompute in ("none", *PARTS):
        run = engine(loaded, recompute)
        for _ in range(2):  # the second step draws other masks
            run.shards.clear()
            (loss,) = run(*loaded.inputs)
            loss.backward()
        found.append((loss.detach(), {k: v.clone() for k, v in run.shards.gradients.items()}))
    (loss, gradients), *others = found
    for again, recomputed in others:
        assert torch.equal(loss, again)
        for name, value in gradients.items():
            assert torch.equal(value, recomputed[name]), name


def test_a_kept_graph_can_be_gone_back_twice(loaded):
    run = engine(loaded, "mixed")
    (loss,) = run(*loaded.inputs)
    found = []
    for keep in (True, False):
        run.shards.clear()
        loss.backward(retain_graph=keep)
        found.append({name: value.clone() for name, value in run.shards.gradients.items()})
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_only_what_runs_again_runs_twice(loaded):
    strategy = recomputing(loaded, "products")
    run = ShardedEngine(strategy, loaded.values)
    (part, *_) = [m.part for m in run.lowered.module.modules() if isinstance(m, Recomputed)]
    calls: list[str] = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func._opname)
            return func(*args, **(kwargs or {}))

    assert part is not None
    (loss,) = run(*loaded.inputs)
    with Counted():
        loss.backward()
    inside = [op.target.split(".")[1] for r in strategy.recomputed for g in r.groups for op in ops(loaded, g)]
    assert calls.count("native_layer_norm") == inside.count("layer_norm") > 0
    assert "native_layer_norm_backward" in calls
    # Backward has products of its own, and no linear operator.
    assert {"addmm", "linear"}.isdisjoint(calls)


@pytest.mark.parametrize("shared", [True, False])
def test_a_branch_that_leads_nowhere_takes_nothing_from_the_second_forward(shared):
    """It is the first to read what a later operator needs again, or alone reads something."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    made, other = (graph.call_function(torch.exp, (x,)) for _ in range(2))
    dead = graph.call_function(torch.sin, (made if shared else other,))
    result = graph.call_function(torch.sin, (graph.call_function(torch.cos, (made,)),))
    inner = result.args[0]
    runs = {node: NodeRuns(node in (dead, inner)) for node in (made, other, dead, inner, result)}
    saving = SavingHooks(lambda value: value, lambda kept: kept)
    region = PartlyRecomputed(torch.nn.Module(), [x], [result], runs, saving)
    value = torch.randn(4, requires_grad=True)
    (found,) = region([value * 1], nullcontext)
    expected = value.exp().cos().sin()
    for keep in (True, False):
        gradients = [torch.autograd.grad(y.sum(), value, retain_graph=keep) for y in (found, expected)]
        assert torch.equal(*(gradient for (gradient,) in gradients))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "products"])
def test_compiled_gradients_are_the_same(loaded, recompute):
    found = []
    for compiled in (False, True):
        (model, args, kwargs) = jobs.spec("transformer_dropout").build()
        strategy = recomputing(loaded, recompute)
        parallelize(model.train(), strategy, args, kwargs)
        torch._dynamo.reset()
        run = torch.compile(model, backend="aot_eager") if compiled else model
        run(*args, **kwargs)["loss"].backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_less_is_kept(loaded):
    plain, recomputed = (kept_bytes(engine(loaded, r), loaded.inputs)[1] for r in ("none", "full"))
    assert recomputed < 0.8 * plain


def test_every_region_is_one_call_and_nothing_of_it_remains_outside(loaded):
    module = engine(loaded, "full").lowered.module
    calls = [n.target for n in module.graph.nodes if n.op == "call_module"]
    assert len(calls) == len(find_regions(loaded.graph)) == 2
    assert all(isinstance(module.get_submodule(name), Recomputed) for name in calls)
    outside = {n.meta.get("operator") for n in module.graph.nodes} - {None}
    inside = {op.name for r in find_regions(loaded.graph) for g in r.groups for op in ops(loaded, g)}
    assert inside
    assert not outside & inside


def ops(loaded: CapturedModel, group: str):
    return loaded.graph.group_of[group].operators
