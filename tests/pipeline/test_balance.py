"""Blocks dealt to stages, and cuts that even out what stages have."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.errors import PlanError
from tensoropt.pipeline.balance import balanced, dealt, dealt_cuts, stages_to_a_place
from tensoropt.pipeline.stages import Cutter
from tensoropt.sharding.regions import find_regions
from tests.pipeline.models import blocks_of


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
