"""What an edge takes beside its collective, with steps that are slow on purpose."""

from __future__ import annotations

import time

import pytest

from tensoropt.profiling import edge_timing
from tensoropt.profiling.edge_timing import EdgeSeconds, time_edges
from tensoropt.profiling.timers import WallTimer
from tensoropt.sharding.reshard import redistribute

ALONE = {"slice", "pad", "mask"}
LONG_S = 50e-3


def slowed(monkeypatch, kind: str) -> None:
    """Let steps of a kind take so much longer that no busy machine hides it."""
    make = redistribute._MOVES[kind]

    def slow(*args):
        move = make(*args)

        def late(x):
            time.sleep(LONG_S)
            return move(x)

        return late

    monkeypatch.setitem(redistribute._MOVES, kind, slow)


@pytest.mark.parametrize("kind", ["slice", "pad", "mask"])
def test_each_kind_of_step_is_told_from_the_others(monkeypatch, kind):
    monkeypatch.setattr(edge_timing, "_ROUNDS", 5)
    slowed(monkeypatch, kind)
    found, of_host = time_edges(0, 1, WallTimer())
    assert not of_host.by_kind.pop(kind)
    assert set(found.by_kind) == ALONE
    assert found.by_kind.pop(kind) > LONG_S / 2
    others = (*found.by_kind.values(), found.pass_s, found.arrive_s, found.add_s)
    assert all(0 <= seconds < LONG_S / 2 for seconds in others)


def slow_gather(rank: int, world_size: int) -> EdgeSeconds:
    """What edges take whose all-gather is slow beside its collective (runs in the pool)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edge_timing, "_ROUNDS", 5)
        slowed(patch, "all_gather")
        return time_edges(rank, world_size, WallTimer())[0]


@pytest.mark.distributed
def test_collectives_are_not_counted(ranks):
    for found in ranks.run(slow_gather):
        assert set(found.by_kind) == ALONE | {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
        assert found.by_kind["all_gather"] > LONG_S / 2
        assert found.by_kind["all_reduce"] < LONG_S / 2
