"""The recorders see what happens and nothing else."""

from __future__ import annotations

import pytest
import torch

from tensoropt.ranks.pool import RankPool
from tensoropt.verify.recorder import MemoryTracker, compare_collectives
from tests.execute import part_jobs


@pytest.mark.distributed
def test_forward_and_backward_are_recorded(ranks: RankPool) -> None:
    for rows, now, peak in ranks.run(part_jobs.recorded):
        assert rows == [
            {"kind": "all_gather", "axes": [1], "bytes": 48, "count": 1},
            {"kind": "all_reduce", "axes": [1], "bytes": 24, "count": 1},
            {"kind": "all_to_all", "axes": [1], "bytes": 32, "count": 1},
            {"kind": "reduce_scatter", "axes": [1], "bytes": 48, "count": 1},
        ]
        assert (now, peak) == (4000, 24000)


def test_comparison_names_what_differs() -> None:
    row = {"kind": "all_reduce", "axes": [1], "bytes": 8, "count": 2}
    assert compare_collectives([row], [row]) == []
    assert compare_collectives([row], [row | {"count": 1}]) == [
        "all_reduce of 8 bytes over axes [1]: predicted 2, issued 1"
    ]
    assert len(compare_collectives([row], [row | {"axes": [2]}])) == 2


def test_memory_that_no_operator_made_is_not_counted() -> None:
    buffer = torch.zeros(1024)
    with MemoryTracker() as tracker:
        shares = buffer.split(512)
        own = shares[0].clone()
        assert tracker.now_bytes == own.nbytes
        del shares, own
        assert tracker.now_bytes == 0
