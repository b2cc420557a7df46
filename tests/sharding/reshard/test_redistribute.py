"""Resharding on real ranks: every pair of layouts, forward and backward, against the whole tensor.

What is sent of parameters that are gathered together, and of gradients that are scattered together.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tensoropt.ops.layouts import PARTIAL_GRAD, REPLICATE, Layout, local_shape
from tensoropt.ranks.pool import RankPool
from tensoropt.sharding.reshard.redistribute import EdgeSpec, packed_gather, packed_scatter
from tensoropt.sharding.reshard.steps import edge_steps
from tests.execute import part_jobs

WHOLE = (REPLICATE, PARTIAL_GRAD)


def spec_of(sizes: tuple[int, ...], parts: int, atom: int) -> EdgeSpec:
    source: Layout = (REPLICATE, atom)
    steps = edge_steps(sizes, (1, parts), source, WHOLE)
    return EdgeSpec("w", tuple((n,) for n in sizes), (1, parts), source, WHOLE, *steps, parameter=True)


def rank(parts: int, position: int):
    return SimpleNamespace(place=(0, position), parts=lambda axes: parts, group=lambda axes: None)


@pytest.mark.parametrize(
    ("sizes", "parts", "atom", "sent"),
    [
        ((6, 4), 2, 0, 12),
        ((6, 4), 2, 1, 12),
        ((7, 4), 2, 0, 16),  # 4 rows and 3
        ((7, 4), 4, 0, 8),  # 2, 2, 2 and 1
        ((4, 7), 2, 1, 16),
        ((5, 3), 4, 0, 6),  # 2, 2, 1 and none
        ((1, 7), 3, 1, 3),
    ],
)
def test_pieces_are_sent_padded_and_put_together(
    sizes: tuple[int, ...], parts: int, atom: int, sent: int
) -> None:
    spec = spec_of(sizes, parts, atom)
    assert spec.forward[0].payload((1, parts)) == parts * sent
    whole = torch.randn(sizes)
    ranks = [rank(parts, i) for i in range(parts)]
    shards = [
        shard
        for i in range(parts)
        for shard in [whole.narrow(atom, *_piece(sizes[atom], parts, i)).contiguous()]
    ]
    flats = [packed_gather(own, spec).pack(shard) for own, shard in zip(ranks, shards, strict=True)]
    assert [flat.shape for flat in flats] == [(sent,)] * parts
    for own in ranks:
        assert torch.equal(packed_gather(own, spec).unpack(torch.cat(flats)), whole)
    gradients = [torch.randn(sizes) for _ in ranks]
    packed = [packed_scatter(own, spec).pack(g) for own, g in zip(ranks, gradients, strict=True)]
    assert [flat.shape for flat in packed] == [(parts * sent,)] * parts
    total = torch.stack(packed).sum(0)
    for i, own in enumerate(ranks):
        found = packed_scatter(own, spec).unpack(total.chunk(parts)[i])
        torch.testing.assert_close(found, sum(gradients).narrow(atom, *_piece(sizes[atom], parts, i)))
        assert found.shape == local_shape(spec.atoms, spec.source, spec.mesh, own.place)


def _piece(size: int, parts: int, i: int) -> tuple[int, int]:
    """Offset and length, as ``torch.chunk`` cuts."""
    step = -(-size // parts)
    return min(i * step, size), min(step, max(size - i * step, 0))


def test_padding_behind_all_pieces_costs_no_copy() -> None:
    flat = torch.arange(32.0)
    assert packed_gather(rank(2, 0), spec_of((7, 4), 2, 0)).unpack(flat).data_ptr() == flat.data_ptr()


pytestmark = pytest.mark.distributed


def test_one_axis(ranks: RankPool) -> None:
    for count, *wrong in ranks.run(part_jobs.reshard_all, (2,)):
        assert count == "6 layouts"
        assert wrong == []


@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_axes(four_ranks: RankPool, each: bool) -> None:
    for count, *wrong in four_ranks.run(part_jobs.reshard_all, (2, 2), each):
        assert count == "35 layouts"
        assert wrong == []


def test_shards_of_which_some_are_smaller(four_ranks: RankPool) -> None:
    for found in four_ranks.run(part_jobs.reshard_uneven):
        assert found == pytest.approx({"gathered": 0.0, "scattered": 0.0}, abs=1e-5)
