"""Seconds: measured records as they are, and what prices the rest.

The roofline worked out by hand, and what is fitted to timed work.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.cluster import ASSUMED, DeviceKind, host_seconds, load_cluster, reached_by
from tensoropt.cluster.local import processor_name
from tensoropt.costs.compute import (
    _FEWEST_SAMPLES,
    MeasuredCompute,
    RooflineCompute,
    Sample,
    SlowestCompute,
    class_of,
    description,
    fit_efficiencies,
    fit_errors,
    measurement_prefix,
    samples_of,
)
from tensoropt.errors import MeasurementError
from tensoropt.graph import Ref
from tensoropt.ops.calls import LocalCall
from tensoropt.profiling.facts import CallWork, Facts
from tensoropt.profiling.workload import TensorSpec, Workload
from tensoropt.ranks.kernel_settings import KernelSettings


def work(*functions: str, dtype: str = "float32") -> Workload:
    calls = tuple((LocalCall(f, (Ref("x"),), {}), (f"y{i}",)) for i, f in enumerate(functions))
    return Workload((("x", TensorSpec((4,), dtype, True), "read"),), calls, None, ("y0",), {})


def facts(flops: float = 0.0, traffic: int = 0) -> Facts:
    return Facts(0, (), (), {}, flops, 2 * flops, traffic, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def device():
    return load_cluster("dgx-v100").device


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        (("aten.linear.default",), "matrix product"),
        (("aten.view.default", "aten.addmm.default"), "matrix product"),
        (("aten.conv2d.default",), "convolution"),
        (("kernels.cross_entropy",), "loss"),
        (("aten.add.Tensor", "aten.layer_norm.default"), "norm"),
        (("aten.add.Tensor",), "element-wise"),
    ],
)
def test_a_workload_has_the_class_of_its_first_heavy_call(functions, expected):
    assert class_of(work(*functions)) == expected


def scaled(factor: float, count: int = 40, cls: str = "matrix product") -> list[Sample]:
    """Work that reaches 1/factor of the ideal, of sizes over four decades."""
    ideals = [10 ** (-6 + 4 * i / count) for i in range(count)]
    return [Sample(str(i), cls, (t, 2 * t), (factor * t, 3 * factor * t)) for i, t in enumerate(ideals)]


@given(st.floats(1.0, 50.0))
def test_a_constant_efficiency_is_found_again(factor):
    found = fit_efficiencies(scaled(factor))
    for ideal in (1e-7, 1e-5, 1e-3, 1.0):
        assert found.seconds("matrix product", "forward", ideal) == pytest.approx(factor * ideal, rel=1e-6)
        assert found.seconds("matrix product", "backward", ideal) == pytest.approx(
            1.5 * factor * ideal, rel=1e-6
        )
    assert all(error.median < 1e-6 and error.samples == 40 for error in found.errors)


def test_small_work_that_costs_a_launch_has_a_low_efficiency():
    samples = [
        Sample(str(i), "norm", (t, 0.0), (t + 1e-5, 0.0))
        for i, t in enumerate(10 ** (-7 + 5 * i / 60) for i in range(60))
    ]
    found = fit_efficiencies(samples)
    assert found.seconds("norm", "forward", 1e-7) == pytest.approx(1e-5, rel=0.5)
    assert found.seconds("norm", "forward", 1e-2) == pytest.approx(1e-2, rel=0.1)
    assert ("norm", "backward") not in found.curves


def test_few_samples_fit_nothing(device):
    found = fit_efficiencies(scaled(3.0, _FEWEST_SAMPLES - 1))
    assert found.curves == {}
    roofline = RooflineCompute(device, "adam", found)
    assert roofline.source_of(work("aten.linear.default")) == "data sheet"


def test_errors_are_those_of_work_left_out():
    noisy = [
        Sample(str(i), s.cls, s.ideal, tuple(m * (2.0 if i % 2 else 0.5) for m in s.measured))
        for i, s in enumerate(scaled(1.0, 60))
    ]
    assert all(error.median > 0.3 for error in fit_efficiencies(noisy).errors)


def test_what_is_fitted_says_so_and_the_rest_is_of_the_data_sheet(device):
    roofline = RooflineCompute(device, "adam", fit_efficiencies(scaled(4.0)))
    product, addition = work("aten.linear.default"), work("aten.add.Tensor")
    assert roofline.source_of(product) == "fitted"
    assert roofline.source_of(addition) == "data sheet"
    assert roofline.seconds(product, facts(1e13))[0] == pytest.approx(4 * 1e13 / device.flops_of("float32"))
    assert roofline.seconds(product, facts())[0] == 0.0


def test_records_are_fitted_by_device_and_mode(device):
    describe = description(work("aten.linear.default"), facts(1e10, 10), device)
    records = [
        (f"{name}/torch/1x1/{mode}/{i}", {"forward_s": 1.0 + i, "backward_s": 2.0, **describe})
        for name in ("V100",)
        for mode in ("train", "inference")
        for i in range(10)
    ]
    records.append(("V100/torch/1x1/train/x", {"error": "out of memory", **describe}))
    records.append(("V100/torch/1x1/train/y", {"forward_s": 1.0, "backward_s": 1.0}))
    assert len(samples_of(records)) == 20
    assert set(fit_errors(records)) == {("cuda", "train"), ("cuda", "inference")}


KERNEL_S = host_seconds("cuda").kernel_s


def test_a_host_issues_what_launches_a_kernel(device):
    roofline, host = RooflineCompute(device, "adam"), host_seconds("cuda")
    both = work("aten.add.Tensor", "aten.reshape.default", "aten.gelu.default")
    assert roofline.host_seconds(both) == (2 * host.forward_call_s, 2 * host.backward_call_s)
    assert RooflineCompute(load_cluster("cpu:1").device, "adam").host_seconds(both) == (0.0, 0.0)
    assert host_seconds("cpu") is None
    assert min(host.forward_call_s, host.backward_call_s) > host.kernel_s > 0
    for source in (host.kernel_source, host.call_source, host.other_source):
        assert len(source) > 20


@pytest.mark.parametrize(
    ("call", "setting"),
    [
        ("linear.default", "matmul"),
        ("scaled_dot_product_attention.default", "matmul"),
        ("convolution.default", "convolution"),
    ],
)
def test_float32_is_computed_in_tf32_where_pytorch_is_set_to(device, call, setting):
    h100 = load_cluster("dgx-h100").device

    def seconds(kind: DeviceKind, precision: str, dtype: str = "float32") -> float:
        kernels = KernelSettings(**{setting: precision})
        roofline = RooflineCompute(kind, "adam", kernels=kernels)
        return roofline.seconds(work(f"aten.{call}", dtype=dtype), facts(1e13, 1000))[0] - KERNEL_S

    ratio = seconds(h100, "ieee") / seconds(h100, "tf32")
    assert ratio == pytest.approx(h100.flops["tf32"] / h100.flops["float32"])
    assert seconds(h100, "tf32", "bfloat16") == seconds(h100, "ieee", "bfloat16")
    assert seconds(device, "tf32") == seconds(device, "ieee")  # a V100 has none
    core = load_cluster("cpu:1").device
    assert seconds(core, "tf32") == seconds(core, "ieee")


def by_call(flops: float, *calls: CallWork) -> Facts:
    return replace(facts(flops, sum(c.traffic_bytes for c in calls)), work_of_calls=calls)


GB = CallWork(0.0, 10**9, 10**9)
PRODUCT, NORM = CallWork(1e13, 10**6, 10**6), CallWork(0.0, 6 * 10**9, 10**9)
BY_HAND = {
    # name: (calls, facts, FLOP at the peak, GB at the bandwidth, kernels)
    "a large product": (["linear.default"], facts(1e13, 1000), 1e13, 0, 1),
    "an addition": (["add.Tensor"], facts(0.0, 10**9), 0, 1, 1),
    "a view": (["reshape.default"], facts(), 0, 0, 0),
    "a view behind an addition": (["add.Tensor", "reshape.default"], facts(), 0, 0, 1),
    "a norm, which is one kernel": (["rms_norm.default"], by_call(0.0, NORM), 0, 1, 1),
    "one after the other": (["linear.default", "gelu.default"], by_call(1e13, PRODUCT, GB), 1e13, 1, 2),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_without_a_fit_kernels_of_a_gpu_are_bound_by_arithmetic_or_memory(device, name):
    calls, of, flops, gigabytes, kernels = BY_HAND[name]
    found = RooflineCompute(device, "adam").seconds(work(*(f"aten.{call}" for call in calls)), of)
    arithmetic = flops / (device.flops_of("float32") * ASSUMED.arithmetic)
    memory = gigabytes * 1e9 / (device.memory_bandwidth * ASSUMED.memory)
    forward = arithmetic + memory + kernels * KERNEL_S
    assert found == pytest.approx((forward, 2 * forward))


def test_fused_neighbours_are_one_kernel_of_a_gpu(device):
    """A chain reads and writes what its largest member does; a product cuts it."""
    wide, narrow = CallWork(0.0, 3 * 10**9, 3 * 10**9), CallWork(0.0, 2 * 10**9, 2 * 10**9)
    product = CallWork(0.0, 10**9, 10**9)
    chain = work("aten.mul.Tensor", "aten.gelu.default", "aten.linear.default", "aten.gelu.default")
    calls = by_call(0.0, wide, narrow, product, narrow)
    apart, fused = (RooflineCompute(device, "adam", fused=f).seconds(chain, calls) for f in (False, True))
    byte_s = 1 / (device.memory_bandwidth * ASSUMED.memory)
    assert apart[0] == pytest.approx(8e9 * byte_s + 4 * KERNEL_S)
    assert fused == pytest.approx((6e9 * byte_s + 3 * KERNEL_S, 12e9 * byte_s + 6 * KERNEL_S))


@pytest.mark.parametrize("cluster", ["dgx-v100", "cpu:1"])
def test_what_reads_nothing_with_a_gradient_has_no_backward(cluster):
    """Frozen first layers, masks, tables of positions: on data sheets as where it is measured."""
    trained = work("aten.linear.default")
    (name, spec, role), *_ = trained.inputs
    frozen = replace(trained, inputs=((name, replace(spec, requires_grad=False), role),))
    costs = RooflineCompute(load_cluster(cluster).device, "adam")
    for of in (facts(1e9, 10**6), by_call(1e9, CallWork(1e9, 10**6, 10**6))):
        forward, backward = costs.seconds(trained, of)
        assert backward > 0
        assert costs.seconds(frozen, of) == (forward, 0.0)
    assert costs.host_seconds(frozen) == (costs.host_seconds(trained)[0], 0.0)


def test_cpu_ranks_are_priced_as_a_group():
    core = load_cluster("cpu:1").device
    product, activation = CallWork(1e10, 10**6, 10**6), CallWork(0.0, 10**8, 10**8)
    both = work("aten.linear.default", "aten.gelu.default")
    of_group, of_calls = facts(1e10, 101 * 10**6), by_call(1e10, product, activation)
    roofline = RooflineCompute(core, "adam")
    assert roofline.seconds(both, of_calls) == roofline.seconds(both, of_group)


def test_classes_reach_shares_of_their_own():
    device = load_cluster("dgx-a100").device
    shares = reached_by(device)
    call = by_call(1e13, CallWork(1e13, 1000, 1000))
    for name, cls in (("linear", "matrix product"), ("scaled_dot_product_attention", "attention")):
        forward, _ = RooflineCompute(device, "adam").seconds(work(f"aten.{name}.default"), call)
        peak = device.flops_of("float32")
        assert forward == pytest.approx(1e13 / (peak * shares.of(cls)) + KERNEL_S)
    assert shares.of("attention") < shares.of("matrix product") < 1.0
    assert shares.of("recurrent") == ASSUMED.arithmetic
    assert reached_by(load_cluster("cpu:1").device) == reached_by(load_cluster("dgx-v100").device) == ASSUMED


def test_memory_bound_work_reaches_what_copies_reach():
    """Not what is left of a job's step, in which the host's seconds are."""
    for cluster in ("dgx-a100", "dgx-h100"):
        for dated in ("2023-05", "2024-05", ""):
            for compiled in (False, True):
                shares = reached_by(load_cluster(cluster).device, dated, compiled=compiled)
                assert 0.8 <= shares.memory <= 0.92


def test_older_kernels_take_longer():
    device = load_cluster("dgx-h100").device
    newest, older = reached_by(device), reached_by(device, "2023-05")
    middle = reached_by(device, "2024-05-17")
    assert reached_by(device, "2024-03") == older != middle == reached_by(device, "2024-12")
    assert reached_by(device, "2025-01") == newest != middle
    # Products as they were, attention by newer kernels; on an A100 nothing is newer.
    assert newest.of("matrix product") == middle.of("matrix product")
    assert newest.of("attention") > 1.5 * middle.of("attention")
    a100 = load_cluster("dgx-a100").device
    assert reached_by(a100) == reached_by(a100, "2024-05")
    # Products of large compiled jobs say nothing of eager ones.
    assert reached_by(a100, compiled=True).of("matrix product") > reached_by(a100).of("matrix product")
    assert RooflineCompute(a100, "adam", fused=True).reached == reached_by(a100, compiled=True)
    attention = work("aten.scaled_dot_product_attention.default")
    call = by_call(1e13, CallWork(1e13, 1000, 1000))
    new_s, old_s = (
        RooflineCompute(device, "adam", dated=of).seconds(attention, call)[0] for of in ("", "2023-05")
    )
    ratio = newest.of("attention") / older.of("attention")
    assert (old_s - KERNEL_S) / (new_s - KERNEL_S) == pytest.approx(ratio)
    assert ratio > 1.0


def test_half_precision_is_faster(device):
    single, half = (
        RooflineCompute(device, "adam").seconds(work("aten.linear.default", dtype=dtype), facts(1e13))[0]
        for dtype in ("float32", "float16")
    )
    assert half < single


@pytest.mark.parametrize(
    ("optimizer", "values"), [("sgd", 3), ("momentum", 8), ("adam", 18), ("adam_fused", 7)]
)
def test_an_optimizer_step_is_bound_by_memory(device, optimizer, values):
    """Kernel by kernel; the fused one reads parameter, gradient and state and writes parameter and state."""
    per_element = RooflineCompute(device, optimizer).optimizer_s_per_element
    assert per_element == pytest.approx(4 * values / (device.memory_bandwidth * ASSUMED.memory))


def test_measured_records():
    fine, failed, unknown = work("aten.add.Tensor"), work("aten.neg.default"), work("aten.exp.default")
    records = {fine.key: {"forward_s": 1.5, "backward_s": 2.5}, failed.key: {"error": "out of memory"}}
    measured = MeasuredCompute(records, 1e-9)
    assert measured.seconds(fine, facts()) == (1.5, 2.5)
    assert measured.seconds(failed, facts()) == (math.inf, math.inf)
    with pytest.raises(MeasurementError, match=r"aten.exp\(4\) was not measured"):
        measured.seconds(unknown, facts())


def test_what_has_no_record_or_failed_is_priced_by_the_rest():
    known, lost, unknown = (work(f"aten.{name}") for name in ("add.Tensor", "neg.default", "exp.default"))
    rest = RooflineCompute(load_cluster("dgx-v100").device, "adam")
    records = {known.key: {"forward_s": 1.5, "backward_s": 2.5}, lost.key: {"error": "it did not end"}}
    found = MeasuredCompute(records, 1e-9, rest, source="measured")
    assert found.seconds(known, facts()) == (1.5, 2.5)
    assert (found.source, found.source_of(known)) == ("measured", "measured")
    for other in (lost, unknown):
        assert found.source_of(other) == "data sheet"
        assert found.seconds(other, facts(1e12)) == rest.seconds(other, facts(1e12))


def test_mixed_kinds_go_at_the_pace_of_the_slower_one_for_each_operator():
    """Half the FLOP/s on the one, half the memory bandwidth on the other."""
    base = load_cluster("dgx-v100").device
    kinds = (
        replace(base, flops={"float32": base.flops["float32"] / 2}),
        replace(base, memory_bandwidth=base.memory_bandwidth / 2),
    )
    rooflines = [RooflineCompute(kind, "adam") for kind in kinds]
    single = [MeasuredCompute({}, r.optimizer_s_per_element, r, source="data sheet") for r in rooflines]
    both, some = SlowestCompute(single), work("aten.exp.default")
    busy, moving = facts(flops=1e13), facts(traffic=10**10)
    assert both.seconds(some, busy) == single[0].seconds(some, busy) > single[1].seconds(some, busy)
    assert both.seconds(some, moving) == single[1].seconds(some, moving) > single[0].seconds(some, moving)
    assert both.optimizer_s_per_element == single[1].optimizer_s_per_element
    assert (both.source, both.source_of(some)) == ("data sheet", "data sheet")


def test_prefix_tells_machines_and_modes_apart():
    assert measurement_prefix(2, 1, True) != measurement_prefix(2, 1, False)
    assert measurement_prefix(2, 1, True) != measurement_prefix(4, 1, True)
    assert measurement_prefix(2, 1, True).startswith(processor_name())
    assert measurement_prefix(1, 1, True, "H100-80GB").startswith("H100-80GB/")
