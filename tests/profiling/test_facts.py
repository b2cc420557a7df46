"""Facts worked out by hand, and compared with what real tensors keep.

FLOP that PyTorch does not count itself, against products counted by hand.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tensoropt.graph import Ref
from tensoropt.ops.calls import LocalCall
from tensoropt.ops.kernels import SingleDevice
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.facts import Facts, flops_of
from tensoropt.profiling.workload import Resolved, TensorSpec, Workload, random_tensor, run_workload, workload
from tensoropt.sharding.configurations import enumerate_configurations
from tests.costs.models import gates, gpt2, llama, problem, two_layers


def test_attention_is_counted_as_its_products():
    q, k = torch.randn(2, 4, 6, 8, requires_grad=True), torch.randn(2, 4, 10, 8, requires_grad=True)
    with FlopCounterMode(display=False, custom_mapping={}) as counted:
        loss = (torch.softmax(q @ k.transpose(-1, -2), -1) @ k).sum()
        loss.backward()
    forward = flops_of(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
    once = forward(q, k, k, out_val=None)
    assert once == 2 * (2 * 2 * 4 * 6 * 10 * 8)
    backward = flops_of(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    # Flash attention keeps no scores: its backward multiplies queries and keys once more.
    assert once + backward(q, q, k, k, out_val=None) == counted.get_total_flops() + once // 2


@pytest.mark.parametrize(("queries", "keys", "seen"), [(6, 6, 21), (4, 6, 10), (6, 4, 18)])
def test_causal_attention_is_counted_as_what_is_seen(queries, keys, seen):
    q, k = torch.randn(2, 4, queries, 8), torch.randn(2, 4, keys, 8)
    aten = torch.ops.aten
    forward = flops_of(aten._scaled_dot_product_flash_attention_for_cpu.default)
    assert forward(q, k, k, 0.0, True, out_val=None) == 2 * 2 * (2 * 4 * 8) * seen
    backward = flops_of(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    assert backward(q, q, k, k, q, q, 0.0, True, out_val=None) == 5 * 2 * (2 * 4 * 8) * seen


@pytest.mark.parametrize(("name", "times"), [("grouped_mm_fallback", 1), ("grouped_mm_fallback_backward", 2)])
def test_experts_are_counted_by_the_rows_they_get(name, times):
    pytest.importorskip("transformers.integrations.moe")
    operator = getattr(torch.ops.transformers, name).default
    rows, experts = torch.empty(12, 8), torch.empty(4, 8, 16)
    assert flops_of(operator)(rows, experts, out_val=None) == times * 2 * 12 * 8 * 16


def test_what_is_no_product_is_not_counted():
    assert flops_of(torch.ops.aten.relu.default) is None
    assert flops_of(torch.ops.aten.mm.default)(torch.empty(2, 3), torch.empty(3, 5), out_val=None) == 60


def chain(inputs: dict[str, tuple[tuple[int, ...], str]], *calls: tuple[Any, ...], writes: str) -> Workload:
    """A workload of (function, args, outputs) calls on float32 inputs given as (shape, role)."""
    return Workload(
        tuple((n, TensorSpec(shape, "float32", True), role) for n, (shape, role) in inputs.items()),
        tuple(
            (LocalCall(function, args, {}, static=static), outs) for function, args, outs, *static in calls
        ),
        None,
        tuple(writes.split()),
        {},
    )


def linear(rows: int, k: int, n: int, *more: tuple[Any, ...], writes: str = "y") -> Workload:
    inputs = {"x": ((rows, k), "read"), "w": ((n, k), "parameter"), "b": ((n,), "parameter")}
    first = ("aten.linear.default", (Ref("x"), Ref("w"), Ref("b")), ("y",))
    return chain(inputs, first, *more, writes=writes)


def pointwise(function: str, *args: Any, shape: tuple[int, ...] = (8, 16)) -> Workload:
    return chain({"x": (shape, "read")}, (function, (Ref("x"), *args), ("y",)), writes="y")


def without_gradient(work: Workload, name: str) -> Workload:
    inputs = tuple((n, TensorSpec(s.shape, s.dtype, n != name), role) for n, s, role in work.inputs)
    return replace(work, inputs=inputs)


def joined(*more: tuple[Any, ...], writes: str = "y") -> Workload:
    """8 x 4 and 8 x 12 put side by side."""
    inputs = {"a": ((8, 4), "read"), "b": ((8, 12), "read")}
    return chain(inputs, ("aten.cat.default", ([Ref("a"), Ref("b")], 1), ("y",)), *more, writes=writes)


GELU, TANH = (("aten." + name + ".default", (Ref("y"),), ("z",)) for name in ("gelu", "tanh"))
MASK = ("kernels.dropout", (Ref("x"), 0.1), ("y",), ((8, 16, 8, ()), (16, 1, 16, ())))
NEGATIVES = [("aten.neg.default", (Ref(a),), (b,)) for a, b in ["xa", "ab", "bc", "cd"]]
PARTS = ("aten.split.Tensor", (Ref("y"), 8, 1), ("a", "b"))
WHOLE = {
    "reads_kept": ("x",),
    "parameters_kept": {"w": 1},  # the bias is not needed
    "kept_bytes": 0,
    "writes_kept": (),
    "forward_flops": 2 * 32 * 24 * 16,
    "backward_flops": 4 * 32 * 24 * 16,
    "traffic_bytes": 4 * (32 * 24 + 24 * 16 + 16 + 32 * 16),
    "forward_peak_bytes": 4 * 32 * 16,  # the result
    # At its end the incoming gradient and those of input, weight and bias are there together.
    "backward_peak_bytes": 4 * (32 * 16 + 32 * 24 + 16 * 24 + 16),
}
HIDDEN = 32 * 16 * 4
BY_HAND: dict[str, tuple[Workload, dict[str, Any]]] = {
    "linear": (linear(32, 24, 16), WHOLE),
    "an input without a gradient needs no weight": (
        without_gradient(linear(32, 24, 16), "x"),
        {"reads_kept": ("x",), "parameters_kept": {}, "backward_flops": 2 * 32 * 24 * 16},
    ),
    "a frozen weight gets no gradient": (
        without_gradient(linear(32, 24, 16), "w"),
        {"parameters_kept": {"w": 1}, "backward_flops": 2 * 32 * 24 * 16},
    ),
    "dropout keeps a mask of one byte": (
        chain({"x": ((8, 16), "read")}, MASK, writes="y"),
        {"kept_bytes": 8 * 16, "reads_kept": (), "writes_kept": ()},
    ),
    "views keep and move nothing": (
        pointwise("aten.reshape.default", [4, 32]),
        {"kept_bytes": 0, "traffic_bytes": 0, "forward_peak_bytes": 0},
    ),
    "a view lies in what it is cut from": (
        pointwise("aten.select.int", 0, 1),
        {"lies_in": {"y": "x"}, "extents": {}},
    ),
    "parts of what is made lie in the first": (
        linear(32, 24, 16, PARTS, writes="a b"),
        {"lies_in": {"b": "a"}, "extents": {"a": HIDDEN}},
    ),
    "a concatenation hands on slices of its gradient, and copies nothing": (
        joined(),
        {"gradient_extents": dict.fromkeys("ab", 4 * 8 * 16), "backward_peak_bytes": 4 * 8 * 16},
    ),
    "slices of a gradient made inside": (
        joined(GELU, writes="z"),
        {"gradient_extents": dict.fromkeys("ab", 4 * 8 * 16)},
    ),
    "a total hands on one number": (pointwise("aten.sum.default"), {"gradient_extents": {"x": 4}}),
    "all else hands on all": (pointwise("aten.gelu.default"), {"gradient_extents": {}}),
    # The incoming gradient and tanh's result are gone when the linear runs.
    "backward lets go of what it used": (
        linear(32, 24, 16, TANH, writes="z"),
        {
            "kept_bytes": HIDDEN,
            "backward_peak_bytes": max(3 * HIDDEN, HIDDEN + 4 * (32 * 24 + 16 * 24 + 16)) - HIDDEN,
        },
    ),
    "forward lets go of what nobody needs": (
        chain({"x": ((8, 16), "read")}, *NEGATIVES, writes="d"),
        {"kept_bytes": 0, "forward_peak_bytes": 2 * 8 * 16 * 4},
    ),
    "a terabyte, of which nothing is allocated": (
        linear(1 << 19, 1 << 18, 1 << 18),
        {"forward_flops": 2.0 ** (1 + 19 + 18 + 18), "forward_peak_bytes": 4 << 37},
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_facts_by_hand(name: str) -> None:
    work, wanted = BY_HAND[name]
    facts = find_facts(work)
    assert {name: getattr(facts, name) for name in wanted} == wanted


def test_inference_keeps_nothing():
    facts = find_facts(linear(32, 24, 16, GELU, writes="z"), False)
    assert facts.kept_bytes == 0
    assert facts.reads_kept == facts.writes_kept == ()
    assert facts.parameters_kept == {}
    assert (facts.backward_flops, facts.backward_peak_bytes) == (0.0, 0)
    assert (facts.forward_flops, facts.forward_peak_bytes) == (2 * 32 * 24 * 16, 2 * HIDDEN)


def test_work_of_calls_adds_up_to_the_whole():
    calls = [
        ("aten.linear.default", (Ref("x"), Ref("w"))),
        ("aten.rms_norm.default", (Ref("h"), [16], Ref("v"))),
    ]
    inputs = {"x": ((32, 24), "read"), "w": ((16, 24), "parameter"), "v": ((16,), "parameter")}
    facts = find_facts(
        chain(inputs, *((f, a, (r,)) for (f, a), r in zip(calls, "hy", strict=True)), writes="y")
    )
    product, norm = facts.work_of_calls
    assert product.forward_flops == facts.forward_flops == 2 * 32 * 24 * 16
    assert product.traffic_bytes == product.outer_bytes == 4 * (32 * 24 + 24 * 16 + 32 * 16)
    assert product.traffic_bytes + norm.traffic_bytes == facts.traffic_bytes
    # A CPU takes several kernels for it.
    assert norm.outer_bytes == 4 * (2 * 32 * 16 + 16) < norm.traffic_bytes
    assert Facts.from_record(json.loads(json.dumps(facts.to_record()))) == facts


@pytest.mark.parametrize("directions", [1, 2])
def test_lstm(directions: int):
    steps, batch, inner, hidden = 3, 4, 8, 16
    shapes = [(4 * hidden, inner), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)] * directions
    weights = {f"w{i}": (shape, "parameter") for i, shape in enumerate(shapes)}
    state = ((directions, batch, hidden), "read")
    inputs = {"x": ((steps, batch, inner), "read"), "h": state, "c": state, **weights}
    operands = (Ref("x"), (Ref("h"), Ref("c")), tuple(map(Ref, weights)))
    args = (*operands, True, 1, 0.0, True, directions == 2, False)
    facts = find_facts(chain(inputs, ("aten.lstm.input", args, ("y", "hn", "cn")), writes="y"))
    gates = steps * batch * 4 * hidden * (inner + hidden)
    assert facts.forward_flops == 2 * directions * gates
    assert facts.backward_flops == 4 * directions * gates


@pytest.mark.parametrize(("rows", "same"), [(8, (("a", "b"),)), (1, ())])
def test_a_sum_hands_on_its_gradient_unless_it_repeats_an_operand(rows, same):
    inputs = {"a": ((8, 4), "read"), "b": ((rows, 4), "read")}
    facts = find_facts(chain(inputs, ("aten.add.Tensor", (Ref("a"), Ref("b")), ("y",)), writes="y"))
    assert facts.same_gradients == same


def test_backward_reads_one_parameter_after_the_other():
    """That of the second product is used up when the gradient of the first's weight is made."""
    second = ("aten.linear.default", (Ref("y"), Ref("v")), ("z",))
    work = linear(32, 24, 16, second, writes="z")
    v = ("v", TensorSpec((8, 16), "float32", True), "parameter")
    facts = find_facts(replace(work, inputs=(*work.inputs, v)))
    hidden, out = 32 * 16 * 4, 32 * 8 * 4
    assert facts.kept_bytes == hidden
    runs = {(reads, made): most for reads, made, most, _ in facts.backward_runs}
    assert runs[("v",), ()] == out + hidden + 8 * 16 * 4
    assert runs[("w",), ("v",)] == hidden + 4 * (32 * 24 + 16 * 24 + 16) - facts.kept_bytes
    # The gradient of what is between them is alive when the first's weight is gathered, and what was between
    # them is not.
    begins = {(reads, made): begin for reads, made, _, begin in facts.backward_runs}
    assert begins[("v",), ()] == out
    assert begins[("w",), ("v",)] == hidden - facts.kept_bytes


# -- reality --------------------------------------------------------------------------------------


def really_kept(work: Workload) -> tuple[int, set[str], set[str]]:
    """(bytes made inside and kept, inputs kept, written storages kept) of a run on real tensors."""
    tensors = {name: random_tensor(spec) for name, spec, _ in work.inputs}
    given = {t.untyped_storage().data_ptr(): n for n, t in tensors.items()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(value: torch.Tensor) -> torch.Tensor:
        saved[value.untyped_storage().data_ptr()] = value.untyped_storage()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        run_workload(work, tensors, SingleDevice())
    inside = {key: storage.nbytes() for key, storage in saved.items() if key not in given}
    writes = {n for n in work.writes if tensors[n].untyped_storage().data_ptr() in inside}
    return sum(inside.values()), {given[k] for k in saved if k in given}, writes


@pytest.mark.parametrize("build", [two_layers, gates, gpt2, llama], ids=lambda b: b.__name__)
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)], ids=str)
def test_facts_agree_with_real_tensors(build, mesh):
    prepared = problem(build)
    rng = random.Random(0)
    works = {}
    for group in prepared.graph.groups:
        configurations = enumerate_configurations(
            prepared.graph.atoms, group, mesh, prepared.micro[group.name]
        )
        for configuration in rng.sample(configurations, min(3, len(configurations))):
            work = workload(prepared.graph, configuration, mesh)
            works[work.key] = work
    for work in works.values():
        facts = find_facts(work)
        kept, inputs, writes = really_kept(work)
        roles = {n: role for n, _, role in work.inputs}
        assert facts.kept_bytes == kept, work.describe()
        assert set(facts.reads_kept) == {n for n in inputs if roles[n] == "read"}, work.describe()
        assert set(facts.parameters_kept) == {n for n in inputs if roles[n] == "parameter"}, work.describe()
        assert set(facts.writes_kept) == writes, work.describe()


def test_a_resolved_sum_takes_the_memory_of_its_resharding():
    """Scattering 8 x 4 partial sums of 2 ranks along the inner dim: a copy of the pieces, and the result."""
    plain = chain({"x": ((8, 4), "read")}, ("aten.relu.default", (Ref("x"),), ("y",)), writes="y")
    moved = replace(plain, resolved=Resolved("y", (8, 2), forward_elements=48, backward_elements=64))
    assert find_facts(moved).forward_peak_bytes == 4 * (32 + 48) - 4 * 32  # relu keeps its result
    assert find_facts(moved).backward_peak_bytes == 4 * (16 + 64)


def test_peaks_are_apart_for_calls_that_read_parameters():
    """The product is small beside what follows it: gathered weights are not there at the peak."""
    work = chain(
        {"x": ((4, 8), "read"), "w": ((2, 8), "parameter")},
        ("aten.linear.default", (Ref("x"), Ref("w")), ("a",)),
        ("aten.expand.default", (Ref("a"), [16, 4, 2]), ("b",)),
        ("aten.mul.Tensor", (Ref("b"), 2.0), ("c",)),
        writes="c",
    )
    facts = find_facts(work)
    assert facts.forward_parameters_peak_bytes == 4 * 8
    assert facts.forward_peak_bytes == 4 * (8 + 128)
    first = chain(
        {"x": ((16, 4, 8), "read"), "w": ((2, 8), "parameter")},
        ("aten.neg.default", (Ref("x"),), ("a",)),
        ("aten.sum.dim_IntList", (Ref("a"), [0]), ("b",)),
        ("aten.linear.default", (Ref("b"), Ref("w")), ("c",)),
        writes="c",
    )
    assert find_facts(first).forward_parameters_peak_bytes == 4 * 8
