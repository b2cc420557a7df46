"""The simulator's time, against effects added up one by one and a schedule of the same step."""

import random
from dataclasses import replace

import numpy as np
import pytest

from tensoropt.cluster import Mesh, load_cluster
from tensoropt.costs.effects import NOTHING, Effects, additive
from tensoropt.costs.prices import Prices
from tensoropt.costs.process_memory import Communicator, ProcessMemory, named_terms, terms_of_collectives
from tensoropt.evaluation.evaluate import Evaluation, Evaluator, costs_of, evaluate_strategy, space_of
from tensoropt.profiling.overheads import Overheads
from tensoropt.profiling.workload import workload
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.candidates import BLOCKING, Overlap, link_levels, overlap_of
from tensoropt.simulate.collectives import coalesced, predicted_collectives, reductions, sent_bytes
from tensoropt.simulate.timed import AHEAD, REDUCTION
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.costs.models import (
    ToyCommunication,
    ToyCompute,
    gates,
    gpt2,
    llama,
    problem,
    tables_of,
    two_layers,
)
from tests.naive import Schedule, Task, schedule
from tests.simulate.strategies import facts_by_group, memory_curve, written

MODELS = {"two layers": two_layers, "gates": gates, "gpt2": gpt2, "llama": llama}
MESHES = [(1, 2), (2, 2), (1, 2, 2)]
BESIDE = Overlap(True, "buckets beside backward")
NO_OVERHEADS = Overheads()


class Hand:
    """Round figures: forward 1 s and backward 2 s per group, a collective 0.01 s per byte and rank axis."""

    optimizer_s_per_element = 0.0
    source = "measured"

    def __init__(self, host_s=(0.0, 0.0), product_s=0.0):
        self.host_s = host_s
        self.product_s = product_s

    def seconds(self, work, facts):
        return 1.0, 2.0

    def host_seconds(self, work):
        return self.host_s

    def weight_gradient_s(self, work, facts):
        return self.product_s

    def source_of(self, work):
        return "measured"


class PerByte:
    def __init__(self, seconds: float):
        self.seconds = seconds

    def time_s(self, kind, axes, num_bytes):
        return num_bytes * self.seconds

    def source(self, kind, axes):
        return "data sheet"


def evaluated_at(
    strategy: Strategy, compute, communication, overlap: Overlap, overheads=NO_OVERHEADS, optimizer="sgd",
    **more,
) -> Evaluation:  # fmt: skip
    works = {n: workload(strategy.graph, c, strategy.mesh) for n, c in strategy.configurations.items()}
    prices = Prices(strategy.graph, strategy.mesh, compute, communication, optimizer, overheads, **more)
    return evaluate_strategy(strategy, works, facts_by_group(strategy), prices, overlap)


def scheduled(evaluated: Evaluation) -> Schedule:
    """A slow twin of the clock: a step's events without their times, placed anew by the event scheduler,
    which knows only what waits for what and who occupies which links."""
    overlap, tasks, last, beside = evaluated.batch.overlap, [], (), []
    timed, stepped, ahead = evaluated.timed(), False, []
    before = {}
    for number, event in enumerate(timed.events):
        if number in timed.waits:  # as a block begins what was sent ahead is waited for
            last, ahead = (*last, *ahead), []
        # Before the optimizer's step all is waited for, also what is completed by gradients reduced last.
        if event.phase == "optimizer" and not event.name.startswith("reducing") and not stepped:
            last, stepped = (*last, *beside), True
        links = () if event.axes is None else tuple(f"link {name}" for name in overlap.links(event.axes))
        early = event.name in AHEAD.values()
        aside = early or (event.name == REDUCTION and overlap.beside)
        # A product and the reduction beside it begin after the same.
        product = timed.together.get(number)
        resources = links if aside or product is not None else ("device", *links)
        before[number] = last
        after = last if product is None else before[product]
        tasks.append(Task(name=event.name, duration_s=event.duration_s, resources=resources, after=after))
        if product is not None:
            last = (*last, len(tasks) - 1)
        elif aside:
            (ahead if early else beside).append(len(tasks) - 1)
        else:
            last = (len(tasks) - 1,)
    return schedule(tasks)


def assert_scheduled(evaluated: Evaluation) -> None:
    """Every event's start, the step's end and the memory's peak."""
    timed, timeline = evaluated.timed(), scheduled(evaluated)
    total = evaluated.metrics.time_s[0]
    starts = pytest.approx(timeline.starts, abs=1e-9 * total)
    assert [event.start_s for event in timed.events] == starts
    assert timeline.total_s == pytest.approx(total)
    peak = max(sum(kinds.values()) for _, kinds in timed.memory_at({}))
    assert peak == pytest.approx(evaluated.metrics.memory[0, 3:].sum())
    times = [time_s for time_s, _ in timed.memory_at({})]
    assert times == sorted(times)


def data_parallel(mesh=(1, 2)) -> Strategy:
    return written(problem(two_layers).graph, mesh, ["d0" if mesh[0] > 1 else "none", "d0"], ["R", "R/P"])


W1, W2 = 24 * 32 * 4, 32 * 8 * 4


def figures(evaluated: Evaluation) -> tuple[float, float, float, float]:
    p = evaluated.metrics
    return tuple(float(x[0]) for x in (p.time_s, p.compute_s, p.communication_s, p.exposed_s))


def one_gradient_each(monkeypatch) -> None:
    """Buckets of one gradient."""
    from tensoropt.simulate import collectives as reductions

    monkeypatch.setattr(reductions, "BUCKET_BYTES", 1)


def test_a_full_bucket_is_reduced_beside_backward(monkeypatch):
    """Buckets of one gradient each: the second layer's runs beside the first layer's backward of 2 s."""
    one_gradient_each(monkeypatch)
    each = PerByte(1.5 / W2)
    first = W1 * 1.5 / W2
    total, _, communication, exposed = figures(evaluated_at(data_parallel(), Hand(), each, BESIDE))
    loss = 4 * 1.5 / W2
    assert communication == pytest.approx(1.5 + first + loss)
    assert exposed == pytest.approx(first + loss)  # 1.5 s of the 2 s are hidden
    assert total == pytest.approx(9.0 + first + loss)
    slow = PerByte(3.0 / W2)  # sticks out of the 2 s by 1 s, and the next bucket queues behind it
    total, *_ = figures(evaluated_at(data_parallel(), Hand(), slow, BESIDE))
    assert total == pytest.approx(9.0 + 1.0 + 2 * first + 2 * loss)
    total, *_ = figures(evaluated_at(data_parallel(), Hand(), slow, BLOCKING))
    assert total == pytest.approx(9.0 + 3.0 + 2 * first + 2 * loss)


def scattered_first(mesh) -> Strategy:
    """Data parallel; over the last axis the first weight is gathered and its gradient scattered."""
    axes = len(mesh) - 1
    stored = ["R", *["R/P"] * (axes - 1), "S(0)"], ["R", *["R/P"] * axes]
    return written(problem(two_layers).graph, mesh, ["none", *["d0"] * axes], stored)


@pytest.mark.parametrize(("mesh", "links", "queues"), [
    ((1, 2), {}, True),
    ((1, 2, 2), {(0, 1): ("node",), (1,): ("node",)}, True),
    ((1, 2, 2), {(0, 1): ("node", "gpu"), (1,): ("gpu",)}, True),
    ((1, 2, 2), {(0, 1): ("node",), (1,): ("gpu",)}, False),
    ((1, 2, 2), {}, True),
], ids=["one axis", "one level", "a shared level", "two levels", "a shared axis"])  # fmt: skip
def test_what_is_waited_for_queues_behind_a_reduction_on_its_links(monkeypatch, mesh, links, queues):
    """The second layer's bucket takes 3 s, the first layer's backward beside it 2 s. Then the first layer's
    gradient is scattered, 9 s: on the same links a second later than on others. On two axes what it leaves is
    reduced over the other one at the end, half the bytes, 4.5 s."""
    one_gradient_each(monkeypatch)
    evaluated = evaluated_at(scattered_first(mesh), Hand(), PerByte(3.0 / W2), Overlap(True, "", links))
    loss, gather, scatter, last = 4 * 3.0 / W2, 9.0, 9.0, 4.5 * (len(mesh) - 2)
    total, compute, communication, exposed = figures(evaluated)
    assert communication == pytest.approx(gather + loss + 3.0 + scatter + last)
    assert compute == pytest.approx(9.0)
    assert total == pytest.approx(gather + 3.0 + loss + 4.0 + (3.0 if queues else 2.0) + scatter + last)
    assert exposed == pytest.approx(total - compute)
    assert_scheduled(evaluated)


def test_buckets_are_reduced_beside_the_backward_of_the_last_micro_batch(monkeypatch):
    """Four micro-batches of 9 s, in each the loss is reduced. Buckets of one gradient: in the last backward
    the second layer's takes 1.5 s beside the first layer's 2 s, which completes the other one."""
    one_gradient_each(monkeypatch)
    loss, first = 4 * 1.5 / W2, W1 * 1.5 / W2
    for overlap, hidden in ((BESIDE, 1.5), (BLOCKING, 0.0)):
        evaluated = evaluated_at(data_parallel((4, 2)), Hand(), PerByte(1.5 / W2), overlap)
        total, compute, communication, exposed = figures(evaluated)
        assert compute == pytest.approx(36.0)
        assert communication == pytest.approx(1.5 + first + 4 * loss)
        assert exposed == pytest.approx(communication - hidden)
        assert total == pytest.approx(compute + exposed)
        reduced = [event for event in evaluated.timed().events if event.name == REDUCTION]
        second = 3 * (9.0 + loss) + 3.0 + loss + 4.0  # after backward of the loss and of the second layer
        starts = [second, second + 2.0 + 1.5 - hidden]
        assert [event.start_s for event in reduced] == pytest.approx(starts)
        assert_scheduled(evaluated)


def test_a_gradient_that_is_reduced_last_completes_its_bucket_behind_its_block():
    """The second weight stays gathered. Its copy is made beside 1 s of the first micro-batch, its gradient
    scattered beside 2 s of the last one's backward; what is left of it is a bucket of its own on the other
    axis, behind the first weight's, which is on all links."""
    loss, stored = 4e-3, (["R", "R/P", "R/P"], ["held/P", "R/P", "S(0)"])
    strategy = written(problem(two_layers).graph, (2, 2, 2), ["d0", "d0", "d0"], stored)
    evaluated = evaluated_at(strategy, Hand(), PerByte(1e-3), BESIDE)
    backward = 2 * (9.0 + loss) + W2 * 1e-3 - 1.0
    reduced = [event for event in evaluated.timed().events if event.name == REDUCTION]
    first, second = backward + W1 * 1e-3, W2 / 2 * 1e-3
    assert [event.start_s for event in reduced] == pytest.approx([backward, first])
    assert figures(evaluated)[0] == pytest.approx(first + second)
    assert_scheduled(evaluated)


def any_choice(tables, rng, fixed=()):
    """A configuration and an option of every variable; the first configuration of those named."""
    choice = {v.key: rng.randrange(len(v.memory)) for v in tables.variables}
    choice |= {key: 0 for key in choice if getattr(key, "name", "") in fixed}
    return choice, {v.key: rng.randrange(len(v.memory[choice[v.key]])) for v in tables.variables}


def assert_as_one_by_one(evaluator: Evaluator, tables, chosen) -> None:
    """Whether a batch has the figures that each of it has in an evaluator of its own."""
    (together,) = evaluator(chosen)
    for row, one in enumerate(chosen):
        (alone,) = Evaluator(tables, evaluator.overlap)([one])
        for field in ("memory", "time_s", "compute_s", "communication_s", "exposed_s", "sources"):
            expected = getattr(alone.metrics, field)[0]
            assert np.allclose(getattr(together.metrics, field)[row], expected, rtol=1e-12), field
        assert together.collectives(row) == alone.collectives(0)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_blocking_time_is_the_sum_of_all_effects(monkeypatch, name, mesh):
    """With nothing beside anything, a step takes the sum of its effects; so with a bucket per gradient."""
    prepared, rng = problem(MODELS[name]), random.Random(f"{name}{mesh}")
    micro = micro_strategies(prepared.graph, mesh[0])
    for turn in range(2):
        if turn:
            one_gradient_each(monkeypatch)
        strategy = random_strategy(prepared.graph, mesh, micro, rng, recompute=0.5)
        overheads = Overheads(1e-9, 1e-9, 1e-6, 3e-6, arrive_s=2e-6, accumulate_s=5e-7)
        works = {n: workload(strategy.graph, c, mesh) for n, c in strategy.configurations.items()}
        facts = facts_by_group(strategy)
        nccl = ProcessMemory(communicator={"link": Communicator(10, 100, 1000)})
        prices = Prices(
            strategy.graph, mesh, ToyCompute(), ToyCommunication(), "sgd", overheads, process=nccl
        )
        evaluated = evaluate_strategy(strategy, works, facts, prices, BLOCKING)
        assert evaluated.collectives(0) == predicted_collectives(strategy, facts)
        terms = terms_of_collectives(nccl, ((c.kind, c.axes) for c in evaluated.collectives(0)), mesh[1:])
        assert named_terms(evaluated.metrics.terms[0].tolist()) == terms
        sent = sum(
            prices.communication.time_s(c.kind, c.axes, c.bytes) * n
            for c, n in evaluated.collectives(0).items()
        )
        assert evaluated.metrics.communication_s[0] == pytest.approx(sent)
        # the sum of effects shares buckets out by bytes; take its own reductions off and ours on
        shares = sum(
            additive(Effects((effect,)), prices).communication
            for owner in evaluated.batch.owners
            for effect in owner.effects.at(0).effects
            if effect.share is not None
        )
        # and collectives of several parameters by each one's own; likewise
        shares += sum(
            sent.send.seconds * (1 if effect.when.once else mesh[0])
            for owner in evaluated.batch.owners
            for effect in owner.effects.at(0).effects
            for sent in effect.beside
        )
        reduced = sum(one.sends[0].seconds for one in reductions(evaluated.batch))
        reduced += sum(
            prices.communication.time_s(c.kind, c.axes, int(c.bytes[0])) * (1 if c.only else mesh[0])
            for c in coalesced(evaluated.batch)
        )
        summed = NOTHING.plus(*(additive(o.effects.at(0), prices) for o in evaluated.batch.owners))
        expected = summed.compute + summed.communication - shares + reduced
        assert evaluated.metrics.time_s[0] == pytest.approx(expected)
        beside = evaluate_strategy(strategy, works, facts, prices, BESIDE).metrics
        assert evaluated.metrics.compute_s[0] == pytest.approx(beside.compute_s[0])
        assert beside.compute_s[0] <= beside.time_s[0] <= evaluated.metrics.time_s[0] * (1 + 1e-12)
        assert evaluated.metrics.sources.sum() == pytest.approx(evaluated.metrics.time_s[0])
        assert memory_curve(strategy, facts, "sgd").peak.total == evaluated.metrics.memory.sum()
        assert_scheduled(evaluated)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_tables_hold_the_sums_of_what_is_simulated(name, mesh):
    """Time of any combination of choices: what the search adds up of its tables, and what the simulator's
    owners of effects add up to. Memory of groups and parameters; that of tensors with several readers
    depends on them all."""
    tables, rng = tables_of(problem(MODELS[name]), mesh), random.Random(f"{name}{mesh}")
    for _ in range(5):
        choice, options = any_choice(tables, rng)
        _, compute, communication = tables.breakdown(choice, options)
        if not np.isfinite(communication):
            continue
        (evaluated,) = Evaluator(tables, BLOCKING)([(choice, options)])
        summed = NOTHING.plus(*(additive(o.effects.at(0), tables.prices) for o in evaluated.batch.owners))
        assert summed.compute == pytest.approx(compute)
        assert summed.communication == pytest.approx(communication)
        lasting = sum(v.memory[choice[v.key]][options[v.key]] for v in tables.variables)
        of_owners = (
            additive(o.effects.at(0), tables.prices).memory
            for o in evaluated.batch.owners
            if o.kind != "tensor"
        )
        kept_uses = sum(of_owners)
        shared = sum(
            e.table[e.rows[choice[e.a]], e.cols[choice[e.b]]][0]
            for e in tables.edges
            if e.a.kind == "parameter"
        )
        assert kept_uses == pytest.approx(lasting + shared)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["gates", "gpt2"])
def test_many_at_once_are_simulated_as_one_by_one(name, mesh):
    tables, rng = tables_of(problem(MODELS[name]), mesh), random.Random(0)
    assert_as_one_by_one(Evaluator(tables, BESIDE), tables, [any_choice(tables, rng) for _ in range(12)])


def test_strategies_beyond_a_part_are_simulated_in_the_next(monkeypatch):
    tables, rng = tables_of(problem(two_layers), (1, 2)), random.Random(0)
    chosen = [any_choice(tables, rng) for _ in range(7)]
    (whole,) = Evaluator(tables, BESIDE)(chosen)
    monkeypatch.setattr("tensoropt.evaluation.evaluate.CHUNK", 3)
    parts = Evaluator(tables, BESIDE)(chosen)
    assert [len(part.metrics.time_s) for part in parts] == [3, 3, 1]
    assert costs_of(parts).tolist() == costs_of([whole]).tolist()
    assert costs_of([]).shape == (0, 2)


def test_a_point_has_the_figures_of_its_strategy():
    prepared, mesh = problem(two_layers), Mesh(shape=(2,), names=("gpu",))
    tables, rng = tables_of(prepared, (1, 2)), random.Random(0)
    (found,) = Evaluator(tables, BESIDE)([any_choice(tables, rng) for _ in range(7)])
    for row in range(7):
        point = found.point(row, space_of(prepared, mesh, tables, ()), 0, additive=(8.0, 9.0))
        assert (point.additive_memory_bytes, point.additive_time_s) == (8.0, 9.0)
        assert point.memory == tuple(found.metrics.memory[row])
        assert point.sent_bytes == sent_bytes(found.collectives(row), (2,))


@pytest.mark.parametrize(("host_s", "micro", "bound"), [
    ((0.0, 0.0), 1, False),
    ((0.5, 1.0), 1, False),
    ((2.0, 0.5), 1, False),  # forward is slower on the host, and it has caught up when backward is over
    ((2.0, 1.0), 1, False),  # alike
    ((2.0, 3.0), 1, True),
    ((2.0, 3.0), 2, True),
])  # fmt: skip
def test_a_step_takes_the_slower_of_device_and_host(host_s, micro, bound):
    """A group takes the device 1 + 2 s, and its gradients 0.08 s of an all-reduce in all, which no host
    issues here."""
    strategy = data_parallel((micro, 2))
    groups = len(strategy.graph.groups)
    evaluated = evaluated_at(strategy, Hand(host_s), PerByte(0.0), BESIDE)
    of = evaluated.metrics
    assert of.compute_s[0] == 3.0 * groups * micro
    assert of.host_s[0] == sum(host_s) * groups * micro
    assert of.time_s[0] == max(of.compute_s[0], of.host_s[0])
    assert of.idle_s[0] == of.time_s[0] - of.compute_s[0] - of.exposed_s[0]
    assert bool(of.idle_s[0]) == bound
    events = evaluated.timed().events
    ends = [event.end_s for event in events]
    assert ends == sorted(ends)
    assert ends[-1] <= of.time_s[0]
    takes = np.tile(np.repeat(host_s, groups), micro)
    issued = np.cumsum(takes) - takes
    assert not bound or [event.start_s for event in events if event.axes is None] == issued.tolist()
    worked = sum(event.duration_s for event in events if event.axes is None)
    assert worked == pytest.approx(of.compute_s[0])


def test_issuing_edges_gradients_and_steps_is_the_hosts():
    """Two parameters: each has an arrival and an optimizer's step, and all gradients one bucket. What
    autograd passes where an edge moves one way only is the host's, too."""
    overheads = Overheads(of_host=Overheads(call_s=10.0, pass_s=1.0, arrive_s=100.0, step_s=1000.0))
    evaluated = evaluated_at(data_parallel(), Hand(), PerByte(0.0), BESIDE, overheads)
    ways = [data_parallel().steps(edge) for edge in data_parallel().edges()]
    moved, passed = sum(bool(w) for way in ways for w in way), sum(bool(a) != bool(b) for a, b in ways)
    assert moved > 0
    buckets = len(reductions(evaluated.batch))
    assert buckets == 1
    assert evaluated.metrics.host_s[0] == 2 * (100 + 1000) + 10 * moved + passed + 10 * buckets
    gathered = evaluated_at(scattered_first((1, 2)), Hand(), PerByte(0.0), BLOCKING, overheads)
    assert gathered.timed().events[0].start_s == 10.0  # behind the call that gathers its weight


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
    assert overlap_of(gpu, gpu.meshes(1)[0], beside=True).beside
    waiting = overlap_of(gpu, gpu.meshes(1)[0], beside=False)
    assert (waiting.beside, waiting.words) == (False, "all communication is waited for, as requested")
    local = overlap_of(cpu, cpu.meshes(1)[0], beside=True)
    assert not local.beside
    assert "own cores" in local.words
    assert replace(local, beside=True).links((0,)) == local.links((0,))
