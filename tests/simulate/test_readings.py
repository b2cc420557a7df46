"""Tied parameters that are gathered ahead: collectives in order, time and memory, worked out by hand.

``a b b c d b``: five products of four weights of 7 x 7 in three blocks, cut along the batch of two ranks. Of
a weight 8 rows are sent, as the ranks have 4 and 3.
"""

from collections import Counter

import pytest

from tensoropt.costs.effects import BACK_LEFT, BACK_NEXT, BEGIN, BEGIN_BEFORE, PARAMETERS, Effect
from tensoropt.costs.group_effects import Choice, GroupEffects
from tensoropt.costs.prices import free_prices
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.profiling.facts import Facts
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.candidates import StrategyCandidates
from tensoropt.simulate.collectives import Collective, predicted_collectives
from tensoropt.verify.fake_ranks import check_on_fake_ranks
from tests.engine.loops import data_parallel
from tests.engine.test_gathering import SENT, W, captured_tied
from tests.simulate.strategies import facts_by_group, memory_curve
from tests.simulate.test_simulator import BESIDE, Hand, PerByte, assert_scheduled, evaluated_at, figures

B = "p_model_b_weight"
LOSS = Collective("all_reduce", (0,), 4)


def tied(stored: str, micro: int = 1, dtype: str = "float32") -> tuple[Strategy, dict[str, Facts]]:
    graph, _ = captured_tied(dtype)
    strategy = data_parallel(graph, stored, micro)
    return strategy, facts_by_group(strategy)


def gather(weights: int) -> Collective:
    return Collective("all_gather", (0,), weights * SENT)


def scatter(weights: int) -> Collective:
    return Collective("reduce_scatter", (0,), weights * SENT)


@pytest.mark.parametrize("micro", [1, 2])
def test_each_block_gathers_it_once_and_one_scatter_takes_the_sum(micro):
    forward = [gather(2), gather(1), gather(2), LOSS]
    backward = [gather(2), gather(1), gather(1), scatter(1), scatter(1), scatter(2)]
    assert predicted_collectives(*tied("ahead", micro)) == Counter([*forward, *backward] * micro)


def test_a_copy_is_gathered_with_its_first_block():
    first, other = [gather(2), gather(1), gather(1), LOSS], [LOSS]
    back = [scatter(1), scatter(1), scatter(2)]
    assert predicted_collectives(*tied("held", 2)) == Counter([*first, *back, *other, *back])
    # Those that wait for the last micro-batch.
    assert predicted_collectives(*tied("held/P", 2)) == Counter([*first, *other, *back])


def test_it_takes_the_time_of_what_is_sent():
    """Forward takes 1 s a group and backward 2 s; a weight takes 0.1 s to send."""
    strategy, facts = tied("ahead")
    evaluated = evaluated_at(strategy, Hand(), PerByte(0.1 / SENT), BESIDE)
    total, compute, communication, exposed = figures(evaluated)
    assert communication == pytest.approx(0.1 * (5 + 4 + 4) + 0.1 * 4 / SENT)
    # What begins forward and backward, and the last scatter, are waited for.
    assert exposed == pytest.approx(0.1 * (2 + 2 + 2) + 0.1 * 4 / SENT)
    assert total == pytest.approx(compute + exposed)
    assert evaluated.metrics.parts.scattering_s[0].tolist() == pytest.approx([0.2] * 3)
    assert_scheduled(evaluated)
    assert sum(predicted_collectives(strategy, facts).values()) == 10


@pytest.mark.parametrize(("stored", "each"), [("ahead", 3), ("held/P", 0)])
def test_gradients_on_their_way_are_those_of_two_weights_and_their_shards(stored, each):
    """After every backward, or after the last one only."""
    evaluated = evaluated_at(tied(stored, 2)[0], Hand(), PerByte(0.0), BESIDE)
    assert evaluated.metrics.parts.trailing_bytes[0].tolist() == [each * SENT, 3 * SENT]


def effects_of_uses(name: str) -> list[tuple[Effect, ...]]:
    """The effects of each use of a tied parameter, in the order of forward."""
    strategy, facts = tied("ahead")
    candidates = StrategyCandidates(strategy, facts)
    prices = free_prices(strategy.graph, strategy.mesh, "sgd")
    in_common = Batch(candidates, *candidates.row(), prices).tied[name]
    assert in_common is not None
    of_groups, found = GroupEffects(prices), []
    for group in strategy.graph.groups:
        if name in group.shared:
            (configuration,), (work,) = candidates.configurations(group), candidates.works(group)
            turns, stored = {name: in_common.turns[group.name].at(0)}, {name: strategy.stored[name]}
            choice = Choice(configuration, work, facts[group.name], stored, turns=turns)
            found += [of_groups.parameters.used(use).effects for use in of_groups.stored_uses(choice)]
    return found


def test_the_sum_of_gradients_stays_until_it_is_scattered():
    """The last use in forward leaves its gradient; the first one, with which backward ends, gives it back."""
    effects = [[e for e in of_use if e.transient or e.workspace_bytes] for of_use in effects_of_uses(B)]
    at = [{e.when: e for e in of_use} for of_use in effects]
    assert [of_use[PARAMETERS].transient for of_use in at] == [0, 0, W]
    # Both gradients beside a new sum, then one beside the sum.
    assert [of_use[PARAMETERS].workspace_bytes for of_use in at] == [W, 2 * W, 0]
    # It stays while a shard arrives.
    assert at[0][BACK_NEXT].transient == SENT // 2
    assert at[0][BACK_LEFT].transient == -W - SENT // 2
    assert not any(BACK_NEXT in of_use for of_use in at[1:])
    # What one brings another lets go of.
    assert sum(e.transient for of_use in effects for e in of_use) == 0
    # The first block's copy comes as it begins, and goes after the second reader; the last block's by itself.
    assert at[0][BEGIN].transient == W
    assert BEGIN not in at[1]
    done = [
        [e.transient for e in of_use if (e.when.phase, e.after) == ("forward", True)] for of_use in effects
    ]
    assert done == [[], [-W], [-W]]
    assert at[2][BEGIN_BEFORE].transient == W


@pytest.mark.sweep(quick=3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("stored", ["ahead", "held", "held/P"])
def test_memory_is_what_fake_ranks_keep(stored, micro, dtype):
    # To less than the smallest shard.
    loaded = load_model(ModelSpec("tests.engine.test_gathering:tied", compute_dtype=dtype))
    strategy, facts = tied(stored, micro, dtype)
    tracked = check_on_fake_ranks(loaded, strategy, "sgd").memory_tracked["peak"]
    assert memory_curve(strategy, facts, "sgd").peak.total == pytest.approx(tracked, abs=SENT // 2 - 1)
