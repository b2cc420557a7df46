"""Messages of a ring beside the blocks of attention: in time, in the search and among what is sent, by
hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensoropt.costs.effects import Effects, additive
from tensoropt.costs.group_effects import Choice, GroupEffects
from tensoropt.costs.prices import Prices
from tensoropt.ops.calls import RING_SEND
from tensoropt.ops.families.attention import ATTENTION
from tensoropt.profiling.workload import workload
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.regions import Region
from tensoropt.sharding.sequence import sequence_strategies
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.candidates import BLOCKING, Overlap
from tensoropt.verify.random_strategies import random_strategy
from tests.costs.models import Recipe, facts_of, problem
from tests.simulate.test_simulator import BESIDE, Hand, PerByte, assert_timed_as_scheduled, evaluated_at

RANKS, BATCH, LENGTH, WIDTH = 4, 2, 16, 8


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).unsqueeze(1)
        mixed = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.leave(mixed.squeeze(1)).square().mean()


def attending() -> Recipe:
    return Attending(), (torch.randn(BATCH, LENGTH, WIDTH),), {}


def around(*, again: bool = False) -> Strategy:
    prepared, mesh = problem(attending), (1, RANKS)
    along = sequence_strategies(prepared.graph, ring=True)
    given = {g.name: Configuration(g, (prepared.micro[g.name], along[g.name])) for g in prepared.graph.groups}
    strategy = random_strategy(prepared.graph, mesh, prepared.micro, random.Random(0), given=given)
    if not again:
        return strategy
    return replace(strategy, recomputed=(Region("block", (attention(strategy),)),), once=frozenset())


def attention(strategy: Strategy) -> str:
    (name,) = (g.name for g in strategy.graph.groups if g.anchor.target == ATTENTION)
    return name


class Messages(PerByte):
    """So many seconds for a message in a ring, and none for anything else."""

    def time_s(self, kind: str, axes: Sequence[int], num_bytes: float) -> float:
        return self.seconds if kind == RING_SEND else 0.0


def exposed_s(each_s: float, overlap: Overlap, *, again: bool = False) -> float:
    strategy = around(again=again)
    figures = [
        evaluated_at(strategy, Hand(), Messages(s), overlap, beside=overlap.beside) for s in (0.0, each_s)
    ]
    for evaluated in figures:
        assert_timed_as_scheduled(evaluated)
    free, priced = (float(evaluated.metrics.time_s[0]) for evaluated in figures)
    return priced - free


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("each_s", [0.1, 0.2, 1.0])
def test_messages_are_hidden_behind_all_blocks_but_one(each_s, again):
    # Forward takes 1 s and sends 3 messages; backward takes 2 s, sends 6 of them and then the last one home.
    forward, backward = max(3 * each_s - 0.75, 0.0), max(6 * each_s - 1.5, 0.0) + each_s
    assert exposed_s(each_s, BESIDE, again=again) == pytest.approx(forward * (1 + again) + backward)
    assert exposed_s(each_s, BLOCKING, again=again) == pytest.approx((10 + 3 * again) * each_s)


def test_blocks_are_slower_beside_messages():
    # In 0.3 s of messages 0.24 s of work are done, and 0.48 of 0.6 in backward.
    assert exposed_s(0.1, replace(BESIDE, slower=0.25)) == pytest.approx(0.06 + 0.12 + 0.1)


@pytest.mark.parametrize("each_s", [0.1, 1.0])
@pytest.mark.parametrize("beside", [True, False])
def test_the_search_counts_what_the_simulator_does(each_s, beside):
    strategy = around()
    name = attention(strategy)
    prices = Prices(strategy.graph, strategy.mesh, Hand(), Messages(each_s), "sgd", beside=beside)
    configuration = strategy.configurations[name]
    work = workload(strategy.graph, configuration, strategy.mesh)
    choice = Choice(configuration, work, facts_of(work), {})
    effects = [e for part in GroupEffects(prices).inside(choice) for e in part.effects]
    total = sum(additive(Effects((effect,)), prices).communication for effect in effects)
    assert total == pytest.approx(exposed_s(each_s, BESIDE if beside else BLOCKING))
    # A rank's own keys and values, forth; and so many gradients back.
    sent = [send.bytes for effect in effects for send in effect.sends]
    assert sent == [2 * BATCH * (LENGTH // RANKS) * WIDTH * 4] * 10
