"""What operators and parameters weigh, without timing anything."""

from __future__ import annotations

from pathlib import Path

import pytest

import tensoropt
from tensoropt.cluster import DeviceKind, reached_by
from tensoropt.ops.calls import CostClass
from tensoropt.plan.shares import Weights, weights_of

READY_MADE = Path(__file__).parents[2] / "app" / "data" / "gpt2-dgx-h100"


def test_products_weigh_their_flop_and_everything_else_its_bytes() -> None:
    found = tensoropt.load(READY_MADE)
    graph, device = found.recorded.graph, found.cluster["kinds"][0]
    weights = weights_of(graph, found.cluster)
    assert set(weights.seconds) == {op.name for op in graph.operators}
    linear, gelu, view = (
        next(op for op in graph.operators if op.target.startswith(f"aten.{what}"))
        for what in ("addmm", "tanh", "view")
    )
    kind, reached = DeviceKind(**device), reached_by(DeviceKind(**device))
    x, out = (graph.tensors[name] for name in (linear.inputs()[1], linear.outputs[0]))
    peak = device["flops"][out.dtype] * reached.of(CostClass.MATRIX)
    assert weights.seconds[linear.name] == pytest.approx(2.0 * out.elements * x.shape[-1] / peak)
    made = graph.tensors[gelu.outputs[0]].bytes
    bandwidth = kind.memory_bandwidth * reached.memory
    assert weights.seconds[gelu.name] == pytest.approx(2 * made / bandwidth)
    assert weights.seconds[view.name] == 0.0
    assert sum(weights.sizes.values()) == pytest.approx(4.0 * found.model.parameters)


def test_without_a_graph_everything_weighs_the_same() -> None:
    weights = weights_of(None, {})
    assert weights == Weights()
    assert (weights.of_operators(("a", "b")), weights.of_parameter("w")) == (1.0, 1.0)
