"""A layer of experts as one operator: split over tokens, experts, features, and experts with an exchange."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tensoropt.graph import Operator, OperatorGraph, Ref, Tensor
from tensoropt.ops.calls import BY_VALUES, OperatorShard
from tensoropt.ops.families.routed_experts import EXPERTS, experts
from tensoropt.ops.index_space import NONE
from tensoropt.ops.kernels import SingleDevice
from tensoropt.ops.localise import localise
from tensoropt.sharding.atoms import AtomGraph, refine_graph
from tests.sharding.graph_check import check_graph

pytest.importorskip("transformers.integrations.moe")
TOKENS, CHOSEN, WIDTH, INNER, COUNT = 16, 2, 6, 8, 4
PRODUCT = "transformers.grouped_mm_fallback.default"
END = 2**63 - 1


def call(target, *args, results=("$y",)):
    return (target, args, (), results)


PLAIN = (
    call(PRODUCT, "$x", "$w0", "$ends", results=("$a",)),
    call("aten.silu.default", "$a", results=("$b",)),
    call(PRODUCT, "$b", "$w1", "$ends"),
)
GATED = (
    call("aten.transpose.int", "$w0", 1, 2, results=("$t",)),
    call(PRODUCT, "$x", "$t", "$ends", results=("$a",)),
    call("aten.split.Tensor", "$a", INNER, -1, results=("$b", "$c")),
    call("aten.silu.default", "$b", results=("$d",)),
    call("aten.mul.Tensor", "$d", "$c", results=("$e",)),
    call("aten.transpose.int", "$w1", 1, 2, results=("$u",)),
    call(PRODUCT, "$e", "$u", "$ends"),
)
ALTERNATING = (
    call("aten.index.Tensor", "$w2", ["$experts"], results=("$i",)),
    call(PRODUCT, "$x", "$w0", "$ends", results=("$a",)),
    call("aten.add.Tensor", "$a", "$i", results=("$j",)),
    call("aten.slice.Tensor", "$j", 1, 0, END, 2, results=("$b",)),
    call("aten.slice.Tensor", "$j", 1, 1, END, 2, results=("$c",)),
    call("aten.mul.Tensor", "$b", "$c", results=("$d",)),
    call(PRODUCT, "$d", "$w1", "$ends", results=("$e",)),
    call("aten.index.Tensor", "$w3", ["$experts"], results=("$k",)),
    call("aten.add.Tensor", "$e", "$k"),
)
BODIES = {
    "plain": (PLAIN, [(COUNT, WIDTH, INNER), (COUNT, INNER, WIDTH)]),
    "gated": (GATED, [(COUNT, 2 * INNER, WIDTH), (COUNT, WIDTH, INNER)]),
    "gate and biases": (
        ALTERNATING,
        [(COUNT, WIDTH, 2 * INNER), (COUNT, INNER, WIDTH), (COUNT, 2 * INNER), (COUNT, WIDTH)],
    ),
}


@cache
def atoms_of(name: str, tokens: int = TOKENS) -> AtomGraph:
    body, shapes = BODIES[name]
    weights = [Tensor(f"w{i}", s, "float32", "parameter", True, f"w{i}") for i, s in enumerate(shapes)]
    tensors = [
        Tensor("x", (tokens, WIDTH), "float32", "input", True),
        Tensor("choice", (tokens, CHOSEN), "int64", "input"),
        Tensor("scale", (tokens, CHOSEN), "float32", "input", True),
        *weights,
        Tensor("y", (tokens, WIDTH), "float32", "activation", True),
        Tensor("loss", (), "float32", "activation", True),
    ]
    refs = [Ref(weight.name) for weight in weights]
    layer = Operator("y", EXPERTS, (Ref("x"), Ref("choice"), Ref("scale"), refs, body, COUNT), {}, ("y",))
    total = Operator("loss", "aten.sum.default", (Ref("y"),), {}, ("loss",))
    graph = OperatorGraph({t.name: t for t in tensors}, (layer, total), ("x", "choice", "scale"), ("loss",))
    return refine_graph(graph)


@pytest.mark.parametrize("name", BODIES)
def test_every_way_to_split_gives_the_whole(name):
    """On one axis and on each pair, with a random router that prefers nobody."""
    atoms = atoms_of(name)
    ways = {dim.name for dim in atoms.spaces["y"].dims if dim.splittable}
    assert ways == {"rows", "experts", "features", "dispatch"}
    report = check_graph(atoms)
    assert not report.mismatches, str(report)


def test_a_body_that_is_not_understood_keeps_its_features_whole():
    odd = (*PLAIN[:1], call("aten.flip.default", "$a", [1], results=("$b",)), PLAIN[2])
    graph = atoms_of("plain").graph
    layer = graph.by_name["y"]
    args = (*layer.args[:4], odd, COUNT)
    atoms = refine_graph(replace(graph, operators=(replace(layer, args=args), graph.operators[1])))
    assert "features" not in {dim.name for dim in atoms.spaces["y"].dims}
    report = check_graph(atoms)
    assert not report.mismatches, str(report)


def test_experts_are_split_in_blocks_where_a_view_factors_their_number():
    """A reader of the weights by groups of experts: parts of a group would be no block of numbers."""
    graph = atoms_of("plain").graph
    more = [
        Tensor("groups", (2, COUNT // 2, WIDTH, INNER), "float32", "activation", True),
        Tensor("of_groups", (2,), "float32", "activation", True),
    ]
    view = Operator("groups", "aten.view.default", (Ref("w0"), list(more[0].shape)), {}, ("groups",))
    total = Operator("of_groups", "aten.sum.dim_IntList", (Ref("groups"), [1, 2, 3]), {}, ("of_groups",))
    tensors = {**graph.tensors, **{t.name: t for t in more}}
    outputs = (*graph.outputs, "of_groups")
    atoms = refine_graph(
        replace(graph, tensors=tensors, operators=(*graph.operators, view, total), outputs=outputs)
    )
    ways = {dim.name for dim in atoms.spaces["y"].dims if dim.splittable}
    assert ways == {"rows", "experts.0", "features", "dispatch"}


def shard(atoms: AtomGraph, way: str, mesh: tuple[int, ...], imbalance: float = 1.0) -> OperatorShard:
    """The layer with one loop split along the axes that are not of size 1, and so on for several loops."""
    names = {dim.name: i for i, dim in enumerate(atoms.spaces["y"].dims)}
    atoms = replace(atoms, graph=replace(atoms.graph, expert_imbalance=imbalance))
    choices = (NONE, *(names.get(one, NONE) for one in way.split()))
    return OperatorShard(atoms.graph.by_name["y"], atoms, choices, (1, *mesh))


ROWS = TOKENS * CHOSEN
EXPECTED = {
    ("dispatch", (2,), 1.0): ROWS // 2,
    ("dispatch", (2,), 1.5): ROWS // 2 * 3 // 2,
    ("dispatch", (4,), 1.0): ROWS // 4,
    ("dispatch", (4,), 100.0): ROWS,  # all there are
    ("experts", (2,), 1.0): ROWS // 2,
    ("experts", (2,), 1.25): ROWS // 2 * 5 // 4,
    ("experts", (4,), 9.0): ROWS,
    ("dispatch experts", (2, 2), 1.0): ROWS // 4,
    ("dispatch rows", (2, 2), 1.0): ROWS // 4,
}


@pytest.mark.parametrize(("way", "mesh", "imbalance"), EXPECTED)
def test_rows_are_expected_to_be_shared_evenly_times_the_imbalance(way, mesh, imbalance):
    rows = EXPECTED[way, mesh, imbalance]
    local = localise(shard(atoms_of("gated"), way, mesh, imbalance))
    assert local.args[-1] == rows
    sent = [one for one in local.collectives if one.kind == BY_VALUES]
    assert [one.backward for one in sent] == [False, False, True, True] * ("dispatch" in way)
    assert {one.bytes for one in sent} <= {rows * WIDTH * 4}


@pytest.mark.parametrize(("way", "mesh"), [("dispatch", (2,)), ("dispatch rows", (2, 2))])
def test_ranks_with_unequal_tokens_expect_the_same_rows(way, mesh):
    one = shard(atoms_of("gated", 5), way, mesh)
    places = [(0, *place) for place in itertools.product(*map(range, mesh))]
    largest, *calls = (localise(replace(one, coordinate=place)) for place in (None, *places))
    assert largest.args[-1] == math.ceil(5 / math.prod(mesh)) * CHOSEN
    assert {(call.args[-1], call.collectives) for call in calls} == {(largest.args[-1], largest.collectives)}


@pytest.mark.parametrize("way", ["dispatch", "experts"])
def test_a_rank_without_a_router_computes_the_rows_that_are_expected(way):
    """On fake tensors, and alone: what predictions are made from."""
    seen = []

    class Alone(SingleDevice):
        def all_to_all(self, value, axes, sent=None, received=None):
            seen.append((tuple(value.shape), sent, received))
            return super().all_to_all(value, axes, sent, received)

    one = shard(atoms_of("gated"), way, (2,), 1.5)
    local = localise(one)
    shapes = {o.tensor: one.shape(o, written=False) for o in one.space.reads}
    for mode in (FakeTensorMode(), torch.enable_grad()):
        with mode:
            given = {
                name: torch.zeros(shape, dtype=torch.int64) if name == "choice" else torch.randn(shape)
                for name, shape in shapes.items()
            }
            args, _ = local.arguments(given.__getitem__)
            result = experts(Alone(), "y", *args)
        assert tuple(result.shape) == one.write_shape()
    rows = ROWS // 2 * 3 // 2
    exchanged = [((rows, WIDTH), [rows // 2] * 2, [rows // 2] * 2)] * 2
    assert seen == [((2, COUNT // 2), None, None), *exchanged] * 2 * (way == "dispatch")
