"""Workloads: what makes two of them the same, and that they run wherever they are sent."""

from __future__ import annotations

import pickle

import pytest
import torch

from tensoropt.ops.calls import Domain
from tensoropt.ops.kernels import SingleDevice
from tensoropt.ops.layouts import local_shape
from tensoropt.profiling import workload_timing
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.workload import (
    TensorSpec,
    Workload,
    differentiable,
    memory_orders,
    order_of,
    random_tensor,
    run_workload,
    workload,
)
from tensoropt.ranks.pool import RankPool
from tensoropt.sharding.configurations import Configuration, enumerate_configurations
from tensoropt.sharding.groups import Group, GroupGraph
from tests.costs.models import gates, gpt2, llama, problem, two_layers
from tests.models import Call
from tests.sharding.models import grouped_model

MODELS = [two_layers, gates, gpt2, llama]


def every_workload(build, mesh=(1, 2)):
    """(group, configuration, workload) of everything a model can choose."""
    prepared = problem(build)
    for group in prepared.graph.groups:
        for c in enumerate_configurations(prepared.graph.atoms, group, mesh, prepared.micro[group.name]):
            yield group, c, workload(prepared.graph, c, mesh)


def named(build, anchor, labels, mesh=(1, 2)):
    return next(w for g, c, w in every_workload(build, mesh) if g.name == anchor and c.labels == labels)


def test_the_same_layer_twice_has_one_key():
    """Layers of GPT-2 differ in their names only; the first norm and the last one too."""
    groups = [g.name for g in problem(gpt2).graph.groups]
    first, second = [g for g in groups if g.startswith("scaled_dot_product_attention")]
    for labels in (("none",), ("heads",), ("batch0",)):
        assert named(gpt2, first, labels).key == named(gpt2, second, labels).key
    assert named(gpt2, first, ("heads",)).names != named(gpt2, second, ("heads",)).names


def test_shapes_and_choices_tell_keys_apart():
    keys = {
        labels: named(two_layers, "linear", labels).key for labels in [("none",), ("d0",), ("out_features",)]
    }
    assert len(set(keys.values())) == 3
    assert named(two_layers, "linear", ("none",), (2, 2)).key != keys["none",]
    # Splitting the batch over an axis or over micro-batches is the same work for one rank.
    assert named(two_layers, "linear", ("none",), (2, 2)).key == keys["d0",]


def test_equal_keys_mean_equal_work():
    for build in MODELS:
        seen = {}
        for _, _, work in every_workload(build):
            same = seen.setdefault(work.key, work)
            assert [s for _, s, _ in same.inputs] == [s for _, s, _ in work.inputs]
            assert [(c.function, c.static, outs) for c, outs in same.calls] == [
                (c.function, c.static, outs) for c, outs in work.calls
            ]


@pytest.mark.parametrize("build", MODELS, ids=lambda b: b.__name__)
def test_every_workload_survives_pickling_and_runs(build):
    seen = set()
    for group, configuration, work in every_workload(build, (2, 2)):
        if work.key in seen:
            continue
        seen.add(work.key)
        copy = pickle.loads(pickle.dumps(work))
        assert copy.key == work.key
        tensors = {name: random_tensor(spec) for name, spec, _ in copy.inputs}
        run_workload(copy, tensors, SingleDevice())
        back = {short: name for name, short in group.short_names.items()}
        for short in copy.writes:
            atoms = problem(build).graph.atoms.atoms[back[short]]
            expected = local_shape(atoms, configuration.layout(back[short]), (2, 2))
            assert tuple(tensors[short].shape) == expected, (group.name, configuration.labels, short)
        results, leaves = differentiable(copy, tensors)
        if results and leaves:
            torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results], allow_unused=True)


def test_integers_stay_in_range():
    """Lookups and losses of a shard get indices of that shard's rows."""
    work = named(gpt2, "embedding", ("d0",))
    bounds = {n: s.high for n, s, role in work.inputs if s.dtype == "int64"}
    assert set(bounds.values()) == {102}
    loss = next(g.name for g in problem(gpt2).graph.groups if "cross_entropy" in g.name)
    for labels in (("none",), ("classes",)):
        work = named(gpt2, loss, labels)
        rows = next(s.shape[1] for _, s, _ in work.inputs if s.dtype == "float32")
        (bound,) = {s.high for n, s, _ in work.inputs if s.dtype == "int64"}
        assert bound == rows
    value = random_tensor(TensorSpec((1000,), "int64", False, high=7))
    assert 0 <= int(value.min()) <= int(value.max()) < 7
    assert random_tensor(TensorSpec((3,), "bool", False)).dtype == torch.bool


def test_operands_lie_where_their_operator_is_defined():
    """``log`` runs on any numbers, the others raise an error outside of their domain."""

    def drawing(m, x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        rates, logits = matrices.flatten(1), m.layer(x)
        drawn = torch.poisson(rates) + torch.bernoulli(rates) + torch.normal(rates, rates) + rates.log()
        picked = torch.multinomial(rates, 4) + torch.cholesky(matrices).flatten(1)
        factors, pivots = torch.linalg.lu_factor(matrices)
        solved = torch.linalg.lu_solve(factors, pivots, matrices) + torch.lu_unpack(factors, pivots)[0]
        missed = torch.nn.functional.binary_cross_entropy(rates, rates)
        return (logits * (drawn + picked + solved.flatten(1))).mean() + missed

    model = Call(drawing, layer=torch.nn.Linear(4, 4))
    graph = grouped_model(model, torch.randn(4, 4), torch.rand(4, 2, 2) + torch.eye(2), loss=None)
    for group in graph.groups:
        for strategy in group.strategies:
            work = workload(graph, Configuration(group, (strategy,)), (2,))
            tensors = {name: random_tensor(spec) for name, spec, _ in work.inputs}
            run_workload(work, tensors, SingleDevice())
    assert {spec.domain for g in graph.groups for _, spec, _ in unsplit(graph, g).inputs} >= set(Domain)


def unsplit(graph: GroupGraph, group: Group) -> Workload:
    return workload(graph, Configuration(group, (group.unsplit,)), (1,))


def test_the_loss_of_a_single_row_is_a_workload():
    def row(m, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(m.layer(x)[0], target)

    model = Call(row, layer=torch.nn.Linear(4, 8))
    graph = grouped_model(model, torch.randn(2, 4), torch.tensor(3), loss=None)
    works = [workload(graph, Configuration(g, (g.strategies[0],)), (1,)) for g in graph.groups]
    assert {s.high for w in works for _, s, _ in w.inputs if s.dtype == "int64"} == {8}


def keys_of_gates(rank: int, world: int) -> list[str]:
    return [w.key for _, _, w in every_workload(gates)]


@pytest.mark.distributed
def test_keys_are_the_same_in_another_process(ranks: RankPool):
    """Nothing of them depends on a process: no addresses, no salted hashes."""
    assert ranks.run(keys_of_gates) == [keys_of_gates(0, 1)] * 2


def test_how_a_tensor_lies_in_memory():
    heads = torch.zeros(2, 4, 5, 8).transpose(1, 2)
    assert order_of(heads) == (0, 2, 1, 3)
    assert order_of(torch.zeros(2, 3)) is None
    assert order_of(torch.zeros(4, 1).t()) is None  # a dim of one element lies anywhere
    assert order_of(torch.zeros(3, 1).expand(3, 4).t()) is None  # repeated values lie nowhere in particular
    spec = TensorSpec((2, 5, 4, 8), "float32", True, order=(0, 2, 1, 3))
    made = random_tensor(spec)
    assert (made.shape, made.stride()) == (heads.shape, heads.stride())
    assert made.is_leaf
    assert made.requires_grad


def test_attention_reads_its_heads_as_the_projection_leaves_them():
    """Its result is then merged by a view, and kept once."""
    prepared = problem(gpt2)
    orders = memory_orders(prepared.graph)
    (group,) = (g for g in prepared.graph.groups[:6] if "attention" in g.anchor.target)
    assert [orders[name] for name in group.reads] == [(0, 2, 1, 3)] * 3
    assert memory_orders(prepared.graph) is orders
    c = next(iter(enumerate_configurations(prepared.graph.atoms, group, (1,), prepared.micro[group.name])))
    strided, plain = workload(prepared.graph, c, (1,)), workload(prepared.graph, c, (1,), {})
    assert strided.key != plain.key
    assert find_facts(plain).writes_kept == ()
    assert find_facts(strided).writes_kept == strided.writes


@pytest.mark.parametrize(("steps", "looped"), [(2, False), (3, True)])
def test_parameters_of_a_loop_are_told_from_tied_ones(steps, looped):
    def loop(m, x):
        for _ in range(steps):
            x = torch.tanh(m.cell(x))
        return x.square().mean()

    model = Call(loop, cell=torch.nn.Linear(8, 8, bias=False))
    graph = grouped_model(model, torch.randn(4, 8), loss=None)
    assert list(graph.users.values()) == [steps]
    work = unsplit(graph, graph.groups[0])
    (weight,) = (spec for _, spec, role in work.inputs if role == "parameter")
    assert weight.looped == looped


def test_complex_tensors_are_made_outside_of_fake_mode():
    spec = TensorSpec((3, 4), "complex64", requires_grad=True)
    value = random_tensor(spec)
    assert (value.shape, value.dtype, value.requires_grad) == ((3, 4), torch.complex64, True)


def test_the_start_of_a_backward_is_that_of_its_device(monkeypatch):
    """Autograd wakes a thread of its own for a GPU's tensors, and none for those of a CPU."""
    devices = set()
    grad = torch.autograd.grad

    def noted(outputs, inputs, gradients, **how):
        devices.update(value.device.type for value in (*outputs, *inputs, *gradients))
        return grad(outputs, inputs, gradients, **how)

    monkeypatch.setattr(torch.autograd, "grad", noted)
    for device in ("meta", "cpu"):
        devices.clear()
        assert workload_timing._start_of_backward_s.__wrapped__(torch.device(device)) >= 0.0
        assert devices == {device}


@pytest.mark.parametrize("mode", ["keeps", "orders"])
def test_a_kernel_that_looks_at_values_runs_on_real_tensors(mode):
    """An inverse Fourier transform checks its window, which fake tensors refuse to tell."""

    def back(m, x, window):
        spectrum = torch.stft(x * m.w, 16, window=window, return_complex=True)
        return torch.istft(spectrum, 16, window=window).square().mean()

    model = Call(back, w=(64,))
    graph = grouped_model(model, torch.randn(4, 64), torch.hann_window(16), loss=None)
    (group,) = [g for g in graph.groups if any(op.target == "aten.istft.default" for op in g.operators)]
    if mode == "orders":
        assert set(memory_orders(graph)) <= set(graph.atoms.graph.tensors)
    else:
        work = workload(graph, Configuration(group, (group.unsplit,)), (1,), {})
        assert find_facts(work).kept_bytes > 0
