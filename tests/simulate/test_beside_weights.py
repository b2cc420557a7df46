"""Reductions beside the product of a weight's gradient, in time, in memory and in the search, by hand.

Messages of a ring beside the blocks of attention: in time, in the search and among what is sent, by
hand.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensoropt.costs.effects import Effects, additive
from tensoropt.costs.group_effects import Choice, GroupEffects
from tensoropt.costs.prices import Prices
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.ops.calls import RING_SEND
from tensoropt.ops.families.attention import ATTENTION
from tensoropt.profiling.workload import workload
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.regions import Region
from tensoropt.sharding.sequence import sequence_strategies
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.candidates import BLOCKING, Overlap
from tensoropt.verify.fake_ranks import step_on, tracked_memory
from tensoropt.verify.random_strategies import random_strategy
from tests.costs.models import Recipe, facts_of, problem, three
from tests.models import Call
from tests.simulate.strategies import facts_by_group, memory_curve, written
from tests.simulate.test_simulator import (
    BESIDE,
    Hand,
    PerByte,
    assert_scheduled,
    evaluated_at,
    figures,
    one_gradient_each,
)

X = 16 * 24 * 4
"""Bytes of what the middle one of three layers reads."""


NAMES = ("enter", "first", "second")


def columns_then_rows(mesh: tuple[int, ...] = (1, 2), enter: str = "none") -> Strategy:
    """Megatron's pair behind a first layer that is whole, or split along the batch; further axes split the
    batch."""
    graph, data = problem(three).graph, len(mesh) - 2
    micro = "d0" if mesh[0] > 1 else "none"
    labels = [(micro, *["d0"] * data, one) for one in (enter, "out_features", "in_features", "none")]
    first = ["R/P" if mesh[0] > 1 else "R", *["R/P"] * data]
    layouts = ("R/P" if enter == "d0" else "R", "S(0)", "S(1)")
    stored = {f"p_model_{name}_weight": [*first, layout] for name, layout in zip(NAMES, layouts, strict=True)}
    return written(graph, mesh, labels, stored)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(("each_s", "product_s", "slower", "exposed_s", "longer_s"), [
    (0.5, 0.8, 0.0, 0.0, 0.0),
    (0.8, 0.5, 0.0, 0.3, 0.0),
    # In 0.5 s of the collective 0.4 s of the product are computed.
    (0.5, 0.8, 0.25, 0.0, 0.1),
    # The product takes 0.625 s, all beside the collective.
    (0.8, 0.5, 0.25, 0.175, 0.125),
    (0.5, 0.0, 0.25, 0.5, 0.0),
])  # fmt: skip
def test_a_reduction_is_hidden_behind_the_product(micro, each_s, product_s, slower, exposed_s, longer_s):
    """The gradient of what the pair reads takes ``each_s``, the reduction of its result a third of that."""
    assert len(columns_then_rows().reduced_beside) == 1
    compute, overlap = Hand(product_s=product_s), replace(BESIDE, slower=slower)
    evaluated = evaluated_at(columns_then_rows((micro, 2)), compute, PerByte(each_s * micro / X), overlap)
    total, computed, communication, exposed = figures(evaluated)
    forward_s = each_s / 3
    assert communication == pytest.approx(micro * (each_s + forward_s))
    assert exposed == pytest.approx(micro * (exposed_s + forward_s))
    assert computed == pytest.approx(micro * (12.0 + longer_s))
    assert total == pytest.approx(computed + exposed)
    if not slower:
        assert_scheduled(evaluated)
    assert evaluated.metrics.sources.sum() == pytest.approx(computed + communication)


def test_nothing_is_hidden_where_nothing_runs_beside():
    for product_s in (0.0, 0.8):
        evaluated = evaluated_at(columns_then_rows(), Hand(product_s=product_s), PerByte(0.5 / X), BLOCKING)
        _, compute, communication, exposed = figures(evaluated)
        assert (compute, exposed) == pytest.approx((12.0, communication))
        assert_scheduled(evaluated)


def test_the_event_lies_beside_the_product():
    """Forward takes 4 s and a third of 0.6 s, the backward of two groups 4 s: of the pair's first layer 2 s,
    the last 0.8 of which are the product."""
    evaluated = evaluated_at(columns_then_rows(), Hand(product_s=0.8), PerByte(0.6 / X), BESIDE)
    events = evaluated.timed().events
    reduced = next(event for event in events if event.phase == "backward" and event.axes is not None)
    begun_s = 4.2 + 4.0 + 2.0 - 0.8
    assert (reduced.start_s, reduced.duration_s) == pytest.approx((begun_s, 0.6))
    (product,) = (e for e in events if e.axes is None and e.start_s == pytest.approx(begun_s))
    assert product.duration_s == pytest.approx(0.8)


@pytest.mark.parametrize(("axis_links", "late_s"), [(("a", "a"), 0.5), (("a", "b"), 0.0)], ids=["one", "two"])
def test_it_queues_behind_a_bucket_on_its_links(monkeypatch, axis_links, late_s):
    """Over another axis the bucket of the second layer's weight is reduced, 1.5 s from the beginning of the
    first layer's backward of 2 s, whose product takes 1 s. On links of its own the reduction of 1 s begins a
    second before the end; on the bucket's half a second later."""
    one_gradient_each(monkeypatch)
    strategy = columns_then_rows((1, 2, 2))
    bucket, gradient = 8 * 16 * 4, X / 2
    links = {(0,): (axis_links[0],), (1,): (axis_links[1],), (0, 1): ("a", "b")}

    class Each(PerByte):
        def time_s(self, kind: str, axes: Any, num_bytes: float) -> float:
            if tuple(axes) == (0,) and num_bytes == bucket:
                return 1.5
            return 1.0 if tuple(axes) == (1,) and num_bytes == gradient else 0.0

    evaluated = evaluated_at(strategy, Hand(product_s=1.0), Each(0.0), Overlap(True, "", links))
    total, compute, communication, exposed = figures(evaluated)
    assert (compute, communication) == pytest.approx((12.0, 2.5))
    assert (total, exposed) == pytest.approx((12.0 + late_s, late_s))
    assert_scheduled(evaluated)


@pytest.mark.parametrize("enter", ["none", "d0"], ids=["all_reduce", "reduce_scatter"])
def test_bytes_beside_the_product_are_those_of_a_rank(enter):
    """An all-reduce is in place; a reduce-scatter's shard and, where they are copied, pieces are there
    too."""
    loaded = load_model(ModelSpec("tests.simulate.test_beside_weights:three", 0))
    strategy = Strategy.from_data(columns_then_rows(enter=enter).to_data(), loaded.graph)
    assert strategy.reduced_beside
    peak = memory_curve(strategy, facts_by_group(strategy), "sgd").peak.total
    with step_on(0, loaded, strategy, "sgd") as step:
        step()
        assert tracked_memory(step)["peak"] == pytest.approx(peak, abs=16)


RANKS, BATCH, LENGTH, WIDTH = 4, 2, 16, 8


def attending() -> Recipe:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.enter(x).unsqueeze(1)
        mixed = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return m.leave(mixed.squeeze(1)).square().mean()

    model = Call(forward, enter=nn.Linear(WIDTH, WIDTH), leave=nn.Linear(WIDTH, WIDTH))
    return model, (torch.randn(BATCH, LENGTH, WIDTH),), {}


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
        assert_scheduled(evaluated)
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
