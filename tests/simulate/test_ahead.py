"""What is gathered ahead and scattered behind, in time and in memory, worked out by hand."""

import random
from dataclasses import replace

import pytest

from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.ops.layouts import GATHERED_AHEAD
from tensoropt.sharding.configurations import batch_strategies
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.candidates import BLOCKING
from tensoropt.simulate.collectives import Collective, predicted_collectives
from tensoropt.simulate.timed import AHEAD
from tensoropt.verify.fake_ranks import check_on_fake_ranks
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.costs.models import four, problem
from tests.simulate.strategies import facts_by_group, memory_curve, written
from tests.simulate.test_simulator import BESIDE, Hand, PerByte, assert_scheduled, evaluated_at, figures

W = 24 * 24 * 4


def strategy(middle: str = "ahead", micro: int = 1) -> Strategy:
    """Data parallel on two ranks; the middle two weights are sharded."""
    graph = problem(four).graph
    assert len(graph.groups) == 5
    whole, sharded = ["R", "R/P"], [middle, "S(0)"]
    labels = ["d0" if micro > 1 else "none", "d0"]
    return written(graph, (micro, 2), labels, (whole, sharded, sharded, whole))


@pytest.mark.parametrize(("each_s", "exposed_s"), [(0.4, 0.0), (1.5, 1.0), (2.5, 4.5)])
def test_what_is_longer_than_a_block_is_waited_for(each_s, exposed_s):
    """Forward takes 1 s a group and backward 2 s. Gathers run beside a block of 1 s in forward, twice, and
    in backward beside the loss and the last product of 4 s, then beside 2 s; scatters beside 2 s, twice. At
    the end the bucket of the other two weights is reduced."""
    loss, bucket = 4 * each_s / W, 2 * each_s
    evaluated = evaluated_at(strategy(), Hand(), PerByte(each_s / W), BESIDE)
    total, compute, communication, exposed = figures(evaluated)
    assert compute == pytest.approx(15.0)
    assert communication == pytest.approx(6 * each_s + loss + bucket)
    over = max(each_s - 1.0, 0.0)
    # The second scatter is waited for as backward ends; the bucket queues behind it anyway.
    back = [max(each_s - 4.0, 0.0), *3 * [max(each_s - 2.0, 0.0)]]
    assert 2 * over + sum(back) == pytest.approx(exposed_s)
    assert total == pytest.approx(15.0 + 2 * over + sum(back) + loss + bucket)
    assert exposed == pytest.approx(total - compute)
    assert_scheduled(evaluated)


def test_nothing_is_hidden_where_nothing_runs_beside():
    evaluated = evaluated_at(strategy(), Hand(), PerByte(0.4 / W), BLOCKING)
    at_use = evaluated_at(strategy("R"), Hand(), PerByte(0.4 / W), BLOCKING)
    assert figures(evaluated) == pytest.approx(figures(at_use))
    assert not [event for event in evaluated.timed().events if event.name in AHEAD.values()]


def test_every_micro_batch_gathers_and_scatters():
    found = strategy(micro=2)
    assert predicted_collectives(found, facts_by_group(found)) == {
        Collective("all_gather", (0,), W): 8, Collective("reduce_scatter", (0,), W): 4,
        Collective("all_reduce", (0,), 2 * W): 1, Collective("all_reduce", (0,), 4): 2,
    }  # fmt: skip
    evaluated = evaluated_at(found, Hand(), PerByte(0.4 / W), BESIDE)
    total, compute, communication, _ = figures(evaluated)
    assert (compute, communication) == pytest.approx((30.0, 12 * 0.4 + 0.8 + 2 * 4 * 0.4 / W))
    assert total == pytest.approx(30.0 + 0.8 + 2 * 4 * 0.4 / W)
    assert_scheduled(evaluated)


@pytest.mark.parametrize("micro", [2, 4])
@pytest.mark.parametrize("each_s", [0.4, 1.5, 2.5])
def test_copies_are_made_once_and_reduced_once(each_s, micro):
    """ZeRO's first stage: either weight is gathered beside 1 s of the first micro-batch's forward, its
    gradient scattered beside 2 s of the last one's backward."""
    found = strategy("held/P", micro)
    assert predicted_collectives(found, facts_by_group(found)) == {
        Collective("all_gather", (0,), W): 2, Collective("reduce_scatter", (0,), W): 2,
        Collective("all_reduce", (0,), 2 * W): 1, Collective("all_reduce", (0,), 4): micro,
    }  # fmt: skip
    evaluated = evaluated_at(found, Hand(), PerByte(each_s / W), BESIDE)
    total, compute, communication, exposed = figures(evaluated)
    behind_s = micro * 4 * each_s / W + 2 * each_s
    waited_s = 2 * max(each_s - 1.0, 0.0) + 2 * max(each_s - 2.0, 0.0)
    assert compute == pytest.approx(15.0 * micro)
    assert communication == pytest.approx(4 * each_s + behind_s)
    assert exposed == pytest.approx(waited_s + behind_s)
    assert total == pytest.approx(compute + exposed)
    assert_scheduled(evaluated)


def test_gradients_of_copies_are_scattered_in_every_micro_batch():
    """ZeRO's second stage: likewise, but reduced each time."""
    found = strategy("held", 2)
    evaluated = evaluated_at(found, Hand(), PerByte(1.5 / W), BESIDE)
    total, compute, communication, _ = figures(evaluated)
    behind_s = 2 * 4 * 1.5 / W + 2 * 1.5
    assert (compute, communication) == pytest.approx((30.0, 6 * 1.5 + behind_s))
    assert total == pytest.approx(30.0 + 2 * 0.5 + behind_s)
    assert_scheduled(evaluated)


def test_two_blocks_are_there_at_a_time():
    """As the second product runs, its own weight and the next one's are there whole; where a weight is
    gathered at its use only the one."""

    def bytes_at(middle: str, moment: str) -> int:
        found = strategy(middle)
        return memory_curve(found, facts_by_group(found), "sgd").points[moment][1]

    groups = [group.name for group in problem(four).graph.groups]
    ahead, at_use = (bytes_at(way, f"forward {groups[1]}") for way in ("ahead", "R"))
    assert ahead - at_use == W
    # In backward the gradient of the block behind waits whole, and its shard is on the way.
    ahead, at_use = (bytes_at(way, f"backward {groups[1]}") for way in ("ahead", "R"))
    assert ahead - at_use == W + W // 2


@pytest.mark.parametrize(("each_s", "total_s"), [
    # Beside 0.4 s of a collective 0.32 s are computed: six of them cost 0.08 s each.
    (0.4, 15.0 + 6 * 0.08),
    # 1 s of computing takes 1.25 s, and what is left of the gather is waited for; backward passes the
    # others within blocks of 2 s and more.
    (1.5, 15.0 + 2 * 0.5 + 4 * 0.3),
])  # fmt: skip
def test_computing_is_slower_beside_a_collective(each_s, total_s):
    evaluated = evaluated_at(strategy(), Hand(), PerByte(each_s / W), replace(BESIDE, slower=0.25))
    total, compute, communication, exposed = figures(evaluated)
    behind_s = 4 * each_s / W + 2 * each_s  # the loss's and the bucket, beside which nothing is computed
    assert total == pytest.approx(total_s + behind_s)
    assert communication == pytest.approx(6 * each_s + behind_s)
    assert exposed == pytest.approx(total - compute)
    assert max(event.end_s for event in evaluated.timed().events) == pytest.approx(total)
    assert evaluated.metrics.sources.sum() == pytest.approx(compute + communication)


@pytest.mark.parametrize("micro", [2, 4])
def test_computing_is_as_slow_in_every_micro_batch(micro):
    evaluated = evaluated_at(strategy(micro=micro), Hand(), PerByte(0.4 / W), replace(BESIDE, slower=0.25))
    assert figures(evaluated)[1] == pytest.approx(micro * (15.0 + 6 * 0.08))


def test_nothing_slows_down_an_optimizer_that_has_waited_for_all():
    """Copies of weights that lie on two axes are gathered behind the optimizer, which comes behind all
    buckets: it computes beside nothing."""
    graph = problem(four).graph
    whole, sharded = ["R", "R/P", "R/P"], ["held", "S(0)", "S(1)"]
    found = written(graph, (1, 2, 2), ["none", "d0", "d0"], (whole, sharded, sharded, whole))
    stepping = Hand()
    stepping.optimizer_s_per_element = 1e-3
    optimizer_s = []
    for overlap in (BLOCKING, replace(BESIDE, slower=0.25)):
        some, none = (evaluated_at(found, each, PerByte(1.5 / W), overlap) for each in (stepping, Hand()))
        optimizer_s.append(figures(some)[1] - figures(none)[1])
        assert some.timed().clocked.compute_s[0] == pytest.approx(figures(some)[1])
    assert optimizer_s[1] == pytest.approx(optimizer_s[0]) != 0.0


def test_gradients_of_a_tied_copy_add_up_in_its_type():
    """Autograd adds the embedding's and the head's in bfloat16; only micro-batches add up in float32."""
    loaded = load_model(ModelSpec("zoo:gpt2-tiny", compute_dtype="bfloat16"))
    graph = loaded.graph
    (tied,) = graph.shared
    labels = {name: [str(along.label)] * 2 for name, along in batch_strategies(graph).items()}
    stored = [("held/P", "S(0)") if t.name == tied else ("R/P", "R/P") for t in graph.atoms.graph.parameters]
    found = written(graph, (2, 2), labels, stored, dict.fromkeys(graph.hubs, ("S(0)", "S(0)")))
    tracked = check_on_fake_ranks(loaded, found, "sgd").memory_tracked["peak"]
    peak = memory_curve(found, facts_by_group(found), "sgd").peak.total
    assert peak == pytest.approx(tracked, rel=1e-3)


@pytest.mark.slow
def test_a_gradient_waits_for_uses_that_hand_theirs_over():
    """The head's lies as the parameter is stored; autograd keeps it until the embedding has been passed."""
    loaded = load_model(ModelSpec("zoo:gpt2-tiny", 3))
    graph = loaded.graph
    (tied,) = graph.shared
    # Drawn, as the peak has to come between the two.
    found = random_strategy(graph, (4, 2), micro_strategies(graph, 4), random.Random(101), 0.0)
    assert found.stored[tied] == (GATHERED_AHEAD, 0)
    tracked = check_on_fake_ranks(loaded, found, "sgd").memory_tracked["peak"]
    peak = memory_curve(found, facts_by_group(found), "sgd").peak.total
    assert peak == pytest.approx(tracked, rel=1e-3)
