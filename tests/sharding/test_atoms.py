"""Atoms by hand: what every view of a dim agrees on, and what it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.capture import capture
from tensoropt.ops.families.batch_norm_steps import batch_norm_steps
from tensoropt.ops.families.views import refine
from tensoropt.ops.layouts import chunk, local_shape, placement_code, placement_name
from tensoropt.sharding.atoms import AtomGraph, refine_graph, refine_in_place_of
from tests.models import Call
from tests.sharding.models import graph_of


def refined(function, *args, **parameters) -> AtomGraph:
    """Atoms of ``function(module, *args)``; a loss without opinion about dims is added."""
    return refine_graph(capture(Call(function, **parameters), args, loss=lambda y: y.exp().sum()).graph)


def atoms_of(graph: AtomGraph, key: str):
    (tensor,) = [t for t in graph.graph.tensors.values() if t.key == key]
    return graph.atoms[tensor.name]


def result(graph: AtomGraph, target: str, index: int = 0):
    op = [op for op in graph.graph.operators if op.target.startswith(f"aten.{target}.")][index]
    return graph.atoms[op.outputs[0]]


def linear(m, x):
    return torch.nn.functional.linear(x, m.w)


def test_a_fused_projection_has_the_atoms_of_all_its_views():
    """``3 * heads * d``: split in three, then viewed as heads; the weight's rows follow."""

    def forward(m, x):
        q, k, v = linear(m, x).split(8, -1)
        heads = [part.view(2, 5, 4, 2).transpose(1, 2) for part in (q, k, v)]
        return torch.nn.functional.scaled_dot_product_attention(*heads)

    graph = refined(forward, torch.randn(2, 5, 6), w=(24, 6))
    assert atoms_of(graph, "w") == ((3, 4, 2), (6,))
    assert result(graph, "linear") == ((2,), (5,), (3, 4, 2))
    space = graph.spaces[next(op.name for op in graph.graph.operators if "linear" in op.target)]
    assert [(d.name, d.size) for d in space.dims[2:5]] == [
        ("out_features.0", 3),
        ("out_features.1", 4),
        ("out_features.2", 2),
    ]


def test_only_the_heads_of_a_fused_projection_can_travel_to_attention():
    """The atom of three is a piece index: the split into q, k and v must see all of it."""
    graph = refine_graph(graph_of("gpt2"))
    split = next(op for op in graph.graph.operators if op.target.startswith("aten.split"))
    dims = graph.spaces[split.name].dims
    assert [(d.name, d.size, d.splittable) for d in dims if d.name.startswith("piece")] == [
        ("piece", 3, False)
    ]


def test_grouped_query_heads():
    """Queries have ``kv heads x group`` heads, keys only the former: they share the outer atom."""

    def forward(m, x):
        q = torch.nn.functional.linear(x, m.wq).view(2, 5, 8, 3).transpose(1, 2)
        k = torch.nn.functional.linear(x, m.wk).view(2, 5, 2, 3).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    graph = refined(forward, torch.randn(2, 5, 6), wq=(24, 6), wk=(6, 6))
    assert atoms_of(graph, "wq") == ((2, 4, 3), (6,))
    assert atoms_of(graph, "wk") == ((2, 3), (6,))


def test_merged_batch_and_sequence_stay_apart():
    graph = refined(lambda m, x: linear(m, x.flatten(0, 1)).view(4, 3, 5), torch.randn(4, 3, 6), w=(5, 6))
    assert result(graph, "linear") == ((4, 3), (5,))


def test_atoms_travel_through_contractions_and_pointwise_operators():
    """The second weight's columns see the heads that the first one's rows were viewed as."""

    def forward(m, x):
        h = torch.nn.functional.linear(x, m.w).view(2, 4, 3).transpose(1, 2).reshape(2, 12)
        return torch.nn.functional.linear(torch.relu(h), m.v)

    graph = refined(forward, torch.randn(2, 6), w=(12, 6), v=(5, 12))
    assert atoms_of(graph, "w") == ((4, 3), (6,))
    assert atoms_of(graph, "v") == ((5,), (3, 4))


def test_conflicting_views_keep_the_dim_whole_where_they_meet():
    """24 = 4 x 6 here and 6 x 4 there: 6 and 4 are no chain, so one of the views splits nothing."""

    def forward(m, x):
        h = torch.nn.functional.linear(x, m.w)
        return h.view(2, 4, 6).exp().sum() + h.view(2, 6, 4).exp().sum()

    graph = refined(forward, torch.randn(2, 5), w=(24, 5))
    views = [op for op in graph.graph.operators if "view" in op.target]
    splittable = [{d.size for d in graph.spaces[v.name].dims if d.splittable and d.size != 2} for v in views]
    assert sorted(map(len, splittable)) == [0, 2]
    assert atoms_of(graph, "w")[0] in ((4, 6), (6, 4))
    for name, space in graph.spaces.items():  # atom j of a tensor is loop j of its operand, always
        for operand in (*space.reads, *space.writes):
            sizes = tuple(space.dims[loop].size for dim in operand.dims for loop in dim)
            assert sizes == graph.atom_sizes(operand.tensor), name


def test_a_channel_shuffle_leaves_grouped_convolutions_their_groups():
    """A depthwise convolution between a shuffle and a grouped one: a view gives way, not what computes."""
    graph = refine_graph(graph_of("channel-shuffle"))
    spaces = [graph.spaces[op.name] for op in graph.graph.operators if "conv2d" in op.target]
    split = [{d.name.partition(".")[0] for d in space.dims if d.splittable} for space in spaces]
    assert split == [{"batch", "out_channels", "in_channels"}] + [{"batch", "groups"}] * 3


def test_dims_of_size_one_and_zero():
    graph = refined(lambda m, x: (x.unsqueeze(1) * m.w)[:, :0], torch.randn(4, 3), w=3)
    assert result(graph, "unsqueeze") == ((4,), (), (3,))
    assert result(graph, "slice") == ((4,), (0,), (3,))


def test_only_parameter_dims_may_be_uneven():
    """A vocabulary is cut unevenly wherever it goes; the batch is not, though its size may be odd."""

    def forward(m, x):
        return torch.nn.functional.linear(torch.nn.functional.embedding(x, m.w), m.w)

    graph = refined(forward, torch.randint(0, 13, (3, 5)), w=(13, 4))
    uneven = {d.name for space in graph.spaces.values() for d in space.dims if d.uneven}
    (op,) = [op for op in graph.graph.operators if "linear" in op.target]
    assert {d.name: d.uneven for d in graph.spaces[op.name].dims} == {
        "d0": False,
        "d1": False,
        "out_features": True,
        "in_features": False,
    }
    assert "vocabulary" in uneven


# -- the arithmetic -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "common"),
    [
        ((12,), (3, 4), (3, 4)),
        ((2, 6), (4, 3), (2, 2, 3)),
        ((4, 6), (6, 4), None),
        ((2, 3, 4), (6, 4), (2, 3, 4)),
        ((5,), (5,), (5,)),
    ],
)
def test_common_refinement(left, right, common):
    assert refine(left, right) == common
    assert refine(right, left) == common


@given(st.lists(st.integers(2, 4), min_size=1, max_size=4), st.data())
def test_a_refinement_of_coarser_views_is_found(factors, data):
    """Any two ways to merge the same factors have a common refinement no finer than the factors."""

    def merged():
        sizes = [factors[0]]
        for factor in factors[1:]:
            if data.draw(st.booleans()):
                sizes[-1] *= factor
            else:
                sizes.append(factor)
        return tuple(sizes)

    left, right = merged(), merged()
    common = refine(left, right)
    assert common is not None
    assert len(common) <= len(factors)
    assert len(common) >= max(len(left), len(right))


@pytest.mark.parametrize("shuffled", [False, True])
def test_operators_in_place_of_others_get_the_atoms_around_them(shuffled):
    """As if the new graph were refined whole; the channels of a shuffle are two atoms."""

    def forward(m, x):
        x = m.norm(torch.nn.functional.conv2d(x, m.w))
        return x.view(4, 2, 6, 5, 5).transpose(1, 2).reshape(4, 12, 5, 5) if shuffled else x

    model = Call(forward, norm=torch.nn.BatchNorm2d(12), w=(12, 3, 1, 1))
    found = capture(model, (torch.randn(4, 3, 5, 5),), loss=lambda y: y.exp().sum(), mode="train").graph
    before = refine_graph(found)
    (norm,) = (op for op in found.operators if "batch_norm" in op.target)
    steps = batch_norm_steps(norm, found.tensors)
    operators = [new for op in found.operators for new in (steps[:3] if op is norm else (op,))]
    kept = {name: tensor for name, tensor in found.tensors.items() if name not in norm.outputs[1:3]}
    tensors = {**kept, **{tensor.name: tensor for tensor in steps.tensors}}
    graph = replace(found, tensors=tensors, operators=tuple(operators))
    after, whole = refine_in_place_of(before, graph, steps[:3]), refine_graph(graph)
    assert after.atoms == whole.atoms
    assert after.spaces == whole.spaces
    assert after.atoms[steps.tensors[0].name] == ((2,), (2, 6) if shuffled else (12,))
    assert all(after.atoms[name] == before.atoms[name] for name in kept)


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_cover_a_dim_in_order(size, parts):
    pieces = [chunk(size, parts, index) for index in range(parts)]
    assert [i for start, length in pieces for i in range(start, start + length)] == list(range(size))
    assert [len(p) for p in torch.arange(size).chunk(parts)] == [n for _, n in pieces if n] or size == 0


def test_local_shapes():
    atoms = ((4,), (3, 4, 2))
    assert local_shape(atoms, (0, 2), (2, 4)) == (2, 6)
    assert local_shape(atoms, (2, 2), (2, 2)) == (4, 6)
    assert local_shape(((5,),), (0,), (2,)) == (3,)
    assert local_shape(((5,),), (0,), (2,), (1,)) == (2,)


def test_placement_names():
    for code in (-3, -2, -1, 0, 7):
        assert placement_code(placement_name(code)) == code
    with pytest.raises(ValueError, match="'S0' is not a placement"):
        placement_code("S0")


@pytest.mark.parametrize("kind", ["lookup", "loss"])
def test_what_is_found_by_its_place_is_cut_into_blocks_only(kind: str):
    """A weight that is looked up, or makes the classes of a loss, and elsewhere a matrix whose dim is taken
    apart: rows that lie apart have no beginning."""

    def looked_up(m, x, index):
        rows = torch.nn.functional.embedding(index, m.w)
        return rows.sum(1) + (x @ m.w.T).unflatten(-1, (3, 4)).square().sum((1, 2)).unsqueeze(-1)

    def compared(m, x, index):
        scores = x @ m.w.T
        apart = scores.unflatten(-1, (3, 4)).exp().sum((1, 2))
        return torch.nn.functional.cross_entropy(scores, index[:, 0]) + apart

    call = looked_up if kind == "lookup" else compared
    graph = refined(call, torch.randn(4, 8), torch.randint(0, 12, (4, 5)), w=(12, 8))
    wanted, loop = {"lookup": ("embedding", "vocabulary"), "loss": ("cross_entropy_loss", "classes")}[kind]
    (op,) = [op for op in graph.graph.operators if op.target.startswith(f"aten.{wanted}.")]
    cut = {dim.name: dim.splittable for dim in graph.spaces[op.name].dims}
    assert (cut[f"{loop}.0"], cut[f"{loop}.1"]) == (True, False)
