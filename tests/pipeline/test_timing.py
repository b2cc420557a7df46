"""A pipeline's step in time, against what the papers' formulas give and against values by hand.

What each rank of a pipeline sends, counted by hand.

When messages that places sent have come, and what waits between the two parts of a backward.
"""

import itertools
from collections import Counter
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.errors import PlanError
from tensoropt.pipeline.evaluate import stage_works
from tensoropt.pipeline.receipts import taken_back, taken_on
from tensoropt.pipeline.stages import Cutter
from tensoropt.pipeline.strategy import PipelinedStrategy, place_actions
from tensoropt.pipeline.timing import (
    DURATIONS,
    ScheduleTimes,
    StageSeconds,
    arriving_bytes,
    coordinate,
    crossing_bytes,
    departing_bytes,
    sent_by_rank,
    stored_bytes,
)
from tensoropt.profiling.fact_finding import find_facts, find_split_facts
from tensoropt.simulate.collectives import Collective
from tests.costs.models import four, problem
from tests.naive import Schedule, Task, schedule
from tests.pipeline.models import frozen, skip, split_along_the_batch, tables, tied

ROW, WEIGHT, LOSS = 24 * 4, 24 * 24 * 4, 4
"""Bytes of one row between layers, of a layer's weights, and of the loss."""
RESULT = Collective("broadcast", (0,), LOSS)


def sent(strategy: PipelinedStrategy, rank: int) -> Counter[Collective]:
    """With no collectives within stages."""
    return sent_by_rank(strategy, rank, [{}] * len(strategy.stages))


@pytest.mark.parametrize(("build", "mode", "cuts", "sizes", "schedule", "sends"), [
    # Every micro-batch of 4 of 16 rows goes on, and its gradient comes back.
    (four, "train", (1, 2), (4, 3), "1f1b", [{1: 4}, {0: 4, 2: 4}, {1: 4}]),
    # A rank of a place of 2 x 2 sends its part of 8, in two micro-batches, to its like.
    (four, "train", (2,), (2, 2, 2, 2), "gpipe", [{n: 2} for n in (4, 5, 6, 7, 0, 1, 2, 3)]),
    # What is made of frozen parameters gives nothing back, and inference neither.
    (frozen, "train", ("blocks.2", "blocks.4"), (4, 3), "1f1b", [{1: 4}, {2: 4}, {1: 4}]),
    (four, "inference", (2,), (4, 2), "1f1b", [{1: 4}, {}]),
])  # fmt: skip
def test_what_ranks_send(build, mode, cuts, sizes, schedule, sends):
    graph = problem(build, mode).graph
    places = [Cutter(graph).beginning(cut) if isinstance(cut, str) else cut for cut in cuts]
    strategy = split_along_the_batch(graph, places, sizes, schedule)
    rows = (64 if build is frozen else 16) // prod((sizes[0], *sizes[2:]))
    for rank, to in enumerate(sends):
        messages = {Collective("send", (rank, other), rows * ROW): count for other, count in to.items()}
        assert sent(strategy, rank) == {**messages, RESULT: 1}


def test_uneven_parts_are_each_ranks_own():
    # 16 rows over three ranks: 6, 6 and 4.
    strategy = split_along_the_batch(problem(four).graph, (2,), (1, 2, 3), "gpipe")
    sizes = [next(c.bytes for c in sent(strategy, rank) if c.kind == "send") for rank in range(6)]
    assert sizes == [6 * ROW, 6 * ROW, 4 * ROW] * 2
    # Prices are those of the fullest.
    assert departing_bytes(strategy, 0) == arriving_bytes(strategy, 1) == 6 * ROW


def test_all_that_crosses_a_cut_is_sent():
    strategy = split_along_the_batch(problem(skip).graph, (1, 2), (1, 3), "gpipe")
    assert [departing_bytes(strategy, stage) for stage in range(3)] == [16 * ROW, 32 * ROW, 0]
    assert [arriving_bytes(strategy, stage) for stage in range(3)] == [0, 16 * ROW, 32 * ROW]
    assert sent(strategy, 1) == {
        Collective("send", (1, 2), 16 * ROW): 2,
        Collective("send", (1, 0), 16 * ROW): 1,
        RESULT: 1,
    }


def test_what_has_no_gradient_comes_back_from_nowhere():
    graph = problem(tables).graph
    strategy = split_along_the_batch(graph, (6,), (1, 2), "gpipe")
    assert strategy.parts[1].arriving == ("softmax", "softmax_1", "mul_1", "dropout.0")
    # The mask and the rows are 16 by 24, the two others one row; only those of parameters learn.
    assert departing_bytes(strategy, 0) == arriving_bytes(strategy, 1) == 34 * ROW
    assert departing_bytes(strategy, 0, learning=True) == 17 * ROW
    assert arriving_bytes(strategy, 1, learning=True) == 17 * ROW
    sends = Counter({c.bytes: n for c, n in sent(strategy, 1).items() if c.kind == "send"})
    assert sends == {16 * ROW: 1, ROW: 1}
    # The mask is not sent where it is made again.
    again = split_along_the_batch(graph, (6,), (1, 2), "gpipe", frozenset({"softmax"}))
    assert departing_bytes(again, 0) == 18 * ROW


def test_stages_of_one_place_send_one_another_nothing():
    strategy = split_along_the_batch(problem(four).graph, (1, 2, 3), (4, 2), "zbv")
    # Place 1 has stages 1 and 2: one message from place 0 and one to it, each with its gradient.
    ends = Counter(
        {c.axes: n for c, n in (sent(strategy, 0) + sent(strategy, 1)).items() if c.kind == "send"}
    )
    assert ends == {(0, 1): 8, (1, 0): 8}
    round_and_round = split_along_the_batch(problem(four).graph, (1, 2, 3), (4, 2), "interleaved_1f1b")
    both = sent(round_and_round, 0) + sent(round_and_round, 1)
    # 0 to 1, 1 back round to 0, 0 to 1: three cuts, there and back.
    assert sum(n for c, n in both.items() if c.kind == "send") == 3 * 2 * 4


def test_copies_of_a_parameter_add_up_their_gradients_once():
    strategy = split_along_the_batch(problem(tied).graph, (1, 2), (4, 3))
    tie = Collective("all_reduce", (0,), WEIGHT)
    assert [sent(strategy, rank)[tie] for rank in range(3)] == [1, 0, 1]
    # Sharded, each rank adds up its shard.
    data = split_along_the_batch(problem(tied).graph, (1, 2), (4, 3, 2)).to_data()
    for stage in (0, 2):
        data["stages"][stage]["stored"]["p_model_first_weight"] = ["R/P", "S(0)"]
    sharded = PipelinedStrategy.from_data(data, problem(tied).graph)
    assert stored_bytes(sharded.stages[0], "p_model_first_weight") == WEIGHT // 2
    tie = tie._replace(bytes=WEIGHT // 2)
    assert [sent(sharded, rank)[tie] for rank in range(6)] == [1, 1, 0, 0, 1, 1]


def test_collectives_within_a_stage_lie_behind_the_pipelines_axis():
    strategy = split_along_the_batch(problem(four).graph, (2,), (2, 2, 2))
    within = [{Collective("all_reduce", (0,), 100): 3}, {Collective("all_gather", (0,), 50): 1}]
    first, last = (sent_by_rank(strategy, rank, within) for rank in (1, 3))
    assert first[Collective("all_reduce", (1,), 100)] == 3
    assert last[Collective("all_gather", (1,), 50)] == 1
    assert first[Collective("all_gather", (1,), 50)] == 0


def test_a_rank_stands_on_the_mesh_of_its_stage():
    (stage, _) = split_along_the_batch(problem(four).graph, (2,), (2, 2, 2, 4), "gpipe").stages
    assert [coordinate(stage, inner) for inner in (0, 1, 4, 7)] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 3),
    ]  # fmt: skip
    assert crossing_bytes(stage, "depart.relu_1", "relu_1", 7) == ROW


def like(forward: float, backward: float, **more: float) -> StageSeconds:
    """A stage whose micro-batches are alike."""
    return StageSeconds((forward,) * 3, (backward,) * 3, **more)


def run(name: str, places: int, micro_batches: int, stages: list[StageSeconds], **how: Any) -> ScheduleTimes:
    actions = place_actions(name, places, len(stages) // places, micro_batches)
    return ScheduleTimes(actions, stages, **how)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("places", "micro_batches"), [(2, 2), (2, 7), (4, 8), (8, 32)])
def test_equal_stages_take_what_the_formula_says(name, places, micro_batches):
    # Narayanan et al., SC 2021, section 2.2: (m + p - 1) (t_f + t_b), of which (p - 1) (t_f + t_b) is the
    # bubble.
    times = run(name, places, micro_batches, [like(1.0, 2.0)] * places)
    assert times.total_s == pytest.approx((micro_batches + places - 1) * 3.0)
    assert times.idle_s(0) == pytest.approx((places - 1) * 3.0)
    assert times.bubble == pytest.approx((places - 1) / (micro_batches + places - 1))


def test_uneven_stages_wait_for_the_slowest():
    # Alpa (Zheng et al., OSDI 2022), equation 2: the sum of all, and the slowest once for each further
    # micro-batch.
    stages = [like(1.0, 1.0), like(2.0, 2.0), like(1.0, 1.0)]
    assert run("gpipe", 3, 6, stages).total_s == pytest.approx(8.0 + 5 * 4.0)
    # With 1F1B the slowest stage has a forward to do while the last one has its first micro-batch: it never
    # stops between the first's forward and the first's backward.
    assert run("1f1b", 3, 6, stages).total_s == pytest.approx(1.0 + 6 * 4.0 + 1.0)


@pytest.mark.parametrize(("places", "per_place", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 3, 8)])
def test_several_stages_to_a_place_shrink_the_bubble(places, per_place, micro_batches):
    # Narayanan et al., section 2.2: the bubble is (p - 1) (t_f + t_b) / v.
    stages = [like(1.0 / per_place, 2.0 / per_place)] * (places * per_place)
    times = run("interleaved_1f1b", places, micro_batches, stages)
    assert times.total_s == pytest.approx(3.0 * micro_batches + (places - 1) * 3.0 / per_place)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_stages_without_a_backward_wait_for_none(name):
    # One second each; the last of three also goes back, two seconds for each of 6 micro-batches.
    stages = [like(1.0, 1.0), like(1.0, 1.0), like(1.0, 2.0)]
    times = run(name, 3, 6, stages, forward_only=2)
    assert times.total_s == pytest.approx(2.0 + 6 * 3.0)
    first = [h for h in times.happenings if h.place == 0]
    # Its forwards follow one another, and what would be its backward takes no time.
    assert max(h.end_s for h in first) == pytest.approx(6.0)
    assert {h.end_s - h.start_s for h in first if h.kind != "F"} == {0.0}
    # With a backward, even of no seconds, it would wait for the gradients that come.
    waiting = run(name, 3, 6, [like(1.0, 0.0), *stages[1:]])
    assert max(h.end_s for h in waiting.happenings if h.place == 0) > 6.0


def test_nothing_goes_back_to_a_stage_without_a_backward():
    stages = [like(1.0, 0.0, send_s=0.5), like(1.0, 2.0, send_s=0.5, send_back_s=0.5), like(1.0, 2.0)]
    stages[2] = like(1.0, 2.0, send_back_s=0.5)
    times = run("1f1b", 3, 4, stages, forward_only=1)
    assert Counter(h.stage for h in times.happenings if h.kind == "R") == {2: 4}
    assert Counter(h.stage for h in times.happenings if h.kind == "S") == {0: 4, 1: 4}


def test_zero_bubble_waits_less_than_1f1b():
    plain = run("1f1b", 4, 8, [like(1.0, 2.0)] * 4)
    apart = run("zero_bubble", 4, 8, [like(1.0, 2.0)] * 4)
    v = run("zbv", 4, 8, [like(0.5, 1.0)] * 8)
    # Qi et al., ICLR 2024, table 2: ZB-H1's bubble is (p - 1) (t_f + t_b - t_w).
    assert plain.idle_s(0) == pytest.approx(3 * 3.0)
    assert apart.idle_s(0) == pytest.approx(3 * (1.0 + 1.0 - 1.0))
    assert v.total_s < apart.total_s
    assert sum(v.working_s) == pytest.approx(sum(plain.working_s))


def test_messages_and_ends_by_hand():
    # Stage 0: forward 1, message 1, and a backward of 2 that waits for stage 1's gradient, which takes 1 to
    # come.
    stages = [like(1.0, 2.0, send_s=1.0, sync_s=0.5), like(1.0, 2.0, send_back_s=1.0, sync_s=0.25)]
    times = run("gpipe", 2, 1, stages)
    assert times.total_s == pytest.approx(1 + 1 + 1 + 2 + 1 + 2 + 0.5)
    # Two micro-batches: the second message waits for none, as the forward takes as long as it.
    assert run("gpipe", 2, 2, stages).total_s == pytest.approx(1 + 1 + 1 + 1 + 2 + 2 + 1 + 2 + 0.5)
    # A place whose core copies the message does not compute meanwhile.
    blocking = run("gpipe", 2, 2, stages, blocking_sends=True)
    assert blocking.total_s == pytest.approx(1 + 1 + 1 + 1 + 1 + 2 + 1 + 2 + 1 + 2 + 0.5)
    assert blocking.sending_s == (2.0, 2.0)


def test_slow_messages_follow_one_another():
    stages = [like(1.0, 1.0, send_s=3.0), like(1.0, 1.0, send_back_s=3.0)]
    times = run("gpipe", 2, 3, stages)
    sends = [h for h in times.happenings if h.kind == "S"]
    assert [(h.start_s, h.end_s) for h in sends] == [(1.0, 4.0), (4.0, 7.0), (7.0, 10.0)]


def test_first_and_last_micro_batch_have_seconds_of_their_own():
    stages = [StageSeconds((3.0, 1.0, 2.0), (1.0, 1.0, 4.0)), like(0.0, 0.0)]
    assert run("gpipe", 2, 4, stages).total_s == pytest.approx(3 + 1 + 1 + 2 + 1 + 1 + 1 + 4)


def test_gathers_begin_with_the_step_and_reductions_run_behind_backward():
    """Worked out by hand: two places, one micro-batch, 1 s forward and 2 s backward each."""
    whole = StageSeconds((4.0, 1.0, 1.0), (2.0, 2.0, 7.0))
    apart = whole.communicating_apart((0.0, 0.0, 0.0), slower=0.0)
    assert (apart.forward, apart.backward) == ((1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
    assert (apart.begin_s, apart.reduce_s) == (3.0, 5.0)
    # Both gather from 0 to 3; forwards end at 4 and 5, backwards at 7 and 9; the first place reduces to 14.
    times = run("gpipe", 2, 1, [apart, apart])
    assert times.total_s == 14.0
    # One after the other: 4 + 1 + ... as the same stages wait for both inside their micro-batches.
    assert run("gpipe", 2, 2, [whole, whole]).total_s > run("gpipe", 2, 2, [apart, apart]).total_s


def test_gradients_go_to_their_shards_beside_later_micro_batches():
    """Worked out by hand: two places, the second of which takes no time, and three micro-batches of 1 s
    forward and 6 s backward, of which the last 4 s wait for gradients."""
    whole = StageSeconds((1.0,) * 3, (6.0,) * 3)
    apart = whole.communicating_apart((4.0, 4.0, 4.0), slower=0.25)
    # Beside 4 s of communication 3.2 s of computing are done: 0.8 s longer.
    assert apart.backward == pytest.approx((2.8, 2.8, 2.0))
    assert (apart.scatter_s, apart.reduce_s) == pytest.approx((4.0, 4.0))
    # Forwards end at 1, 2, 3; backwards at 5.8, 8.6, 10.6; gradients arrive at 9.8, 13.8, 17.8.
    assert run("gpipe", 2, 3, [apart, like(0.0, 0.0)]).total_s == pytest.approx(17.8)
    quick = whole.communicating_apart((1.0, 1.0, 1.0), slower=0.0)
    # Two backwards of 5 s hide what follows them, the last one waits for its second.
    assert run("gpipe", 2, 3, [quick, like(0.0, 0.0)]).total_s == pytest.approx(3 + 3 * 5 + 1)


def test_a_place_gathers_and_reduces_for_its_stages_in_turn():
    stage = StageSeconds((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), begin_s=2.0, reduce_s=3.0)
    times = ScheduleTimes(place_actions("interleaved_1f1b", 2, 2, 2), [stage] * 4)
    starts = {(h.stage, h.micro_batch): h.start_s for h in times.happenings if h.kind == "F"}
    assert starts[0, 0] == 2.0
    assert starts[2, 0] == 4.0
    last = {h.stage: h.end_s for h in times.happenings if h.kind == "B"}
    assert times.total_s == max(max(last[2] + 3.0, last[0]) + 3.0, max(last[3] + 3.0, last[1]) + 3.0)


def test_a_place_computes_on_while_its_gradients_are_under_way():
    """Worked out by hand: a place of micro-batches of 1 s forward and 6 s backward, of which the last 4 s
    wait for gradients; parameters come in the first 2 s."""
    whole = StageSeconds((3.0, 1.0, 1.0), (6.0,) * 3, sync_s=2.0)
    early = whole.gathering_early()
    assert (early.forward, early.begin_s) == ((1.0,) * 3, 2.0)
    behind = early.reducing_behind((4.0,) * 3, buckets_s=1.5, slower=0.25)
    assert behind.backward == pytest.approx((2.8, 2.8, 2.0))
    assert (behind.scatter_s, behind.reduce_s, behind.sync_s) == pytest.approx((4.0, 5.5, 0.5))
    nobody = like(0.0, 0.0)
    # Forwards end at 3, 4, 5; the first backward at 7.8, the others with the gradients of the one before.
    times = run("gpipe", 2, 3, [behind, nobody], one_behind=True)
    ends = [h.end_s for h in times.happenings if h.kind == "B" and h.place == 0]
    assert ends == pytest.approx([7.8, 11.8, 15.8])
    assert times.total_s == pytest.approx(15.8 + 5.5 + 0.5)
    # For parameters 2 s, for gradients 1.2 s and 2 s, and 5.5 s at the end.
    assert times.waiting_s == pytest.approx((2.0 + 1.2 + 2.0 + 5.5, 0.0))
    assert times.idle_s(0) == pytest.approx(0.0)


def test_what_does_not_wait_for_gradients_is_as_fast_behind_or_not():
    whole = StageSeconds((3.0, 1.0, 1.0), (6.0, 6.0, 7.0), sync_s=2.0)
    behind = whole.gathering_early().reducing_behind((0.0,) * 3, buckets_s=0.0, slower=0.1)
    assert behind.backward == whole.backward
    assert run("1f1b", 2, 4, [behind] * 2, one_behind=True).total_s <= run("1f1b", 2, 4, [whole] * 2).total_s


def _twin(times: ScheduleTimes) -> Schedule:
    """The same tasks, scheduled one by one."""
    made, stages = times._tasks, times.stages
    _, starts, successors, channels, *_ = made._columns
    after: list[tuple[int, ...]] = [() for _ in channels]
    for task, (first, behind) in enumerate(itertools.pairwise(starts)):
        for successor in successors[first:behind]:
            after[successor] += (task,)
    return schedule(
        [
            Task(DURATIONS[what], stages[stage].durations[what], (f"{at}",) if at >= 0 else (), before)
            for stage, what, at, before in zip(*made._where, channels, after, strict=True)
        ]
    )


seconds = st.sampled_from((0.0, 0.5, 1.0)) | st.floats(0, 3)


of_thirds = st.tuples(seconds, seconds, seconds)
any_stage = st.builds(StageSeconds, of_thirds, of_thirds, *[seconds] * 3, st.floats(0, 1), *[seconds] * 3)
shapes = st.sampled_from([("gpipe", 4), ("1f1b", 4), ("zero_bubble", 4), ("interleaved_1f1b", 2), ("zbv", 2)])
ways = st.fixed_dictionaries(
    {"blocking_sends": st.booleans(), "one_behind": st.booleans(), "forward_only": st.integers(0, 3)}
)


@given(st.lists(any_stage, min_size=4, max_size=4), shapes, st.sampled_from((4, 6)), ways)
def test_tasks_take_place_as_one_by_one(stages, shape, micro_batches, how):
    times = run(*shape, micro_batches, stages, **how)
    _, starts, ends, order = times._tasks.times(stages)
    twin = _twin(times)
    assert (starts.tolist(), ends.tolist(), order.tolist()) == (twin.starts, twin.ends, twin.order)
    assert times.total_s == twin.total_s


def test_seconds_that_are_none_are_refused():
    with pytest.raises(PlanError, match=r"B1 of stage 1 takes -1.0 s; durations are finite and at least 0"):
        run("1f1b", 2, 4, [like(1.0, 1.0), StageSeconds((1.0,) * 3, (1.0, -1.0, 1.0))])


@pytest.mark.parametrize(("axes", "rows"), [((), 4), ((2,), 2)])
def test_gradients_wait_for_those_of_parameters_to_be_made(axes, rows):
    # Of the result of each of two layers, for a micro-batch of 4 rows.
    strategy = split_along_the_batch(problem(four).graph, (2,), (4, 2, *axes), "zero_bubble")
    works = stage_works(strategy)[1]
    split = [find_split_facts(work) for name, work in works.items() if name.startswith("linear")]
    assert [facts.waiting_bytes for facts in split] == [rows * ROW] * 2
    # The gradient of the weight, and nothing else.
    assert [facts.weights_bytes for facts in split] == [24 * 24 * 4] * 2


def test_a_split_backward_releases_nothing_until_its_first_part_is_over():
    work = stage_works(split_along_the_batch(problem(four).graph, (2,), (4, 2), "zero_bubble"))[1]["linear_2"]
    whole, split = find_facts(work), find_split_facts(work)
    assert split.inputs_bytes >= whole.backward_peak_bytes - sum(
        spec.bytes for _, spec, role in work.inputs if role == "parameter"
    )
    # relu's result is released with the part behind the layer, unless a later layer holds it.
    assert split.released_bytes == whole.kept_bytes


def test_a_stage_learns_from_what_comes_that_its_gradients_have_come():
    # Of two places with two stages each stage 1 lies at place 1, whose place 0 sends what it takes.
    actions = place_actions("interleaved_1f1b", 2, 2, 4)
    order = [(a.kind, a.micro_batch) for a in actions[0] if a.stage == 0]
    found = taken_back("interleaved_1f1b", actions, 1)
    for micro_batch, taken in found.items():
        before = order[: order.index(("F", micro_batch))]
        assert all(("B", one) in before for one in taken)
    # Each at most once, and the last ones never: nothing comes behind them.
    every = [one for taken in found.values() for one in taken]
    assert len(set(every)) == len(every) < 4
    assert taken_back("gpipe", place_actions("gpipe", 2, 1, 4), 1) == {0: (), 1: (), 2: (), 3: ()}
    # A schedule that waits has sent all.
    actions = place_actions("1f1b", 2, 1, 4)
    assert taken_back("1f1b", actions, 1) == {0: (), 1: (0,), 2: (1,), 3: (2,)}
    assert taken_back("1f1b", actions, 0) == {}


def test_a_stage_without_a_backward_learns_otherwise_that_what_it_sent_has_come():
    # It waits for a message before the next one, and before what would be its backward.
    places = place_actions("1f1b", 2, 1, 4)
    assert taken_on("1f1b", places, 0) == {
        ("F", 0): (), ("F", 1): (0,), ("B", 0): (1,), ("F", 2): (), ("B", 1): (2,), ("F", 3): (),
        ("B", 2): (3,), ("B", 3): (),
    }  # fmt: skip
    # For all of them when the forwards are over.
    found = taken_on("gpipe", place_actions("gpipe", 2, 1, 3), 0)
    assert {key: taken for key, taken in found.items() if taken} == {("B", 0): (0, 1, 2)}
    # By a later stage at the same place; the last one of a place has none.
    several = place_actions("interleaved_1f1b", 2, 2, 4)
    assert {key: taken for key, taken in taken_on("interleaved_1f1b", several, 1).items() if taken} == {
        ("B", n): (n,) for n in range(4)
    }
    assert not any(taken_on("interleaved_1f1b", several, 2).values())
    # The last stage sends nothing on.
    assert not any(taken_on("interleaved_1f1b", several, 3).values())
