"""Experts are counted in the same way on the meta device and on the CPU."""

from __future__ import annotations

import pytest

from tensoropt import zoo
from tensoropt.capture import capture
from tensoropt.capture.counting import COUNT


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_experts_are_counted_in_floats(device: str) -> None:
    built = zoo.build("mixtral-tiny", device=device)
    graph = capture(built.model, built.args, built.kwargs).graph
    counts = [op for op in graph.operators if op.target == COUNT]
    assert len(counts) == 2
    assert {graph.tensors[n].dtype for op in counts for n in (*op.inputs(), *op.outputs)} == {"float32"}
    casts = [graph.producer[n] for op in counts for n in op.inputs()]
    assert {op.kwargs["dtype"].name for op in casts} == {"float32"}
