"""Ranks that pass their own rows of the batch: as exact as ranks that all pass all of them."""

import pytest

from tests.execute import share_jobs as jobs

ROUNDING = 2e-4


def check(found: list[list[tuple[float, float, bool, int]]]) -> list[set[int]]:
    """Loss, gradients and rows; the numbers of shares at each rank."""
    for loss, gradient, covers, _ in (plan for of_rank in found for plan in of_rank):
        assert max(loss, gradient) < ROUNDING
        assert covers
    return [{world for *_, world in of_rank} for of_rank in found]


@pytest.mark.sweep(quick=3)
@pytest.mark.parametrize(("name", "mesh", "seeds", "worlds"), [
    ("mlp", (1, 2), range(8), {1, 2}),
    ("mlp", ("1f1b", 2, 2), [3], {1}),
    ("mlp", ("placed", 1), [3], {1}),
    ("gpt2_ignored", (2, 2), range(8), {1, 2}),
], ids=str)  # fmt: skip
def test_shares_of_random_plans(ranks, name, mesh, seeds, worlds):
    assert check(ranks.run(jobs.shares, name, mesh, list(seeds))) == [worlds] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [
    ("gpt2_ignored", (1, 2, 2)), ("gpt2_ignored", (2, 2, 2)), ("llama_small", (1, 4)),
    ("llama_small", (2, 2, 2)), ("mlp", (2, 4)), ("vgg_norm_plain", (1, 2, 2)),
], ids=str)  # fmt: skip
def test_shares_on_four_ranks(four_ranks, name, mesh):
    found = four_ranks.run(jobs.shares, name, mesh, list(range(12)), timeout_s=600.0)
    assert all(worlds > {1} for worlds in check(found))


@pytest.mark.parametrize(("micro", "stop"), [(1, None), (2, 1)])
def test_epochs_by_the_sampler(ranks, micro, stop):
    """Uneven targets, and an uneven last batch, weigh as in one process."""
    for found in ranks.run(jobs.epochs, micro, 29, stop):
        assert found["world"] == 2
        assert found["far"] < 1e-5
        assert found["steps"] == 8 - (stop or 0)
    assert sum(each["lengths"][1] for each in ranks.run(jobs.epochs, micro, 29, None)) == 29


def test_a_smaller_global_batch(ranks):
    for found in ranks.run(jobs.epochs, 1, 27, None, "global"):
        assert found["world"] == 1
        assert found["far"] < 1e-5


def test_rows_passed_in_the_other_way(ranks):
    says = {
        "global to share": "of shape (8, 6), of which each rank passes a share of shape (4, 6)",
        "unknown": "batch='local' is unknown",
        "share to global": "rank 1 passed another batch than rank 0 in args[0]",
    }
    for found in ranks.run(jobs.misfed):
        assert all(words in found[what] for what, words in says.items()), found
        assert "but this call has (8, 6)" in found["global to share"]
        assert "pass batch='global'" in found["global to share"]
        assert (found["well"], found["not ranks"]) == ("", "0 1")


@pytest.mark.slow
def test_ranks_that_pass_the_same_rows_are_warned_of(ranks):
    for rank, said in enumerate(ranks.run(jobs.alike)):
        for mode in (True, False):
            assert said[f"constant {mode}"] == said[f"own {mode}"] == []
            assert len(said[f"same {mode}"]) == (rank == 0)
        if rank == 0:
            assert "ranks 0 and 1 passed the same rows, but have data_rank 0 and 1" in said["same True"][0]
            assert "use tensoropt.sampler" in said["same False"][0]


def test_what_is_sent_of_a_batch(ranks):
    """Nothing under data parallelism; with micro-batches the targets, whose number is counted beforehand."""
    assert ranks.run(jobs.sent, 1) == [[], []]
    assert ranks.run(jobs.sent, 2) == [[24], [24]]


def test_accumulated_gradients(ranks):
    for micro in (1, 2):
        assert max(ranks.run(jobs.accumulated, micro)) < ROUNDING
