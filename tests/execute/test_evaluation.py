"""Evaluation by plans: all that the model returns, for any shape, as one process without a plan has it."""

from __future__ import annotations

from typing import Any

import pytest

from tensoropt.ranks.pool import RankPool
from tests.execute import evaluation_jobs as jobs

pytestmark = pytest.mark.distributed
NEAR = 1e-5


def check(found: list[list[tuple[float, int, int]]], tensors: int) -> None:
    for each in found:
        for far, count, _ in each:
            assert far < NEAR
            assert count == tensors


SHAPES = [(8, 6), (21, 6), (5, 9)]
"""The plan's; more rows; fewer and longer ones."""


@pytest.mark.parametrize(("batch", "seeds"), [("share", [None, 1]), ("global", [0])])
def test_all_results_of_any_shape(ranks: RankPool, batch: str, seeds: list[Any]) -> None:
    found = ranks.run(jobs.evaluated, "tagged", (1, 2), batch, seeds, SHAPES)
    check(found, 4)
    assert found[0][0][2] == (2 if batch == "share" else 1)


@pytest.mark.parametrize(
    ("name", "mesh", "tensors"),
    [
        ("tagged", (2, 2), 4),
        pytest.param("gpt2_ignored", (1, 2), 2, marks=pytest.mark.slow),
        pytest.param("bert", (2, 2), 2, marks=pytest.mark.slow),
        pytest.param("llama", (1, 2), 2, marks=pytest.mark.slow),
    ],
)
def test_random_plans(ranks: RankPool, name: str, mesh: Any, tensors: int) -> None:
    rows = 8 if name == "tagged" else 4
    shapes, seeds = [(rows + 2, 20), (rows, 7)], [None] if name == "tagged" else [None, 3, 4]
    check(ranks.run(jobs.evaluated, name, mesh, "share", seeds, shapes), tensors)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 4)], ids=str)
def test_on_four_ranks(four_ranks: RankPool, mesh: Any) -> None:
    check(four_ranks.run(jobs.evaluated, "tagged", mesh, "share", list(range(4)), SHAPES), 4)


def test_numbers_beside_the_loss(ranks: RankPool) -> None:
    """They have no rows, so that each number of rows is a form of its own."""
    check(ranks.run(jobs.evaluated, "scored", (1, 2), "share", [None], [(8, 6), (6, 9)]), 5)


@pytest.mark.parametrize("name", ["tagged", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_calls_without_targets(ranks: RankPool, name: str) -> None:
    for far, losses in ranks.run(jobs.without_labels, name, (1, 2)):
        assert far < NEAR
        assert losses == 0


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("tagged", (1, 2)), ("tagged", ("1f1b", 2, 2)), ("normed", ("gpipe", 1, 2)), ("normed", ("placed", 1))],
    ids=str,
)
def test_weights_are_those_of_the_moment(ranks: RankPool, name: str, mesh: Any) -> None:
    for far in ranks.run(jobs.trained_between, name, mesh):
        assert max(far) < NEAR


@pytest.mark.slow
def test_the_loss_alone(ranks: RankPool) -> None:
    """A larger batch and another length each need a capture."""
    for far, none, forms in ranks.run(jobs.loss_alone, (1, 2)):
        assert max(far) < NEAR
        assert none
        assert forms == 2


def test_what_ranks_pass_unlike_is_refused_on_all(ranks: RankPool) -> None:
    for said in ranks.run(jobs.refused):
        assert "rank 1 evaluates ids (4, 9), labels (4, 9), but rank 0 ids (4, 7)" in said["lengths"]
        assert "pad them to one length" in said["lengths"]
        assert "the plan is for a call with ids, labels" in said["called"]
        assert "ranks evaluate 3 and 4 rows" in said["rows"]
        assert said["well"] == ""
        assert "rank 1 passed another batch than rank 0" in said["values"]


OTHER_KINDS = [("1f1b", 2, 2), ("placed", 2)]


@pytest.mark.slow
@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize("mesh", [*OTHER_KINDS, ("placed", 1)], ids=str)
def test_pipelines_and_placed_plans(ranks: RankPool, mesh: Any) -> None:
    """All ranks get all rows."""
    found = ranks.run(jobs.evaluated, "tagged", mesh, "share", [0, 1, 2], SHAPES)
    check(found, 4)
    assert found[0][0][2] == 1
    check(ranks.run(jobs.evaluated, "scored", mesh, "share", [0], [(8, 6), (6, 9)]), 5)


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", [*OTHER_KINDS, ("placed", 1)], ids=str)
def test_results_go_where_parameters_are(ranks: RankPool, mesh: Any) -> None:
    """From the last stage back to the first, to a parameter that is not used there for the loss."""
    check(ranks.run(jobs.evaluated, "looking_back", mesh, "share", [0, 1], SHAPES), 4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [("gpipe", 2, 2), ("interleaved_1f1b", 2, 2), ("placed", 1)], ids=str)
@pytest.mark.parametrize("name", ["gpt2_ignored", "bert", "llama"])
def test_models_by_pipelines_and_placed_plans(ranks: RankPool, name: str, mesh: Any) -> None:
    check(ranks.run(jobs.evaluated, name, mesh, "share", [0, 1], [(4, 16), (6, 20), (3, 7)]), 2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [("1f1b", 2, 2, 2), ("gpipe", 2, 2, 2), ("placed", 1)], ids=str)
@pytest.mark.parametrize("name", ["tagged", "gpt2_ignored"])
def test_pipelines_and_placed_plans_on_four_ranks(four_ranks: RankPool, name: str, mesh: Any) -> None:
    shapes, tensors = (SHAPES, 4) if name == "tagged" else ([(4, 16), (6, 20), (3, 7)], 2)
    check(four_ranks.run(jobs.evaluated, name, mesh, "share", [0, 1, 2], shapes), tensors)


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", [(1, 2), *OTHER_KINDS], ids=str)
def test_results_that_nothing_makes(ranks: RankPool, mesh: Any) -> None:
    check(ranks.run(jobs.evaluated, "with_buffer", mesh, "share", [0], [(8, 6), (6, 9)]), 2)
    for said in ranks.run(jobs.returned_parameter, mesh):
        assert "returns its parameter embed.weight, of which ranks have parts; return what" in said


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", OTHER_KINDS, ids=str)
def test_calls_of_other_kinds_without_targets(ranks: RankPool, mesh: Any) -> None:
    for far, losses in ranks.run(jobs.without_labels, "tagged", mesh):
        assert far < NEAR
        assert losses == 0


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", OTHER_KINDS, ids=str)
def test_other_kinds_evaluate_their_own_graph(ranks: RankPool, mesh: Any) -> None:
    for far in ranks.run(jobs.without_what_is_not_read, mesh):
        assert far < NEAR
    for far in ranks.run(jobs.in_inference_mode, mesh):
        assert far < NEAR


@pytest.mark.sweep(quick=4)
@pytest.mark.parametrize("outputs", ["all", "loss"])
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2), *OTHER_KINDS], ids=str)
def test_ranks_without_rows(ranks: RankPool, mesh: Any, outputs: str) -> None:
    """A last batch has fewer rows than there are ranks; an empty one is a mean of nothing."""
    for found in ranks.run(jobs.few_rows, "tagged", mesh, outputs, [1, 0]):
        assert max(far for far, _ in found) < NEAR
        assert not any(differs for _, differs in found)


@pytest.mark.slow
@pytest.mark.parametrize("outputs", ["all", "loss"])
def test_ranks_without_rows_of_four(four_ranks: RankPool, outputs: str) -> None:
    for found in four_ranks.run(jobs.few_rows, "tagged", (1, 4), outputs, [1, 2, 3, 5]):
        assert max(far for far, _ in found) < NEAR


def test_ranks_without_rows_are_refused_where_rows_cannot_be_added(ranks: RankPool) -> None:
    for said in ranks.run(jobs.refused_rows):
        assert "ranks evaluate 0 and 1 rows, and a smaller batch cannot be filled up" in said["scored"]
        assert "has 1, which cannot be divided among 2 ranks; pass drop_last=True" in said["sampler"]
        assert said["left out"] == ""


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)], ids=str)
def test_training_of_ranks_without_rows(ranks: RankPool, mesh: Any) -> None:
    for far in ranks.run(jobs.trained_without_rows, mesh):
        assert max(far) < NEAR
