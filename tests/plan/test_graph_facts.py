"""What names and rates read of a graph, without timing anything."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import tensoropt
from tensoropt.cluster import DeviceKind, reached_by
from tensoropt.exploration.rates import RatesOf
from tensoropt.ops.calls import CostClass
from tensoropt.plan.graph_facts import GraphFacts

READY_MADE = Path(__file__).parents[2] / "app" / "data" / "gpt2-dgx-h100"


def test_products_weigh_their_flop_and_everything_else_its_bytes():
    found = tensoropt.load(READY_MADE)
    graph, device = found.recorded.graph, found.cluster["kinds"][0]
    weights = GraphFacts.of(graph, found.cluster).weights
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


def test_a_saved_exploration_needs_no_pytorch_for_names_and_rates(tmp_path):
    old = tensoropt.load(READY_MADE)
    # Its points count tensors alone: what a process needs beside them is estimated, with PyTorch.
    points = tuple(point.changed(terms={"context": 1.0}) for point in old.points)
    old = replace(old, points=points, others=())
    old.save(tmp_path)
    asked = (
        "import sys; from tensoropt.cli.parser import main; "
        f"main(['choose', {str(tmp_path)!r}, '--memory', '60GiB', '--json']); "
        "assert 'torch' not in sys.modules, 'PyTorch was loaded'"
    )
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    told = json.loads(said)
    row = told["answer"]["point"] - 1
    assert told["name"] == old.names[row]
    assert told["rates"]["tokens_per_s"] == RatesOf(old).of(row).tokens_per_s
    assert tensoropt.load(tmp_path).graph_facts == old.graph_facts
