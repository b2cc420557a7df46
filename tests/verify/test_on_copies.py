"""Nothing holds what a collective on copies was given, and it did what it does."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tensoropt.ranks.pool import RankPool
from tensoropt.verify.on_copies import is_collective
from tests.verify import on_copies_jobs

GATHERED = torch.ops.c10d._allgather_base_.default


@pytest.mark.distributed
@pytest.mark.parametrize("name", on_copies_jobs.COLLECTIVES)
def test_results_are_those_of_the_collective(ranks: RankPool, name: str) -> None:
    for plain, tracked in ranks.run(on_copies_jobs.results, name):
        assert tracked == plain


@pytest.mark.distributed
def test_threads_of_gloo_hold_nothing_of_a_tracked_step(ranks: RankPool) -> None:
    # Without copies some of what is freed at once is alive for a while.
    for peak, after in ranks.run(on_copies_jobs.freed_at_once):
        assert set(after) == {0}
        assert set(peak) == {on_copies_jobs.GATHERED_BYTES}


def test_messages_and_what_has_no_data_are_left_alone() -> None:
    value = torch.zeros(4)
    assert is_collective(GATHERED, (value, value))
    assert not is_collective(torch.ops.c10d.send.default, ([value],))
    assert not is_collective(torch.ops._c10d_functional.wait_tensor.default, (value,))
    assert not is_collective(torch.ops.aten.add.Tensor, (value, value))
    assert not is_collective(GATHERED, (torch.empty(4, device="meta"), torch.empty(4, device="meta")))
    with FakeTensorMode():
        assert not is_collective(GATHERED, (torch.zeros(4), torch.zeros(4)))
