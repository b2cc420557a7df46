"""Which sequences are cut in zig-zag order, and that everything that shares shards agrees on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensoropt import zoo
from tensoropt.capture import capture
from tensoropt.ops.index_space import AtomGraph
from tensoropt.ops.ring_attention import RING
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import GroupGraph, group_operators
from tensoropt.sharding.zigzag import contiguous_note
from tensoropt.verify.random_strategies import random_pipeline
from tests.models import Call

SEQUENCE = 24
Layer = Callable[[nn.Module, Tensor], Tensor]


def same(_: nn.Module, x: Tensor) -> Tensor:
    return x


def atoms_of(before: Layer = same, behind: Layer = same, causal: bool = True) -> AtomGraph:
    """Tokens, something before attention, causal attention, and something behind it."""

    def attending(m: nn.Module, x: Tensor) -> Tensor:
        x = m.project(before(m, x)).unsqueeze(1)
        return behind(m, F.scaled_dot_product_attention(x, x, x, is_causal=causal).squeeze(1))

    model = Call(attending, project=nn.Linear(8, 8), table=(SEQUENCE, 8))
    x = torch.randn(4, SEQUENCE, 8)
    return refine_graph(capture(model, (x,), loss=lambda y: y.square().mean()).graph)


def test_all_along_the_sequence_is_cut_alike_and_nothing_else() -> None:
    atoms = atoms_of()
    inputs = {(name, i) for name in atoms.graph.inputs for i in range(3)}
    assert {i for name, i in atoms.zigzag & inputs} == {1}
    assert {atoms.atom_sizes(name)[i] for name, i in atoms.zigzag} == {SEQUENCE}
    assert not any(atoms.graph.tensors[name].kind == "parameter" for name, _ in atoms.zigzag)


@pytest.mark.parametrize(
    ("mesh", "fits"), [((1, 2), True), ((1, 3), True), ((4, 2), True), ((1, 2, 4), False), ((1, 5), False)]
)
def test_two_chunks_per_rank_have_to_divide_the_sequence(mesh: tuple[int, ...], fits: bool) -> None:
    atoms = atoms_of()
    assert atoms.may_zigzag(mesh) == fits
    # Nothing is said of queries that no axis can split.
    words = contiguous_note(atoms, mesh)
    assert bool(words) == (not fits and mesh != (1, 5))
    assert all("they do not divide into 16 chunks" in note for note in words)


def table(model: nn.Module, x: Tensor) -> Tensor:
    return x + model.table


def dropped(_: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def summed_up(_: nn.Module, x: Tensor) -> Tensor:
    return x.cumsum(1)


@pytest.mark.parametrize(
    ("before", "behind", "causal", "found"),
    [
        (same, same, False, False),  # equal work without it
        (table, same, True, False),  # a parameter's shards are those of DTensor
        (dropped, same, True, True),  # knows the positions of its elements
        (same, summed_up, True, True),  # keeps the sequence whole, in its own order
    ],
)
def test_what_needs_contiguous_shards_rules_it_out(
    before: Layer, behind: Layer, causal: bool, found: bool
) -> None:
    atoms = atoms_of(before, behind, causal=causal)
    assert bool(atoms.zigzag) == found
    notes = contiguous_note(atoms, (1, 2))
    assert len(notes) == (causal and not found)
    assert all("needs contiguous parts" in note for note in notes)


@cache
def decoder() -> GroupGraph:
    built = zoo.build("llama-tiny", batch=4, device="meta")
    return group_operators(refine_graph(capture(built.model, built.args, built.kwargs).graph))


def splits_queries(pipeline: PipelinedStrategy) -> list[bool]:
    """Whether each stage splits causal attention along its queries, with its keys in a ring or without."""
    return [
        any({"queries", RING}.intersection(made.labels) for made in strategy.configurations.values())
        for strategy in pipeline.stages
    ]


def test_all_stages_of_a_pipeline_keep_to_one_order() -> None:
    rng = random.Random(0)
    drawn = [random_pipeline(decoder(), (2, 2, 2), "gpipe", rng) for _ in range(12)]
    assert any(splits_queries(pipeline) == [True, False] for pipeline in drawn)
    for pipeline in drawn:
        assert [stage.zigzag for stage in pipeline.stages] == [any(splits_queries(pipeline))] * 2
        again = PipelinedStrategy.from_data(pipeline.to_data(), decoder())
        assert again == pipeline
