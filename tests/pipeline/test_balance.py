"""Blocks dealt to stages, and cuts that even out what stages have."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tensoropt.capture import capture
from tensoropt.errors import PlanError
from tensoropt.pipeline.balance import balanced, dealt, dealt_cuts, has_ends, stages_to_a_place
from tensoropt.pipeline.stages import Cutter
from tensoropt.plan.problem import prepare
from tensoropt.sharding.regions import find_regions
from tests.pipeline.models import Block, blocks_of


@pytest.mark.parametrize(
    ("blocks", "stages", "dealt"),
    [(4, 2, [2, 2]), (6, 4, [1, 2, 2, 1]), (6, 2, [3, 3]), (5, 3, [2, 2, 1]), (2, 4, [0, 1, 1, 0])],
)
def test_stages_have_as_many_blocks(blocks: int, stages: int, dealt: list[int]) -> None:
    graph = blocks_of(blocks)
    cutter, ends = Cutter(graph), len(graph.groups)
    cuts = (0, *dealt_cuts(cutter, stages), ends)
    starts = [cutter.place[region.groups[0]] for region in find_regions(graph)]
    assert [sum(a <= s < b for s in starts) for a, b in pairwise(cuts)] == dealt


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match="2 repeated blocks are fewer than 5 stages"):
        dealt_cuts(Cutter(blocks_of(2)), 5)


class Stacked(nn.Module):
    """Alike blocks, with or without a layer before and one behind them."""

    def __init__(self, blocks: int, *, stem: bool, head: bool) -> None:
        super().__init__()
        self.stem, self.head = (nn.Linear(24, 24) if one else nn.Identity() for one in (stem, head))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@cache
def stacked(blocks: int, *, stem: bool, head: bool) -> Cutter:
    return Cutter(prepare(capture(Stacked(blocks, stem=stem, head=head), (torch.randn(4, 24),), {})).graph)


@given(st.sampled_from([1, 3, 5]), st.integers(2, 8), st.booleans(), st.booleans())
def test_blocks_are_dealt_to_stages_whatever_the_model_begins_and_ends_with(blocks, stages, stem, head):
    """Cuts that a pipeline can have, or a refusal, also of a bare stack of blocks."""
    cutter = stacked(blocks, stem=stem, head=head)
    try:
        cuts = dealt_cuts(cutter, stages)
    except PlanError:
        starts = {region.groups[0] for region in find_regions(cutter.graph)}
        fitting = [cut for cut in cutter.cuts if cutter.graph.groups[cut].name in starts]
        assert len(fitting) + has_ends(cutter) < stages - 1 or len(starts) < stages
    else:
        assert len(cuts) == stages - 1
        assert len(cutter.stages(cuts)) == stages


@pytest.mark.parametrize(("blocks", "stages"), [(4, 3), (4, 6), (6, 4), (6, 8), (2, 4)])
def test_a_bare_stack_has_no_ends_that_count(blocks, stages):
    cutter = stacked(blocks, stem=False, head=False)
    assert not has_ends(cutter)
    if blocks < stages:
        with pytest.raises(PlanError, match=f"{blocks} repeated blocks are fewer than {stages} stages"):
            dealt_cuts(cutter, stages)
    else:
        assert len(cutter.stages(dealt_cuts(cutter, stages))) == stages


@pytest.mark.parametrize(
    ("blocks", "places", "micro_batches", "count"),
    [
        # Llama 3's job: 126 blocks and both ends are 8 for each of 16 places.
        (126, 16, 16, 8), (126, 8, 8, 16),
        (6, 2, 2, 4), (7, 2, 64, 3), (10, 2, 64, 6), (4, 2, 2, 3), (3, 2, 2, 1), (0, 2, 2, 1),
    ],
)  # fmt: skip
def test_stages_to_a_place(blocks: int, places: int, micro_batches: int, count: int) -> None:
    assert stages_to_a_place(blocks, places, micro_batches, 16) == count


@given(st.integers(0, 200), st.integers(2, 16), st.integers(1, 64), st.integers(2, 16))
def test_a_place_has_no_more_stages_than_there_are_blocks(
    blocks: int, places: int, micro_batches: int, most: int
) -> None:
    count = stages_to_a_place(blocks, places, micro_batches, most)
    assert 1 <= count <= most
    assert count == 1 or blocks + 2 >= places * count
    sizes = dealt(blocks, places * count)
    assert sum(sizes) in (blocks, blocks + 2)
    assert max(sizes) - min(sizes) <= 1


def test_the_heaviest_stage_is_as_light_as_can_be() -> None:
    assert balanced(np.array([4.0, 1.0, 1.0, 2.0]), [1, 2, 3], 2) == (1,)
    assert balanced(np.array([1.0, 1.0]), [1], 3) == ()


def test_stronger_stages_get_more() -> None:
    # Three times as strong: six of eight, whichever stage it is.
    assert balanced(np.ones(8), range(1, 8), 2, (3.0, 1.0)) == (6,)
    assert balanced(np.ones(8), range(1, 8), 2, (1.0, 3.0)) == (2,)
    assert balanced(np.ones(8), range(1, 8), 3, (2.0, 1.0, 1.0)) == (4, 6)
