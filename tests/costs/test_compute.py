"""Seconds: measured records as they are, and what prices the rest."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tensoropt.cluster import DeviceKind, load_cluster
from tensoropt.costs.compute import MeasuredCompute, SlowestCompute, measurement_prefix, processor_name
from tensoropt.costs.roofline import RooflineCompute
from tensoropt.errors import MeasurementError
from tensoropt.graph import Ref
from tensoropt.ops.calls import LocalCall
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import TensorSpec, Workload


def work(*functions: str, dtype: str = "float32") -> Workload:
    calls = tuple((LocalCall(f, (Ref("x"),), {}), (f"y{i}",)) for i, f in enumerate(functions))
    return Workload((("x", TensorSpec((4,), dtype, True), "read"),), calls, None, ("y0",), {})


def facts(flops: float = 0.0, traffic: int = 0) -> Facts:
    return Facts(0, (), (), {}, flops, 2 * flops, traffic, 0, 0, 0, 0)


def test_measured_records():
    fine, failed, unknown = work("aten.add.Tensor"), work("aten.neg.default"), work("aten.exp.default")
    records = {fine.key: {"forward_s": 1.5, "backward_s": 2.5}, failed.key: {"error": "out of memory"}}
    measured = MeasuredCompute(records, 1e-9)
    assert measured.seconds(fine, facts()) == (1.5, 2.5)
    assert measured.seconds(failed, facts()) == (math.inf, math.inf)
    with pytest.raises(MeasurementError, match=r"aten.exp\(4\) was not measured"):
        measured.seconds(unknown, facts())


def test_what_has_no_record_is_priced_by_the_rest():
    known, unknown = work("aten.add.Tensor"), work("aten.exp.default")
    rest = RooflineCompute(load_cluster("dgx-v100").device, "adam")
    found = MeasuredCompute({known.key: {"forward_s": 1.5, "backward_s": 2.5}}, 1e-9, rest)
    assert (found.source_of(known), found.source_of(unknown)) == ("measured", "data sheet")
    assert found.seconds(unknown, facts(1e12)) == rest.seconds(unknown, facts(1e12))


def test_what_has_to_run_although_it_failed_is_priced_by_the_rest():
    fine, lost = work("aten.add.Tensor"), work("aten.exp.default")
    rest = RooflineCompute(load_cluster("dgx-v100").device, "adam")
    records = {fine.key: {"forward_s": 1.5, "backward_s": 2.5}, lost.key: {"error": "it did not end"}}
    found = MeasuredCompute(records, 1e-9, rest, lost={lost.key}, source="measured")
    assert found.seconds(lost, facts(1e12)) == rest.seconds(lost, facts(1e12))
    assert found.seconds(fine, facts()) == (1.5, 2.5)
    assert (found.source, found.source_of(fine), found.source_of(lost)) == (
        "measured",
        "measured",
        "data sheet",
    )


def test_mixed_kinds_go_at_the_pace_of_the_slower_one_for_each_operator():
    """Half the FLOP/s on the one, half the memory bandwidth on the other."""
    base = load_cluster("dgx-v100").device
    kinds = (
        replace(base, flops={"float32": base.flops["float32"] / 2}),
        replace(base, memory_bandwidth=base.memory_bandwidth / 2),
    )
    single = [MeasuredCompute({}, r.optimizer_s_per_element, r) for r in map(roofline, kinds)]
    both, some = SlowestCompute(single), work("aten.exp.default")
    busy, moving = facts(flops=1e13), facts(traffic=10**10)
    assert both.seconds(some, busy) == single[0].seconds(some, busy) > single[1].seconds(some, busy)
    assert both.seconds(some, moving) == single[1].seconds(some, moving) > single[0].seconds(some, moving)
    assert both.optimizer_s_per_element == single[1].optimizer_s_per_element
    assert (both.source, both.source_of(some)) == ("data sheet", "data sheet")


def roofline(kind: DeviceKind) -> RooflineCompute:
    return RooflineCompute(kind, "adam")


def test_prefix_tells_machines_and_modes_apart():
    assert measurement_prefix(2, 1, True) != measurement_prefix(2, 1, False)
    assert measurement_prefix(2, 1, True) != measurement_prefix(4, 1, True)
    assert measurement_prefix(2, 1, True).startswith(processor_name())
    assert measurement_prefix(1, 1, True, "H100-80GB").startswith("H100-80GB/")
