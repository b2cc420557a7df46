"""Ranks that hold the same shard hold the same bits, and one that does not is found."""

import json
from typing import Any

import pytest

from tensoropt.engine.models import load_model
from tensoropt.ranks.pool import RankPool
from tensoropt.verify.findings import RunFindings, replicas_agree, within_tolerance
from tensoropt.verify.rank_checks import CheckOptions
from tensoropt.verify.real_ranks import verify_strategies
from tests.execute import jobs
from tests.simulate.strategies import written

WHOLE: tuple[int, ...] = ()


@pytest.mark.parametrize(("ranks", "agree"), [
    ([{"w": (WHOLE, "a")}, {"w": (WHOLE, "a")}], True),
    ([{"w": (WHOLE, "a")}, {"w": (WHOLE, "b")}], False),
    ([{"w": ((0,), "a")}, {"w": ((1,), "b")}], True),  # two shards
    ([{"w": ((0,), "a")}, {"w": ((1,), "b")}, {"w": ((0,), "a")}, {"w": ((1,), "c")}], False),
    ([{"w": ((0,), "a")}, {"w": ((1,), "a")}], True),
    ([{"v": (WHOLE, "a"), "w": (WHOLE, "a")}, {"v": (WHOLE, "a"), "w": (WHOLE, "b")}], False),
    ([{"v": (WHOLE, "a")}, {"w": (WHOLE, "b")}], True),  # placed: each has its own
    ([{}, {"w": (WHOLE, "a")}, {"w": (WHOLE, "b")}], False),
    ([{"w": ([0], "a")}, {"w": ((0,), "b")}], False),  # a list, as JSON gives it
    ([{}, {}], True),
])  # fmt: skip
def test_replicas_agree_where_equal_shards_are_equal(ranks, agree):
    assert replicas_agree(ranks) is agree


def on_two_ranks(*stored: str) -> dict[str, Any]:
    """The MLP split along the batch on two ranks, its parameters whole or sharded."""
    graph = load_model(jobs.spec("mlp")).graph
    return json.loads(json.dumps(written(graph, (1, 2), ["none", "d0"], stored).to_data()))


def verified(strategy: dict[str, Any], ranks: RankPool) -> RunFindings:
    options = CheckOptions(memory=False, timed_steps=0)
    (result,) = verify_strategies(jobs.spec("mlp"), [strategy], pool=ranks, options=options)
    return result


@pytest.mark.parametrize(("stored", "compared"), [("R/P", True), ("S(0)", False)])
def test_a_replica_that_drifts_apart_is_found(ranks, stored, compared):
    """One rank's gradients are off by a unit in their last place: far within every tolerance. Of shards there
    is nothing to compare with."""
    strategy = on_two_ranks("R", stored)
    assert verified(strategy, ranks).replicas_agree is True
    with jobs.spoilt_on(ranks, jobs.spoil_a_replica):
        spoilt = verified(strategy, ranks)
    assert spoilt.replicas_agree is not compared
    assert spoilt.numerics_ok is not compared
    assert within_tolerance(spoilt.differences, "float32")
    assert spoilt.error is None
