"""Losses whose mean weighs what it meets, and bags of embeddings: every loop, and two at a time."""

from __future__ import annotations

import pytest

from tensoropt.sharding.atoms import refine_graph
from tests.sharding.calls import graph_of_call
from tests.sharding.graph_check import check_graph

LOSSES = (
    "cross-entropy",
    "cross-entropy-weighted",
    "cross-entropy-weighted-sum",
    "cross-entropy-weighted-none",
    "cross-entropy-weighted-smooth",
    "cross-entropy-smooth",
    "cross-entropy-image",
    "cross-entropy-soft-weighted",
    "nll-weighted",
)
BAGS = {
    "embedding-bag": {"bag", "vocabulary", "hidden"},
    "embedding-bag-sum": {"bag", "vocabulary", "hidden"},
    "embedding-bag-max": {"bag", "hidden"},
    "embedding-bag-factors": {"bag", "vocabulary", "hidden"},
    "embedding-bag-padding": {"bag", "vocabulary", "hidden"},
    "embedding-bag-unequal": {"vocabulary", "hidden"},
}


def loops(name: str, target: str) -> set[str]:
    """Names of the loops that an operator of this kind may split."""
    atoms = refine_graph(graph_of_call(name))
    (op,) = [op for op in atoms.graph.operators if target in op.target]
    return {dim.name.split(".")[0] for dim in atoms.spaces[op.name].dims if dim.splittable}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    """Hard targets let classes split."""
    report = check_graph(graph_of_call(name), parts=(2, 4), thorough=True)
    assert not report.mismatches, str(report)
    assert not report.unknown
    assert ("classes" in loops(name, "loss")) == (name.startswith("cross") and "soft" not in name)


@pytest.mark.parametrize("name", BAGS)
def test_bags(name):
    report = check_graph(graph_of_call(name), parts=(2, 4), thorough=True)
    assert not report.mismatches, str(report)
    assert loops(name, "embedding_bag") == BAGS[name]
