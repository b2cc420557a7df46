"""What pipelines take: seconds and memory by hand, and beside what fake ranks send and keep."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tensoropt.cluster import Cluster, Mesh, load_cluster
from tensoropt.costs.communication import CommunicationModel
from tensoropt.costs.process_memory import process_memory
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.exploration.facts import host_words
from tensoropt.pipeline.costs import PipelinePrices
from tensoropt.pipeline.evaluate import PipelineEvaluation, _evaluate_pipeline, fits
from tensoropt.pipeline.memory import memory_of_actions, owned_by_place
from tensoropt.pipeline.points import pipelined_point
from tensoropt.pipeline.stages import Cutter
from tensoropt.pipeline.strategy import SCHEDULES, PipelinedStrategy
from tensoropt.profiling.overheads import Overheads
from tensoropt.simulate.collectives import Collective
from tensoropt.simulate.recording import Owned
from tensoropt.units import format_seconds
from tensoropt.verify.fake_ranks import check_on_fake_ranks
from tensoropt.verify.findings import RunFindings
from tensoropt.verify.random_strategies import random_pipeline
from tensoropt.verify.recorder import compare_collectives, rows_of
from tests.costs.models import facts_of, four, problem
from tests.costs.test_communication import make_cluster
from tests.pipeline.models import frozen, split_along_the_batch, tied
from tests.simulate.test_simulator import Hand

ROWS, WEIGHT = 4 * 24 * 4, 24 * 24 * 4
"""Bytes of what a layer makes of a micro-batch of 4 rows, and of its weights."""
MESSAGE = 10e-6 + ROWS / 10e9
"""Seconds of such a micro-batch between nodes."""
RESULT = 10e-6 + 4 / 10e9
"""Seconds in which the loss gets to one other rank."""


def evaluated(
    strategy: PipelinedStrategy, cluster: Cluster | None = None, optimizer: str = "adam",
    overheads: Overheads | None = None, compute: Any = None, **more: Any,
) -> PipelineEvaluation:  # fmt: skip
    """At hand's prices on CPU ranks, every place a node."""
    cluster = cluster or make_cluster(strategy.places, strategy.devices_per_place)
    training = strategy.graph.atoms.graph.training
    prices = prices_of(strategy, cluster, compute or Hand(), overheads, optimizer, **more)
    return _evaluate_pipeline(strategy, lambda _, work: facts_of(work, training), prices)


def prices_of(
    strategy: PipelinedStrategy, cluster: Cluster, compute: Any, overheads: Any = None,
    optimizer: str = "adam", **more: Any,
) -> PipelinePrices:  # fmt: skip
    mesh = Mesh(
        shape=strategy.mesh[1:], names=("stage", *(f"axis{i}" for i in range(len(strategy.mesh) - 2)))
    )
    communication, more = CommunicationModel(cluster, mesh), {"beside": False} | more
    return PipelinePrices(cluster, mesh, compute, communication, overheads or Overheads(), optimizer, **more)


def halves(schedule: str, micro_batches: int = 4) -> PipelinedStrategy:
    """Two of the four layers each, behind the second of them the loss."""
    return split_along_the_batch(problem(four).graph, (2,), (micro_batches, 2), schedule)


# -- seconds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_by_hand(schedule):
    # One second forward and two backward for each group: 3 and 6 at place 0, of two layers and what departs;
    # 4 and 8 at place 1, of what arrives, two layers and the loss. Place 1 never waits once it has begun.
    found = evaluated(halves(schedule))
    # On CPU ranks, the sender copies: place 1 sends each of 4 gradients before it goes on.
    assert found.times.total_s == pytest.approx(3 + MESSAGE + 4 * 12 + 4 * MESSAGE + 6)
    assert found.time_s == pytest.approx(found.times.total_s + RESULT)
    assert found.times.working_s == pytest.approx((4 * 9, 4 * 12))
    assert found.times.sending_s == pytest.approx((4 * MESSAGE, 4 * MESSAGE))
    # Of place 1, which has most to do.
    assert found.busiest.compute_s == pytest.approx(48)
    assert found.busiest.communication_s == found.busiest.exposed_s == pytest.approx(4 * MESSAGE + RESULT)
    assert found.idle_s == pytest.approx(3 + MESSAGE + 6)
    idle = (57 - 36) + (57 - 48)
    assert found.times.bubble == pytest.approx(idle / (2 * 57), rel=1e-4)


def test_a_place_that_waits_for_others_is_not_bound_by_its_host():
    quick, slow = (Overheads(of_host=Overheads(step_s=s)) for s in (1.0, 1000.0))
    points = [
        pipelined_point(evaluated(halves("1f1b"), overheads=one), Mesh(shape=(2,), names=("stage",)), space=0)
        for one in (quick, slow)
    ]
    # Two parameters at each place, and nothing else that the host is charged for.
    assert [point.host_s for point in points] == pytest.approx([2.0, 2000.0])
    assert points[0].idle_s > 0
    assert [point.host_bound for point in points] == [False, True]
    assert "overlapping the device's work" in host_words(points[0])
    waits = format_seconds(2000.0 - points[1].compute_s - points[1].exposed_s)
    assert f"the device waits for {waits} of it" in host_words(points[1])


def test_a_process_takes_the_same_of_a_gpu_as_in_other_plans_and_a_communicator_for_messages():
    strategy, cluster = halves("1f1b"), load_cluster("dgx-a100[2]")
    process = process_memory(cluster, strategy.graph.atoms.graph)
    found = evaluated(strategy, cluster, process_memory=lambda graph: process_memory(cluster, graph))
    (level,) = process.communicator.values()
    for terms, peak, tensors in zip(found.terms, found.peaks, found.memory.sum(axis=1), strict=True):
        assert terms["context"] == process.context
        # Of all ranks, whose barrier is a sum, and along the pipeline; a stage on one device sends no more.
        assert terms["communicators"] == level.bytes({"all_reduce"}, 2) + level.bytes({"send"}, 2)
        assert peak == pytest.approx(tensors + sum(terms.values()))
    point = pipelined_point(found, Mesh(shape=(2,), names=("stage",)), space=0)
    assert point.memory_bytes == pytest.approx(sum(point.memory) + sum(point.terms.values()))


class Half(Hand):
    """A device of half the speed."""

    def seconds(self, work: Any, facts: Any) -> tuple[float, float]:
        forward, backward = super().seconds(work, facts)
        return 2 * forward, 2 * backward


def test_each_place_computes_at_its_own_pace():
    strategy, cluster = halves("1f1b"), make_cluster(2, 1)
    fast, slow = (prices_of(strategy, cluster, kind) for kind in (Hand(), Half()))
    found = evaluated(strategy, cluster, compute=Half(), of_places=(fast, slow))
    # Place 0 as above, place 1 twice as long: 8 and 16, and still it never waits.
    assert found.times.total_s == pytest.approx(3 + MESSAGE + 4 * 24 + 4 * MESSAGE + 6)
    assert found.times.working_s == pytest.approx((4 * 9, 4 * 24))
    assert fits(found, prices_of(strategy, cluster, Half(), of_places=(fast, slow)))
    peaks = found.memory.sum(axis=1)
    for place, least in enumerate(peaks):
        small = replace(cluster.devices[0], memory_bytes=int(least) - 1)
        less = replace(cluster, devices=(small, small))
        own = [fast, slow]
        own[place] = prices_of(strategy, less, Hand())
        assert not fits(found, prices_of(strategy, cluster, Half(), of_places=own))


def test_more_micro_batches_shrink_the_bubble():
    bubbles = [evaluated(halves("1f1b", count)).times.bubble for count in (2, 4, 8, 16)]
    # (p - 1) of m + p - 1, but for stages of 9 and 12 seconds.
    assert bubbles == pytest.approx([1 - 21 * m / (2 * (9 + 12 * m)) for m in (2, 4, 8, 16)], rel=1e-4)
    assert bubbles == sorted(bubbles, reverse=True)


def test_gradients_of_parameters_fill_the_bubble():
    plain, apart = evaluated(halves("1f1b")), evaluated(halves("zero_bubble"))
    # Place 0 has only half of its last backward behind the last gradient's message; the other half follows.
    assert apart.time_s < plain.time_s
    assert apart.busiest.compute_s == plain.busiest.compute_s
    assert apart.times.bubble < plain.times.bubble


def test_copies_of_a_parameter_are_added_up_behind_the_step():
    found = evaluated(split_along_the_batch(problem(tied).graph, (2,), (4, 2)))
    # Of two copies: half of the gradient there and back.
    tie = 10e-6 + WEIGHT / 10e9
    assert found.time_s == pytest.approx(found.times.total_s + tie + RESULT)
    assert found.busiest.exposed_s == pytest.approx(4 * MESSAGE + tie + RESULT)


def test_stages_that_are_split_reduce_in_their_last_backward():
    found = evaluated(split_along_the_batch(problem(four).graph, (2,), (4, 2, 2)))
    # Two layers' gradients in one bucket, between two ranks of a node: 1 µs each way and their bytes.
    bucket = 2 * 1e-6 + 2 * WEIGHT / 100e9
    for stage, backward_s in zip(found.stages, (6.0, 8.0), strict=True):
        parts = stage.metrics.parts
        assert parts.backward_s[0].tolist() == pytest.approx([backward_s] * 2 + [backward_s + bucket], 1e-9)
        assert parts.end_s.tolist() == [0.0]
    assert found.times.working_s[0] == pytest.approx(4 * 9 + bucket, 1e-9)
    # Beside what other places compute, as much is sent; the schedule says what is waited for.
    dgx = load_cluster("dgx-a100[4]")
    apart, beside = (evaluated(found.strategy, dgx, beside=one).loads[0] for one in (False, True))
    assert beside.communication_s == pytest.approx(apart.communication_s)


def test_inference_has_no_way_back():
    strategy = split_along_the_batch(problem(four, "inference").graph, (2,), (4, 2), "gpipe")
    found = evaluated(strategy)
    assert {h.kind for h in found.times.happenings} == {"F", "B", "S"}
    assert [float(s.metrics.parts.backward_s.sum()) for s in found.stages] == [0.0, 0.0]


# -- memory ---------------------------------------------------------------------------------------

LASTING = [2 * WEIGHT, 2 * WEIGHT, 4 * WEIGHT]
"""Parameters, gradients and Adam's two moments of two layers."""
BACKWARD = 3 * ROWS + WEIGHT
"""What a backward of two layers needs: what both made, two gradients of rows, that of one layer's weights."""


def test_1f1b_keeps_few_micro_batches_and_gpipe_all():
    # Place 0 keeps what both layers made, the second of which departs. Place 1 also keeps what arrived.
    few, every = evaluated(halves("1f1b")), evaluated(halves("gpipe"))
    # Beside the micro-batch that is computed: at most one of two in flight, so that the peak is when the
    # optimizer steps; three of four.
    assert few.memory.tolist() == [[*LASTING, 0, 2 * WEIGHT]] * 2
    assert every.memory.tolist() == [
        [*LASTING, 3 * 2 * ROWS, BACKWARD], [*LASTING, 3 * 3 * ROWS, BACKWARD + ROWS],
    ]  # fmt: skip
    assert every.memory_bytes == 8 * WEIGHT + 10 * ROWS + BACKWARD
    assert every.fullest == 1


@pytest.mark.parametrize("micro_batches", [2, 4, 8, 16])
def test_memory_of_1f1b_follows_its_places_and_not_its_micro_batches(micro_batches):
    rows = 16 // micro_batches * 24 * 4
    found = evaluated(halves("1f1b", micro_batches))
    kept = memory_of_actions(found.strategy, found.stages, 0)[:, 3]
    assert max(kept) == 2 * rows
    gpipe = evaluated(halves("gpipe", micro_batches))
    assert gpipe.memory[0][3] == (micro_batches - 1) * 2 * rows


def kept_and_needed(found: PipelineEvaluation, place: int) -> list[tuple[str, int, int]]:
    """By action what is kept beside it and what it needs; "end" is what comes behind the last."""
    names = [*(f"{kind}{micro_batch}" for kind, _, micro_batch in found.strategy.actions[place]), "end"]
    curve = memory_of_actions(found.strategy, found.stages, place)
    return [(name, int(kinds[3]), int(kinds[4])) for name, kinds in zip(names, curve, strict=True)]


def test_gpipe_holds_gradients_that_it_sent_until_the_step_is_over():
    kept, forward, backward = 2 * ROWS, 3 * ROWS, BACKWARD
    # What went forward has come when its gradient does, so that place 0 holds nothing.
    assert kept_and_needed(evaluated(halves("gpipe")), 0) == [
        ("F0", 0, forward), ("F1", kept, forward), ("F2", 2 * kept, forward), ("F3", 3 * kept, forward),
        ("B0", 3 * kept, backward), ("B1", 2 * kept, backward), ("B2", kept, backward), ("B3", 0, backward),
        ("end", 0, 2 * WEIGHT),
    ]  # fmt: skip
    # With every backward of place 1 one more.
    assert [needed for name, _, needed in kept_and_needed(evaluated(halves("gpipe")), 1) if "B" in name] == [
        BACKWARD + ROWS, BACKWARD + 2 * ROWS, BACKWARD + 3 * ROWS, BACKWARD + 4 * ROWS,
    ]  # fmt: skip


def test_1f1b_holds_the_gradient_that_it_sent_until_its_next_forward():
    strategy = split_along_the_batch(problem(four).graph, (1, 2), (4, 3))
    found = kept_and_needed(evaluated(strategy), 1)
    # The middle one of three places: what arrived and what the layer made, of two micro-batches.
    kept, forward, backward = 2 * ROWS, 3 * ROWS, BACKWARD
    assert found[:-1] == [
        ("F0", 0, forward), ("F1", kept, forward), ("B0", kept, backward), ("F2", kept, forward),
        ("B1", kept, backward), ("F3", kept, forward), ("B2", kept, backward), ("B3", 0, backward + ROWS),
    ]  # fmt: skip


def test_gradients_wait_where_those_of_parameters_are_made_later():
    found = kept_and_needed(evaluated(halves("zero_bubble")), 1)
    # Forward keeps what arrived and what both layers made, W needs two layers' gradients and what arrived and
    # what the first one made: what the last one made goes with the loss.
    own, left = 3 * ROWS, 4 * ROWS
    by_action = {name: kept for name, kept, _ in found}
    # From the second I on a W follows each.
    assert (by_action["F0"], by_action["I0"], by_action["F1"]) == (0, 0, left)
    assert (by_action["I1"], by_action["W0"], by_action["W3"]) == (left, left, 0)
    needed = {name: needed for name, _, needed in found}
    # Beside what forward kept: the gradients of both layers' results, and those of what each was given.
    assert needed["I0"] == own + 4 * ROWS
    # One gradient of a parameter at a time, beside two of what arrived that were sent.
    assert needed["W0"] == left + WEIGHT + 3 * ROWS
    # Of the first stage all is made later; until then what came back waits.
    first = kept_and_needed(evaluated(halves("zero_bubble")), 0)
    assert {needed for name, _, needed in first if name[0] == "I"} == {ROWS}


def test_room_is_taken_for_what_is_to_come():
    """PyTorch asks for messages of several stages to a place as soon as they are sent."""
    found = kept_and_needed(evaluated(halves("zero_bubble")), 0)
    needed = {name: needed for name, _, needed in found}
    assert (needed["F1"], needed["F2"]) == (3 * ROWS, 4 * ROWS)


def test_stages_of_one_place_share_what_passes_between_them():
    found = evaluated(split_along_the_batch(problem(four).graph, (1, 2, 3), (4, 2), "zbv"))
    curve = kept_and_needed(found, 1)
    # Stages 1 and 2 lie at place 1: each keeps what arrived and what it made, of which one tensor is both's.
    assert [kept for name, kept, _ in curve][:2] == [0, 2 * (16 // 4) * 24 * 4]
    parts = found.stages[2].metrics.parts
    assert curve[1][1] + curve[1][2] < parts.between_bytes[0] + parts.forward_bytes[0] + 2 * ROWS
    # In W0 of stage 2, a gradient waits for I0 of stage 1 beside a message that is to come.
    assert curve[5] == ("W0", 5 * ROWS, WEIGHT + 2 * ROWS + 2 * ROWS)


def test_the_curve_is_that_of_the_fullest_place():
    found = evaluated(halves("gpipe"))
    curve = found.memory_curve()
    own = [h for h in found.times.happenings if h.place == 1 and h.kind in "FB"]
    assert [start for start, _ in curve] == [*(h.start_s for h in own), own[-1].end_s]
    assert max(float(kinds.sum()) for _, kinds in curve) == found.memory_bytes


def test_a_place_has_the_parameters_of_all_its_stages():
    found = evaluated(split_along_the_batch(problem(four).graph, (1, 2, 3), (4, 2), "interleaved_1f1b"))
    assert found.memory[:, :3].tolist() == [LASTING, LASTING]
    assert [stage.metrics.memory[0, 0] for stage in found.stages] == [WEIGHT] * 4


def test_a_stage_without_a_backward_keeps_nothing_for_one():
    """It holds what it sent until that has come: until the next message, or all forwards are over."""
    graph = problem(frozen).graph
    cuts, row = [Cutter(graph).beginning("blocks.2")], 24 * 4
    few = evaluated(split_along_the_batch(graph, cuts, (4, 2), "1f1b"))
    stored = few.stages[0].metrics.memory[0]
    assert stored[1:].tolist()[:2] == [0.0, 0.0]
    assert stored[0] == 4 * (8 * 24 + 24 + 2 * (2 * 24 + 2 * 24 * 48 + 48 + 24))
    curve = kept_and_needed(few, 0)
    assert {kept for _, kept, _ in curve} == {0}
    needed = {name: size for name, _, size in curve}
    sent, forward = 16 * row, needed["F0"]
    assert needed == {
        "F0": forward, "F1": forward + sent, "B0": 0, "F2": forward, "B1": 0, "F3": forward, "B2": 0, "B3": 0,
        "end": 0,
    }  # fmt: skip
    gpipe = evaluated(split_along_the_batch(graph, cuts, (4, 2), "gpipe"))
    every = {name: size for name, _, size in kept_and_needed(gpipe, 0)}
    assert [every[f"F{n}"] for n in range(4)] == [forward + n * sent for n in range(4)]
    assert every["B0"] == 0


def check_owners(found: PipelineEvaluation) -> list[list[Owned]]:
    """What is owned at every place is its memory at each point, and no row is below 0."""
    places = []
    for place in range(found.strategy.places):
        curve = memory_of_actions(found.strategy, found.stages, place)
        owned = owned_by_place(found.strategy, found.stages, place)
        for point, kinds in enumerate(curve):
            at = [row for row in owned if row[5] <= point < row[6]]
            assert sum(row[4] for row in at) == pytest.approx(kinds.sum())
            assert sum(row[4] for row in at if row[3] == "kept") == pytest.approx(kinds[3])
        assert all(row[4] > 0 for row in owned)
        places.append(owned)
    return places


def test_a_step_of_stages_without_a_backward_by_hand():
    """Place 0 goes through its forwards; place 1 never waits once it has begun."""
    graph = problem(frozen).graph
    found = evaluated(split_along_the_batch(graph, [Cutter(graph).beginning("blocks.3")], (4, 2), "1f1b"))
    first, last = (stage.metrics.parts for stage in found.stages)
    each, message = float((last.forward_s + last.backward_s)[0, 1]), 10e-6 + 16 * 24 * 4 / 10e9
    assert found.times.total_s == pytest.approx(float(first.forward_s[0, 1]) + message + 4 * each)
    assert found.times.sending_s == pytest.approx((4 * message, 0.0))


# -- beside fake ranks ----------------------------------------------------------------------------


def test_sends_are_counted():
    found = evaluated(halves("1f1b"))
    assert found.sent_by(0) == {Collective("send", (0, 1), ROWS): 4, Collective("broadcast", (0,), 4): 1}
    split = evaluated(split_along_the_batch(problem(four).graph, (2,), (4, 2, 2)))
    # Both layers' gradients in a bucket, along the axis behind the pipeline's.
    assert split.sent_by(3)[Collective("all_reduce", (1,), 2 * WEIGHT)] == 1


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize(("name", "mesh", "schedule"), [
    ("tests.costs.models:four", (4, 2, 2), "1f1b"),
    ("tests.pipeline.models:skip", (2, 4), "gpipe"),
    ("tests.pipeline.models:tables", (2, 2), "gpipe"),
    ("tests.pipeline.models:tied", (4, 2, 2), "interleaved_1f1b"),
    ("tests.costs.models:four", (4, 2), "zbv"),
    ("tests.execute.models:transformer", (2, 2, 2), "1f1b"),
])  # fmt: skip
def test_ranks_issue_what_is_predicted(name, mesh, schedule):
    found, issued = of_fake_ranks(name, drawn(mesh, schedule, 1))
    assert issued.ranks_checked == list(range(found.strategy.devices))
    check_issued(found, issued)


def of_fake_ranks(
    name: str, strategy_of: Callable[[Any], PipelinedStrategy], optimizer: str = "adam"
) -> tuple[PipelineEvaluation, RunFindings]:
    """What is predicted of a pipeline of a model, and what fake ranks do."""
    loaded = load_model(ModelSpec(name))
    strategy = strategy_of(loaded.graph)
    return evaluated(strategy, optimizer=optimizer), check_on_fake_ranks(loaded, strategy, optimizer)


def drawn(mesh: tuple[int, ...], schedule: str, seed: int, *more: float) -> Callable[..., PipelinedStrategy]:
    return lambda graph: random_pipeline(graph, mesh, schedule, random.Random(seed), *more)


def along(*how: Any) -> Callable[[Any], PipelinedStrategy]:
    return lambda graph: split_along_the_batch(graph, *how)


def check_memory(found: PipelineEvaluation, issued: RunFindings, *, each: int = 1, **near: float) -> None:
    """Of every rank, or of the first of ``each``."""
    predicted = pytest.approx(found.memory.sum(axis=1).tolist(), **near)
    assert issued.memory_tracked_of_ranks[::each] == predicted, found.strategy.cuts


def check_issued(found: PipelineEvaluation, issued: RunFindings) -> None:
    for rank, rows in zip(issued.ranks_checked or (), issued.collectives_of_ranks, strict=True):
        shown = [
            row | {"axes": [a - 1 for a in row["axes"]]} if row["kind"] != "send" else row for row in rows
        ]
        assert compare_collectives(rows_of(found.sent_by(rank)), shown) == [], rank


BOTH = ("1f1b", "gpipe")
THREE = [f"tests.{name}" for name in ("costs.models:four", "pipeline.models:skip", "pipeline.models:tied")]


def also_slow(*row: Any) -> Any:
    return pytest.param(*row, marks=pytest.mark.slow)


@pytest.mark.sweep(quick=7)
@pytest.mark.parametrize(("name", "how", "optimizer", "near"), [
    # But for scalars: losses, counts, numbers of micro-batches, and what has the places of tensors.
    *(("tests.costs.models:three", along((1,), (4, 2), schedule), "sgd", {"abs": 96}) for schedule in BOTH),
    # Two tensors arrive whose gradients lie in one storage, which are counted twice.
    *(("tests.execute.models:transformer", along((10,), (4, 2), schedule), "sgd", {"rel": 0.025})
      for schedule in BOTH),
    # A gradient of two tensors goes back as one copy.
    ("tests.pipeline.models:turned", along((2,), (4, 2), "gpipe"), "sgd", {"abs": 256}),
    # Behind an activation that keeps what it made, up to a micro-batch of that is missing at the peak: 3 %
    # of models as small as these.
    *((name, along((1, 2), (4, 3), schedule), "adam", {"rel": 0.05}) for name in THREE for schedule in BOTH),
    # Groups whose gradients wait in one storage, in an order that is not that of forward.
    also_slow("zoo:llama-tiny", drawn((4, 2), "zero_bubble", 1, 0.3), "adam", {"rel": 0.015}),
    # A gradient that an operator shares between its reads, and another reader's is added to.
    also_slow("tests.simulate.held_out:convnext", drawn((4, 2), "zero_bubble", 0, 0.3), "adam",
              {"rel": 0.015}),
    # Two stages of one place: what the first gave is kept by both; the second's parameters come later.
    also_slow("tests.pipeline.models:deep", drawn((4, 2), "zbv", 2, 0.3), "adam", {"rel": 0.04}),
    # Gradients of two tensors that come from the second in one storage, which are counted twice.
    also_slow("tests.pipeline.models:deep", drawn((4, 2), "zbv", 4, 0.3), "adam", {"rel": 0.06}),
])  # fmt: skip
def test_ranks_keep_what_is_predicted(name, how, optimizer, near):
    found, issued = of_fake_ranks(name, how, optimizer)
    check_memory(found, issued, **near)
    if found.strategy.schedule in BOTH:
        assert np.argmax(issued.memory_tracked_of_ranks) == found.fullest


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule", "seed"), [
    ("tests.costs.models:four", "1f1b", 0), ("tests.costs.models:four", "gpipe", 0),
    ("tests.execute.models:transformer", "interleaved_1f1b", 2),
    ("tests.pipeline.models:deep", "interleaved_1f1b", 7),
])  # fmt: skip
def test_gradients_are_alive_until_the_next_backward_of_their_place_is_over(name, schedule, seed):
    found, issued = of_fake_ranks(name, drawn((4, 2, 2), schedule, seed, 0.0))
    alive = [float(stage.metrics.parts.trailing_bytes[0].max()) for stage in found.stages]
    assert max(alive) > 1000.0
    check_memory(found, issued, each=2, rel=0.005)
    assert found.busiest.compute_s + found.busiest.exposed_s + found.idle_s == pytest.approx(found.time_s)
    assert 0.0 <= found.busiest.exposed_s <= found.busiest.communication_s * (1 + 1e-9)


# The encoder's table is also the head: what is used twice is not twice at one place.
@pytest.mark.sweep
@pytest.mark.parametrize(("name", "schedule"), [
    *itertools.product(["frozen", "adapted", "frozen_but_the_last"], SCHEDULES),
    *itertools.product(["frozen_encoder"], ["gpipe", "1f1b", "zero_bubble"]),
])  # fmt: skip
def test_stages_without_a_backward_keep_and_issue_what_is_predicted(name, schedule):
    for seed in range(2):
        found, issued = of_fake_ranks(f"tests.pipeline.models:{name}", drawn((4, 2), schedule, seed, 0.3))
        # Of the fullest place. Two stages of adapters at a place keep 17 % more in zbv: it is not known why.
        within = 0.2 if (name, schedule) == ("adapted", "zbv") else 0.05
        check_memory(found, issued, rel=0.0, abs=within * found.memory_bytes)
        check_issued(found, issued)


def test_nothing_that_was_sent_stays_for_the_optimizer():
    # The last place of 1F1B has its peak there: Adam's temporaries of two layers.
    found, issued = of_fake_ranks("tests.costs.models:four", along((2,), (4, 2)))
    assert issued.memory_tracked_of_ranks[1] == pytest.approx(found.memory[1].sum(), abs=64)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_the_owners_are_what_is_alive_and_no_more(schedule):
    graph = problem(frozen).graph  # whose first stage has no backward
    check_owners(
        evaluated(split_along_the_batch(graph, [Cutter(graph).beginning("blocks.2")], (4, 2), schedule))
    )
    for place, owned in enumerate(check_owners(evaluated(halves(schedule, 16)))):
        for point in range(owned[0][6]):
            at = [row for row in owned if row[5] <= point < row[6] and row[3] == "kept"]
            kept = {tensor.partition("micro-batch")[2] for _, tensor, *_ in at}
            # What 1F1B has in flight depends on its places, not on its micro-batches.
            assert schedule == "gpipe" or len(kept) <= 3
        # Each micro-batch's tensors by name: relu's results, which its layer keeps.
        saved = {tensor for _, tensor, what, *_ in owned if what.startswith("saved")}
        assert {f"linear{number}, micro-batch 3" for number in (("", "_1"), ("_2", "_3"))[place]} <= saved
