"""Mixtures of experts: grouped products split over rows, features and experts; counts add up."""

import pytest
import torch

from tensoropt.capture import capture
from tensoropt.ops.index_space import operand_placement
from tensoropt.ops.layouts import PARTIAL
from tensoropt.sharding.atoms import refine_graph
from tests.models import Call
from tests.sharding.graph_check import check_graph


def experts(m, x, expert):
    """Rows sorted by expert meet the matrix of theirs; where each expert's rows end is counted."""
    order = expert.sort().indices
    counts = torch.histc(expert.float(), bins=4, min=0, max=3)
    ends = counts.cumsum(0, dtype=torch.int32)
    product = torch.ops.transformers.grouped_mm_fallback((x * m.scale)[order], m.weight, ends)
    return product.square().sum()


def experts_graph():
    pytest.importorskip("transformers.integrations.moe")
    model = Call(experts, scale=16, weight=(4, 16, 8))
    return refine_graph(capture(model, (torch.randn(16, 16), torch.randint(0, 4, (16,)))).graph)


def test_a_grouped_product_splits_four_ways():
    atoms = experts_graph()
    (op,) = [op for op in atoms.graph.operators if "grouped_mm" in op.target]
    dims = {d.name for d in atoms.spaces[op.name].dims if d.splittable}
    assert dims == {"rows", "in_features", "experts", "out_features"}
    report = check_graph(atoms, thorough=True)
    assert not report.mismatches, str(report)
    assert not report.unknown


def test_counts_of_parts_add_up():
    atoms = experts_graph()
    (op,) = [op for op in atoms.graph.operators if "histc" in op.target]
    space = atoms.spaces[op.name]
    (loop,) = [i for i, dim in enumerate(space.dims) if dim.splittable]
    assert loop in space.reads[0].loops
    assert operand_placement(space, space.writes[0], loop, written=True) == PARTIAL
