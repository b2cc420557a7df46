"""Seconds: the roofline worked out by hand, measured records as they are."""

from __future__ import annotations

import math

import pytest

from tensoropt.cluster import load_cluster
from tensoropt.costs.compute import (
    LAUNCH_S,
    MATRIX_EFFICIENCY,
    MEMORY_EFFICIENCY,
    MeasuredCompute,
    RooflineCompute,
    measurement_prefix,
    processor_name,
)
from tensoropt.costs.facts import Facts
from tensoropt.costs.workload import TensorSpec, Workload
from tensoropt.errors import MeasurementError
from tensoropt.graph import Ref
from tensoropt.sharding.local import LocalCall


def work(*functions: str, dtype: str = "float32") -> Workload:
    calls = tuple((LocalCall(f, (Ref("x"),), {}), (f"y{i}",)) for i, f in enumerate(functions))
    return Workload((("x", TensorSpec((4,), dtype, True), "read"),), calls, None, ("y0",), {})


def facts(flops: float = 0.0, traffic: int = 0) -> Facts:
    return Facts(0, (), (), {}, flops, 2 * flops, traffic, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def device():
    return load_cluster("dgx-v100").device


def test_a_large_product_is_bound_by_arithmetic(device):
    forward, backward = RooflineCompute(device, "adam").seconds(
        work("aten.linear.default"), facts(1e13, 1000)
    )
    peak = device.flops_of("float32") * MATRIX_EFFICIENCY
    assert forward == pytest.approx(1e13 / peak + LAUNCH_S)
    assert backward == pytest.approx(2e13 / peak + 2 * LAUNCH_S)


def test_an_addition_is_bound_by_memory(device):
    forward, backward = RooflineCompute(device, "adam").seconds(work("aten.add.Tensor"), facts(0.0, 10**9))
    bandwidth = device.memory_bandwidth * MEMORY_EFFICIENCY
    assert forward == pytest.approx(1e9 / bandwidth + LAUNCH_S)
    assert backward == pytest.approx(2e9 / bandwidth + 2 * LAUNCH_S)


def test_views_launch_nothing(device):
    roofline = RooflineCompute(device, "adam")
    assert roofline.seconds(work("aten.reshape.default"), facts())[0] == 0.0
    assert roofline.seconds(work("aten.add.Tensor", "aten.reshape.default"), facts())[0] == LAUNCH_S


def test_half_precision_is_faster(device):
    single, half = (
        RooflineCompute(device, "adam").seconds(work("aten.linear.default", dtype=dtype), facts(1e13))[0]
        for dtype in ("float32", "float16")
    )
    assert half < single


@pytest.mark.parametrize(("optimizer", "values"), [("sgd", 3), ("momentum", 5), ("adam", 7)])
def test_an_optimizer_step_is_bound_by_memory(device, optimizer, values):
    """Read parameter, gradient, state; write parameter, state."""
    per_element = RooflineCompute(device, optimizer).optimizer_s_per_element
    assert per_element == pytest.approx(4 * values / (device.memory_bandwidth * MEMORY_EFFICIENCY))


def test_measured_records():
    fine, failed, unknown = work("aten.add.Tensor"), work("aten.neg.default"), work("aten.exp.default")
    records = {fine.key: {"forward_s": 1.5, "backward_s": 2.5}, failed.key: {"error": "out of memory"}}
    measured = MeasuredCompute(records, 1e-9)
    assert measured.seconds(fine, facts()) == (1.5, 2.5)
    assert measured.seconds(failed, facts()) == (math.inf, math.inf)
    with pytest.raises(MeasurementError, match=r"aten.exp\(4\) was not measured"):
        measured.seconds(unknown, facts())


def test_prefix_tells_machines_and_modes_apart():
    assert measurement_prefix(2, 1, True) != measurement_prefix(2, 1, False)
    assert measurement_prefix(2, 1, True) != measurement_prefix(4, 1, True)
    assert measurement_prefix(2, 1, True).startswith(processor_name())
