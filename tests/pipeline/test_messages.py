"""What each rank of a pipeline sends, counted by hand."""

from __future__ import annotations

from collections import Counter

from tensoropt.pipeline.messages import (
    arriving_bytes,
    coordinate,
    crossing_bytes,
    departing_bytes,
    sent_by_rank,
    stored_bytes,
)
from tensoropt.pipeline.strategy import PipelinedStrategy, pipelined_from_dict, pipelined_to_dict
from tensoropt.simulate.collectives import Collective
from tests.costs.models import four, problem
from tests.pipeline.models import skip, split_along_the_batch, tables, tied

ROW, WEIGHT, LOSS = 24 * 4, 24 * 24 * 4, 4
"""Bytes of one row between layers, of a layer's weights, and of the loss."""
RESULT = Collective("broadcast", (0,), LOSS)


def sent(strategy: PipelinedStrategy, rank: int) -> Counter[Collective]:
    """With no collectives within stages."""
    return sent_by_rank(strategy, rank, [{}] * len(strategy.stages))


def test_every_micro_batch_goes_on_and_its_gradient_comes_back() -> None:
    # 16 rows in 4 micro-batches.
    strategy = split_along_the_batch(problem(four).graph, (1, 2), (4, 3))
    on, back = Collective("send", (0, 1), 4 * ROW), Collective("send", (1, 0), 4 * ROW)
    assert sent(strategy, 0) == {on: 4, RESULT: 1}
    assert sent(strategy, 1) == {back: 4, on._replace(axes=(1, 2)): 4, RESULT: 1}
    assert sent(strategy, 2) == {back._replace(axes=(2, 1)): 4, RESULT: 1}


def test_a_rank_sends_its_part_to_its_like() -> None:
    # Two micro-batches, places of 2 x 2: 16 rows in 8 parts.
    strategy = split_along_the_batch(problem(four).graph, (2,), (2, 2, 2, 2), "gpipe")
    for rank in range(4):
        on = Collective("send", (rank, rank + 4), 2 * ROW)
        assert sent(strategy, rank) == {on: 2, RESULT: 1}
        assert sent(strategy, rank + 4) == {on._replace(axes=(rank + 4, rank)): 2, RESULT: 1}


def test_uneven_parts_are_each_ranks_own() -> None:
    # 16 rows over three ranks: 6, 6 and 4.
    strategy = split_along_the_batch(problem(four).graph, (2,), (1, 2, 3), "gpipe")
    sizes = [next(c.bytes for c in sent(strategy, rank) if c.kind == "send") for rank in range(6)]
    assert sizes == [6 * ROW, 6 * ROW, 4 * ROW] * 2
    # Prices are those of the fullest.
    assert departing_bytes(strategy, 0) == arriving_bytes(strategy, 1) == 6 * ROW


def test_all_that_crosses_a_cut_is_sent() -> None:
    strategy = split_along_the_batch(problem(skip).graph, (1, 2), (1, 3), "gpipe")
    assert [departing_bytes(strategy, stage) for stage in range(3)] == [16 * ROW, 32 * ROW, 0]
    assert [arriving_bytes(strategy, stage) for stage in range(3)] == [0, 16 * ROW, 32 * ROW]
    assert sent(strategy, 1) == {
        Collective("send", (1, 2), 16 * ROW): 2,
        Collective("send", (1, 0), 16 * ROW): 1,
        RESULT: 1,
    }


def test_what_has_no_gradient_comes_back_from_nowhere() -> None:
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


def test_stages_of_one_place_send_one_another_nothing() -> None:
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


def test_inference_sends_nothing_back() -> None:
    strategy = split_along_the_batch(problem(four, "inference").graph, (2,), (4, 2))
    assert [c.kind for c in sent(strategy, 0)] == ["send", "broadcast"]
    assert sent(strategy, 1) == {RESULT: 1}


def test_copies_of_a_parameter_add_up_their_gradients_once() -> None:
    strategy = split_along_the_batch(problem(tied).graph, (1, 2), (4, 3))
    tie = Collective("all_reduce", (0,), WEIGHT)
    assert [sent(strategy, rank)[tie] for rank in range(3)] == [1, 0, 1]
    # Sharded, each rank adds up its shard.
    data = pipelined_to_dict(split_along_the_batch(problem(tied).graph, (1, 2), (4, 3, 2)))
    for stage in (0, 2):
        data["stages"][stage]["stored"]["p_model_first_weight"] = ["R/P", "S(0)"]
    sharded = pipelined_from_dict(data, problem(tied).graph)
    assert stored_bytes(sharded.stages[0], "p_model_first_weight") == WEIGHT // 2
    tie = tie._replace(bytes=WEIGHT // 2)
    assert [sent(sharded, rank)[tie] for rank in range(6)] == [1, 1, 0, 0, 1, 1]


def test_collectives_within_a_stage_lie_behind_the_pipelines_axis() -> None:
    strategy = split_along_the_batch(problem(four).graph, (2,), (2, 2, 2))
    within = [{Collective("all_reduce", (0,), 100): 3}, {Collective("all_gather", (0,), 50): 1}]
    first, last = (sent_by_rank(strategy, rank, within) for rank in (1, 3))
    assert first[Collective("all_reduce", (1,), 100)] == 3
    assert last[Collective("all_gather", (1,), 50)] == 1
    assert first[Collective("all_gather", (1,), 50)] == 0


def test_a_rank_stands_on_the_mesh_of_its_stage() -> None:
    (stage, _) = split_along_the_batch(problem(four).graph, (2,), (2, 2, 2, 4), "gpipe").stages
    assert [coordinate(stage, inner) for inner in (0, 1, 4, 7)] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 3),
    ]  # fmt: skip
    assert crossing_bytes(stage, "depart.relu_1", "relu_1", 7) == ROW
