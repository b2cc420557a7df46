"""The judge's time, against prices added up edge by edge and a schedule of the same step."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from tensoropt.cluster import Mesh, load_cluster
from tensoropt.costs.collectives import predicted_collectives
from tensoropt.costs.prices import Prices
from tensoropt.plan.evaluate import Judged, costs_of, judge, judge_strategy
from tensoropt.profiling.overheads import Upkeep
from tensoropt.profiling.workload import workload
from tensoropt.sharding.serialise import strategy_from_dict
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.memory_curve import simulate
from tensoropt.simulate.overlap import BLOCKING, Overlap, link_levels, overlap_of
from tensoropt.simulate.step_tasks import DEVICE, schedule_of
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.costs.models import (
    ToyCommunication,
    ToyCompute,
    facts_of,
    gates,
    gpt2,
    llama,
    problem,
    tables_of,
    two_layers,
)

MODELS = {"two layers": two_layers, "gates": gates, "gpt2": gpt2, "llama": llama}
MESHES = [(1, 2), (2, 2), (1, 2, 2)]
BESIDE = Overlap(True, "buckets beside backward")


class Hand:
    """Round figures: forward 1 s and backward 2 s per group, a collective 0.01 s per byte and rank axis."""

    optimizer_s_per_element = 0.0
    source = "measured"

    def seconds(self, work, facts):
        return 1.0, 2.0

    def source_of(self, work):
        return "measured"


class PerByte:
    def __init__(self, seconds: float):
        self.seconds = seconds

    def time_s(self, kind, axes, num_bytes):
        return num_bytes * self.seconds

    def source(self, kind, axes):
        return "data sheet"

    def arriving_s(self, axes, work_s, num_bytes):
        return np.zeros(np.broadcast_shapes(np.shape(work_s), np.shape(num_bytes)))

    def leaving_s(self, axes, work_s, num_bytes):
        return np.zeros(np.broadcast_shapes(np.shape(work_s), np.shape(num_bytes)))


def played(strategy: Strategy, compute, communication, overlap: Overlap, upkeep=Upkeep()) -> Judged:  # noqa: B008
    works = {n: workload(strategy.graph, c, strategy.mesh) for n, c in strategy.configurations.items()}
    facts = {n: facts_of(w) for n, w in works.items()}
    prices = Prices(strategy.graph, strategy.mesh, compute, communication, "sgd", upkeep)
    return judge_strategy(strategy, works, facts, prices, "sgd", overlap)


def data_parallel(mesh=(1, 2)) -> Strategy:
    graph = problem(two_layers).graph
    data = {
        "mesh": list(mesh),
        "groups": {g.name: ["d0" if mesh[0] > 1 else "none", "d0"] for g in graph.groups},
        "hubs": {},
        "stored": {f"p_model_{n}_weight": ["R", "R/P"] for n in ("first", "second")},
    }
    return strategy_from_dict(data, graph)


W1, W2 = 24 * 32 * 4, 32 * 8 * 4


def figures(judged: Judged) -> tuple[float, float, float, float]:
    p = judged.played
    return tuple(float(x[0]) for x in (p.total_s, p.compute_s, p.communication_s, p.exposed_s))


def test_one_bucket_of_a_small_model_is_all_exposed():
    """Three groups, 3 s forward, 6 s backward; both gradients in one bucket, complete at the very end."""
    bucket = (W1 + W2) * 1e-3
    for overlap in (BESIDE, BLOCKING):
        total, compute, communication, exposed = figures(
            played(data_parallel(), Hand(), PerByte(1e-3), overlap)
        )
        # the loss is reduced as well: 4 bytes
        assert (compute, communication) == pytest.approx((9.0, bucket + 0.004))
        assert total == pytest.approx(9.0 + bucket + 0.004)
        assert exposed == pytest.approx(communication)


def one_gradient_each(monkeypatch) -> None:
    """Buckets of one gradient."""
    from tensoropt.simulate import batch as play

    fill = play.fill_buckets
    monkeypatch.setattr(play, "fill_buckets", lambda gradients: fill(gradients, limit_bytes=1))


def test_a_full_bucket_is_reduced_beside_backward(monkeypatch):
    """Buckets of one gradient each: the second layer's runs beside the first layer's backward of 2 s."""
    one_gradient_each(monkeypatch)
    each = PerByte(1.5 / W2)
    first = W1 * 1.5 / W2
    total, _, communication, exposed = figures(played(data_parallel(), Hand(), each, BESIDE))
    loss = 4 * 1.5 / W2
    assert communication == pytest.approx(1.5 + first + loss)
    assert exposed == pytest.approx(first + loss)  # 1.5 s of the 2 s are hidden
    assert total == pytest.approx(9.0 + first + loss)
    slow = PerByte(3.0 / W2)  # sticks out of the 2 s by 1 s, and the next bucket queues behind it
    total, *_ = figures(played(data_parallel(), Hand(), slow, BESIDE))
    assert total == pytest.approx(9.0 + 1.0 + 2 * first + 2 * loss)
    total, *_ = figures(played(data_parallel(), Hand(), slow, BLOCKING))
    assert total == pytest.approx(9.0 + 3.0 + 2 * first + 2 * loss)


def scattered_first(mesh) -> Strategy:
    """Data parallel; over the last axis the first weight is gathered and its gradient scattered."""
    graph, axes = problem(two_layers).graph, len(mesh) - 1
    data = {
        "mesh": list(mesh),
        "groups": {g.name: ["none", *["d0"] * axes] for g in graph.groups},
        "hubs": {},
        "stored": {
            "p_model_first_weight": ["R", *["R/P"] * (axes - 1), "S(0)"],
            "p_model_second_weight": ["R", *["R/P"] * axes],
        },
    }
    return strategy_from_dict(data, graph)


@pytest.mark.parametrize(
    ("mesh", "links", "queues"),
    [
        ((1, 2), {}, True),
        ((1, 2, 2), {(0, 1): ("node",), (1,): ("node",)}, True),
        ((1, 2, 2), {(0, 1): ("node", "gpu"), (1,): ("gpu",)}, True),
        ((1, 2, 2), {(0, 1): ("node",), (1,): ("gpu",)}, False),
        ((1, 2, 2), {}, True),
    ],
    ids=["one axis", "one level", "a shared level", "two levels", "a shared axis"],
)
def test_what_is_waited_for_queues_behind_a_reduction_on_its_links(monkeypatch, mesh, links, queues):
    """The second layer's bucket takes 3 s, the first layer's backward beside it 2 s. Then the first layer's
    gradient is scattered, 9 s: on the same links a second later than on others. On two axes what it leaves is
    reduced over the other one at the end, half the bytes, 4.5 s."""
    one_gradient_each(monkeypatch)
    judged = played(scattered_first(mesh), Hand(), PerByte(3.0 / W2), Overlap(True, "", links))
    loss, gather, scatter, last = 4 * 3.0 / W2, 9.0, 9.0, 4.5 * (len(mesh) - 2)
    total, compute, communication, exposed = figures(judged)
    assert communication == pytest.approx(gather + loss + 3.0 + scatter + last)
    assert compute == pytest.approx(9.0)
    assert total == pytest.approx(gather + 3.0 + loss + 4.0 + (3.0 if queues else 2.0) + scatter + last)
    assert exposed == pytest.approx(total - compute)
    assert schedule_of(judged.play)[0].total_s == pytest.approx(total)


def test_micro_batches_reduce_once_and_hide_nothing():
    total, compute, communication, exposed = figures(
        played(data_parallel((2, 2)), Hand(), PerByte(1e-3), BESIDE)
    )
    assert compute == pytest.approx(18.0)
    assert communication == pytest.approx((W1 + W2) * 1e-3 + 2 * 0.004)
    assert exposed == pytest.approx(communication)
    assert total == pytest.approx(compute + communication)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_blocking_time_is_the_sum_of_all_prices(name, mesh):
    """With nothing beside anything, the walk's sum is that of the strategy's edges, kernels and buckets."""
    prepared, rng = problem(MODELS[name]), random.Random(f"{name}{mesh}")
    micro = micro_strategies(prepared.graph, mesh[0])
    for _ in range(2):
        strategy = random_strategy(prepared.graph, mesh, micro, rng, recompute=0.5)
        upkeep = Upkeep(1e-9, 1e-9, 1e-6, 3e-6, arrive_s=2e-6, accumulate_s=5e-7)
        works = {n: workload(strategy.graph, c, mesh) for n, c in strategy.configurations.items()}
        facts = {n: facts_of(w) for n, w in works.items()}
        prices = Prices(strategy.graph, mesh, ToyCompute(), ToyCommunication(), "sgd", upkeep)
        judged = judge_strategy(strategy, works, facts, prices, "sgd", BLOCKING)
        assert judged.collectives(0) == predicted_collectives(strategy, facts)
        sent = sum(
            prices.communication.time_s(c.kind, c.axes, c.bytes) * n for c, n in judged.collectives(0).items()
        )
        assert judged.played.communication_s[0] == pytest.approx(sent)
        # the additive price shares buckets out by bytes; take its own reductions off and ours on
        shares = sum(prices.parameter(n, s)[2] for n, s in strategy.stored.items())
        reductions = sum(send.seconds for send in judged.play.reductions(0))
        additive = sum(prices.strategy_s(strategy, works, facts))
        assert judged.played.total_s[0] == pytest.approx(additive - shares + reductions)
        beside = judge_strategy(strategy, works, facts, prices, "sgd", BESIDE).played
        assert judged.played.compute_s[0] == pytest.approx(beside.compute_s[0])
        assert beside.compute_s[0] <= beside.total_s[0] <= judged.played.total_s[0] * (1 + 1e-12)
        assert judged.played.sources.sum() == pytest.approx(judged.played.total_s[0])
        assert simulate(strategy, facts, "sgd").peak.total == judged.played.memory.sum()
        timeline, _ = schedule_of(judged.play)
        assert sum(timeline.peak(DEVICE)[1].values()) == pytest.approx(judged.played.memory.sum())


class Late(ToyCommunication):
    """A collective takes longer by half the work before it, up to a limit of each axis and a little for its
    size; and the work after it by a third, up to a time for its size."""

    def arriving_s(self, axes, work_s, num_bytes):
        return np.minimum(np.asarray(work_s) / 2, 1e-4 * (1 + axes[0])) + 1e-9 * np.asarray(num_bytes)

    def leaving_s(self, axes, work_s, num_bytes):
        return np.minimum(np.asarray(work_s) / 3, 1e-5 * (1 + axes[0]) + 1e-8 * np.asarray(num_bytes))


@pytest.mark.parametrize("overlap", [BLOCKING, BESIDE], ids=["blocking", "beside"])
@pytest.mark.parametrize("name", ["two layers", "gpt2"])
def test_a_collective_after_work_takes_longer_in_walk_and_schedule_alike(name, overlap):
    mesh, prepared = (2, 2, 2), problem(MODELS[name])
    rng, micro = random.Random(name), micro_strategies(prepared.graph, 2)
    strategy = random_strategy(prepared.graph, mesh, micro, rng, recompute=0.5)
    upkeep = Upkeep(1e-9, 1e-9, 1e-6, 3e-6, arrive_s=2e-6, accumulate_s=5e-7)
    at_once = played(strategy, ToyCompute(), ToyCommunication(), overlap, upkeep)
    late = played(strategy, ToyCompute(), Late(), overlap, upkeep)
    added = late.played.communication_s[0] - at_once.played.communication_s[0]
    collectives = sum(late.collectives(0).values())
    sent = sum(c.bytes * n for c, n in late.collectives(0).items())
    assert 0 < added <= 3e-4 * collectives + 1e-9 * sent
    owed = late.played.compute_s[0] - at_once.played.compute_s[0]
    assert 0 < owed <= 3e-5 * collectives + 1e-8 * sent
    timeline, axes = schedule_of(late.play)
    assert timeline.total_s == pytest.approx(late.played.total_s[0])
    sent = sum(e.task.duration_s for e, of in zip(timeline.events, axes, strict=True) if of is not None)
    assert sent == pytest.approx(late.played.communication_s[0])


def test_only_the_first_of_several_collectives_waits_for_sleepers():
    """Data parallel: 1 s of forward per group, the loss's reduction, 6 s of backward, one bucket."""

    class Sleepers(PerByte):
        def arriving_s(self, axes, work_s, num_bytes):
            return np.minimum(work_s, 4.0) / 10

    total, compute, communication, _ = figures(played(data_parallel(), Hand(), Sleepers(1e-3), BLOCKING))
    bucket = (W1 + W2) * 1e-3
    assert communication == pytest.approx(0.004 + 0.3 + bucket + 0.4)
    assert total == pytest.approx(compute + communication)


def test_work_after_a_collective_is_slower_and_what_no_work_follows_is_not():
    """Data parallel: the loss's reduction (4 bytes) before backward; an idle optimizer after the bucket."""

    class Cold(PerByte):
        def leaving_s(self, axes, work_s, num_bytes):
            return np.minimum(work_s, 4.0) * 0.01 * np.asarray(num_bytes)

    warm = figures(played(data_parallel(), Hand(), PerByte(1e-3), BLOCKING))
    total, compute, communication, _ = figures(played(data_parallel(), Hand(), Cold(1e-3), BLOCKING))
    assert communication == pytest.approx(warm[2])
    assert compute == pytest.approx(warm[1] + 4.0 * 0.01 * 4)
    assert total == pytest.approx(compute + communication)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["gates", "gpt2"])
def test_many_at_once_are_played_as_one_by_one(name, mesh):
    tables, rng = tables_of(problem(MODELS[name]), mesh), random.Random(0)
    chosen = []
    for _ in range(12):
        choice = {v.name: rng.randrange(len(v.memory)) for v in tables.variables}
        options = {v.name: rng.randrange(len(v.memory[choice[v.name]])) for v in tables.variables}
        chosen.append((choice, options))
    (together,) = judge(tables, chosen, "adam", BESIDE)
    for row, one in enumerate(chosen):
        (alone,) = judge(tables, [one], "adam", BESIDE)
        for field in ("memory", "total_s", "compute_s", "communication_s", "exposed_s", "sources"):
            expected = getattr(alone.played, field)[0]
            assert np.allclose(getattr(together.played, field)[row], expected, rtol=1e-12), field
        assert together.collectives(row) == alone.collectives(0)


def test_strategies_beyond_a_part_are_played_in_the_next(monkeypatch):
    tables, rng = tables_of(problem(two_layers), (1, 2)), random.Random(0)
    chosen = []
    for _ in range(7):
        choice = {v.name: rng.randrange(len(v.memory)) for v in tables.variables}
        chosen.append((choice, dict.fromkeys(choice, 0)))
    (whole,) = judge(tables, chosen, "adam", BESIDE)
    monkeypatch.setattr("tensoropt.plan.evaluate.CHUNK", 3)
    parts = judge(tables, chosen, "adam", BESIDE)
    assert [len(part.played.total_s) for part in parts] == [3, 3, 1]
    assert costs_of(parts).tolist() == costs_of([whole]).tolist()
    assert costs_of([]).shape == (0, 2)


def test_which_links_a_mesh_axis_crosses():
    cluster = load_cluster("dgx-a100x2")
    names = [level.name for level in cluster.levels]
    mesh = Mesh(shape=(2, 8), names=("node", "gpu"))
    assert link_levels(cluster, mesh, (0,)) == (names[0],)
    assert link_levels(cluster, mesh, (1,)) == (names[1],)
    assert link_levels(cluster, mesh, (0, 1)) == tuple(names)
    inside = Mesh(shape=(2, 2, 4), names=("node", "gpu0", "gpu1"))
    assert link_levels(cluster, inside, (1,)) == link_levels(cluster, inside, (2,)) == (names[1],)


def test_what_overlaps_is_said_per_device_kind():
    gpu, cpu = load_cluster("dgx-a100"), load_cluster("local:2")
    assert overlap_of(gpu, gpu.meshes(1)[0]).beside
    local = overlap_of(cpu, cpu.meshes(1)[0])
    assert not local.beside
    assert "own cores" in local.words
    assert replace(local, beside=True).links((0,)) == local.links((0,))
