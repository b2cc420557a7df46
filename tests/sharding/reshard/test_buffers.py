"""Buffers of reshardings, against what their steps say by hand."""

from __future__ import annotations

import pytest

from tensoropt.sharding.reshard.buffers import resharding_elements
from tensoropt.sharding.reshard.steps import Step

MESH = (1, 4)


def step(kind: str, before: tuple[int, ...], after: tuple[int, ...], atom: int = 0, target: int = -1) -> Step:
    return Step(kind, (1,), atom, target, before, after)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "elements"),
    [
        ([step("all_reduce", (8, 8), (8, 8))], 64),
        ([step("slice", (8, 8), (2, 8))], 16),
        ([step("all_gather", (2, 8), (8, 8))], 64),  # pieces follow one another
        ([step("all_gather", (8, 2), (8, 8), atom=1)], 128),  # received, then put together
        ([step("reduce_scatter", (8, 8), (2, 8))], 16),
        ([step("reduce_scatter", (8, 8), (8, 2), atom=1)], 64 + 16),
        ([step("all_gather", (2, 8), (7, 8))], 64 + 56),  # padded pieces are received, then cut
        ([step("reduce_scatter", (7, 8), (2, 8))], 64 + 16),  # padded pieces, received
        ([step("all_to_all", (2, 8), (8, 2), atom=0, target=1)], 16 + 16),  # pieces, received
        ([step("all_to_all", (8, 2), (2, 8), atom=1, target=0)], 16 + 16),  # received, put together
        ([step("all_reduce", (8, 8), (8, 8)), step("slice", (8, 8), (2, 8))], 64 + 16),
    ],
)
def test_most_that_is_alive(steps: list[Step], elements: int) -> None:
    assert resharding_elements(steps, MESH) == elements
