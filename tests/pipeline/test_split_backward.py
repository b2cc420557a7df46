"""What waits between the two parts of a backward."""

from __future__ import annotations

import pytest

from tensoropt.pipeline.split_backward import waiting_bytes
from tests.costs.models import four, problem
from tests.pipeline.models import sliced, split_along_the_batch

ROW = 24 * 4


@pytest.mark.parametrize(("axes", "rows"), [((), 4), ((2,), 2)])
def test_gradients_wait_for_those_of_parameters_to_be_made(axes: tuple[int, ...], rows: int) -> None:
    # Of the result of each of two layers, for a micro-batch of 4 rows.
    strategy = split_along_the_batch(problem(four).graph, (2,), (4, 2, *axes), "zero_bubble")
    assert [sum(waiting_bytes(stage).values()) for stage in strategy.stages] == [2 * rows * ROW] * 2


def test_what_is_made_of_parameters_alone_counts_as_one() -> None:
    # Both halves of one parameter are read in a stage: the gradients of what reads them wait, not of the
    # halves.
    strategy = split_along_the_batch(problem(sliced).graph, (4,), (4, 2), "1f1b")
    for stage in strategy.stages:
        for name, size in waiting_bytes(stage).items():
            assert size <= 4 * ROW, name
