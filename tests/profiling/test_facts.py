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

STEPS, BATCH, WIDTH, HIDDEN = 5, 3, 7, 11
GATES = 4 * HIDDEN
LSTM = 2 * STEPS * BATCH * (GATES * WIDTH + GATES * HIDDEN)
"""Multiplications and additions: every step multiplies its input and its state with all gates' weights."""


@pytest.mark.parametrize(
    ("name", "flop"), [("mkldnn_rnn_layer", LSTM), ("mkldnn_rnn_layer_backward", 2 * LSTM)]
)
def test_a_recurrent_layer(name, flop):
    shapes = ((STEPS, BATCH, WIDTH), (GATES, WIDTH), (GATES, HIDDEN))
    operator = getattr(torch.ops.aten, name).default
    assert flops_of(operator)(*(torch.empty(s) for s in shapes), out_val=None) == flop


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


def test_linear():
    facts = find_facts(linear(32, 24, 16))
    assert facts.reads_kept == ("x",)
    assert facts.parameters_kept == {"w": 1}  # the bias is not needed
    assert facts.kept_bytes == 0
    assert facts.writes_kept == ()
    assert facts.forward_flops == 2 * 32 * 24 * 16
    assert facts.backward_flops == 4 * 32 * 24 * 16
    assert facts.traffic_bytes == 4 * (32 * 24 + 24 * 16 + 16 + 32 * 16)
    assert facts.forward_peak_bytes == 4 * 32 * 16  # the result


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
    assert Facts.from_record(facts.to_record()) == facts


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


def test_linear_whose_input_needs_no_gradient_keeps_no_weight():
    work = linear(32, 24, 16)
    inputs = tuple((n, TensorSpec(s.shape, s.dtype, n != "x"), role) for n, s, role in work.inputs)
    facts = find_facts(Workload(inputs, work.calls, None, work.writes, {}))
    assert facts.reads_kept == ("x",)
    assert facts.parameters_kept == {}
    assert facts.backward_flops == 2 * 32 * 24 * 16


def test_relu_keeps_its_output_and_gelu_its_input():
    relu = find_facts(pointwise("aten.relu.default"))
    assert (relu.kept_bytes, relu.reads_kept, relu.writes_kept) == (8 * 16 * 4, (), ("y",))
    gelu = find_facts(pointwise("aten.gelu.default"))
    assert (gelu.kept_bytes, gelu.reads_kept, gelu.writes_kept) == (0, ("x",), ())


def test_chain_keeps_the_hidden_tensor_once():
    gelu = linear(32, 24, 16, ("aten.gelu.default", (Ref("y"),), ("z",)), writes="z")
    facts = find_facts(gelu)
    assert facts.kept_bytes == 32 * 16 * 4  # gelu's input, made inside
    assert facts.writes_kept == ()
    relu = find_facts(linear(32, 24, 16, ("aten.relu.default", (Ref("y"),), ("z",)), writes="z"))
    assert relu.kept_bytes == 32 * 16 * 4
    assert relu.writes_kept == ("z",)
    twice = find_facts(
        linear(32, 24, 16, ("aten.tanh.default", (Ref("y"),), ("z",)),
               ("aten.mul.Tensor", (Ref("z"), Ref("z")), ("u",)), writes="u")
    )  # fmt: skip
    assert twice.kept_bytes == 32 * 16 * 4  # tanh's result, saved three times, is one storage


def test_layer_norm_keeps_its_statistics():
    inputs = {"x": ((8, 16, 32), "read"), "w": ((32,), "parameter"), "b": ((32,), "parameter")}
    call = ("aten.layer_norm.default", (Ref("x"), [32], Ref("w"), Ref("b"), 1e-5), ("y",))
    facts = find_facts(chain(inputs, call, writes="y"))
    assert facts.kept_bytes == 2 * 8 * 16 * 4  # mean and inverse deviation per row
    assert facts.reads_kept == ("x",)
    assert facts.writes_kept == ()
    assert set(facts.parameters_kept) <= {"w", "b"}
    assert facts.parameters_kept["w"] == 1


def test_dropout_keeps_a_mask_of_one_byte():
    pieces = ((8, 16, 8, ()), (16, 1, 16, ()))
    work = chain(
        {"x": ((8, 16), "read")},
        ("kernels.dropout", (Ref("x"), 0.1), ("y",), pieces),
        writes="y",
    )
    facts = find_facts(work)
    assert facts.kept_bytes == 8 * 16
    assert facts.reads_kept == ()
    assert facts.writes_kept == ()


def test_attention_is_counted():
    """Two products of queries x keys x features per head forward; backward makes the scores again and
    has four products more."""
    inputs = dict.fromkeys("qkv", ((2, 4, 32, 16), "read"))
    call = ("aten.scaled_dot_product_attention.default", (Ref("q"), Ref("k"), Ref("v")), ("y",))
    facts = find_facts(chain(inputs, call, writes="y"))
    product = 2 * 2 * 4 * 32 * 32 * 16
    assert facts.forward_flops == 2 * product
    assert facts.backward_flops == 5 * product
    assert set(facts.reads_kept) == {"q", "k", "v"}
    assert facts.writes_kept == ("y",)
    assert facts.kept_bytes == (2 * 4 * 32 * 16 + 2 * 4 * 32) * 4  # the result and its log-sum-exp


def test_views_keep_and_move_nothing():
    facts = find_facts(pointwise("aten.reshape.default", [4, 32]))
    assert facts.kept_bytes == facts.traffic_bytes == facts.forward_peak_bytes == 0


def test_views_lie_in_what_they_are_cut_from():
    facts = find_facts(pointwise("aten.select.int", 0, 1))
    assert (facts.lies_in, facts.extents) == ({"y": "x"}, {})
    parts = ("aten.split.Tensor", (Ref("y"), 8, 1), ("a", "b"))
    facts = find_facts(linear(32, 24, 16, parts, writes="a b"))
    assert (facts.lies_in, facts.extents) == ({"b": "a"}, {"a": 32 * 16 * 4})


def test_inference_keeps_nothing():
    facts = find_facts(linear(32, 24, 16, ("aten.gelu.default", (Ref("y"),), ("z",)), writes="z"), False)
    assert facts.kept_bytes == 0
    assert facts.reads_kept == facts.writes_kept == ()
    assert facts.parameters_kept == {}
    assert (facts.backward_flops, facts.backward_peak_bytes) == (0.0, 0)
    assert facts.forward_flops == 2 * 32 * 24 * 16
    assert facts.forward_peak_bytes == 2 * 32 * 16 * 4


def test_backward_peak_of_a_linear():
    """At its end the incoming gradient and those of input, weight and bias are there together."""
    facts = find_facts(linear(32, 24, 16))
    assert facts.backward_peak_bytes == 4 * (32 * 16 + 32 * 24 + 16 * 24 + 16)


def joined(*more: tuple[Any, ...], writes: str = "y") -> Workload:
    """8 x 4 and 8 x 12 put side by side."""
    inputs = {"a": ((8, 4), "read"), "b": ((8, 12), "read")}
    return chain(inputs, ("aten.cat.default", ([Ref("a"), Ref("b")], 1), ("y",)), *more, writes=writes)


def test_a_concatenation_hands_on_slices_of_its_gradient():
    facts = find_facts(joined())
    assert facts.gradient_extents == dict.fromkeys("ab", 4 * 8 * 16)
    assert facts.backward_peak_bytes == 4 * 8 * 16  # nothing is copied


def test_slices_of_a_gradient_made_inside():
    facts = find_facts(joined(("aten.gelu.default", (Ref("y"),), ("z",)), writes="z"))
    assert facts.gradient_extents == dict.fromkeys("ab", 4 * 8 * 16)


def test_a_total_hands_on_one_number():
    assert find_facts(pointwise("aten.sum.default")).gradient_extents == {"x": 4}
    assert find_facts(pointwise("aten.gelu.default")).gradient_extents == {}


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


def test_backward_lets_go_of_what_it_used():
    """Through tanh, a chain of two: the incoming gradient and tanh's result are gone when the linear runs."""
    work = linear(32, 24, 16, ("aten.tanh.default", (Ref("y"),), ("z",)), writes="z")
    facts = find_facts(work)
    hidden = 32 * 16 * 4
    assert facts.kept_bytes == hidden
    at_tanh = hidden + hidden + hidden  # tanh's result, its gradient, the gradient of its input
    at_linear = hidden + 4 * (32 * 24 + 16 * 24 + 16)
    assert facts.backward_peak_bytes == max(at_tanh, at_linear) - facts.kept_bytes


def test_forward_lets_go_of_what_nobody_needs():
    calls = [("aten.neg.default", (Ref(a),), (b,)) for a, b in ["xa", "ab", "bc", "cd"]]
    facts = find_facts(chain({"x": ((8, 16), "read")}, *calls, writes="d"))
    assert (facts.kept_bytes, facts.forward_peak_bytes) == (0, 2 * 8 * 16 * 4)


def test_nothing_is_really_allocated():
    """A terabyte of tensors."""
    facts = find_facts(linear(1 << 19, 1 << 18, 1 << 18))
    assert facts.forward_flops == 2.0 ** (1 + 19 + 18 + 18)
    assert facts.forward_peak_bytes == 4 << 37


def test_records_come_back():
    facts = find_facts(linear(32, 24, 16, ("aten.gelu.default", (Ref("y"),), ("z",)), writes="z"))
    assert Facts.from_record(facts.to_record()) == facts
    assert Facts.from_record(json.loads(json.dumps(facts.to_record()))) == facts


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
    assert facts.backward_parameters_peak_bytes < facts.backward_peak_bytes
