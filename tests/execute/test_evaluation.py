"""Evaluation by plans: all that the model returns, for any shape, as one process without a plan has it."""

import pytest

from tests.execute import evaluation_jobs as jobs

NEAR = 1e-5


OTHER_KINDS = [("1f1b", 2, 2), ("placed", 2)]
SHAPES = [(8, 6), (21, 6), (5, 9)]
"""The plan's; more rows; fewer and longer ones."""
TEXTS = [(4, 16), (6, 20), (3, 7)]
"""The same of language models."""
TENSORS = {"tagged": 4, "looking_back": 4, "scored": 5, "with_buffer": 2}
"""How many tensors these return; language models return 2."""


@pytest.mark.sweep(quick=7)
@pytest.mark.parametrize(("name", "mesh", "batch", "seeds", "shapes"), [
    ("tagged", (1, 2), "share", [None, 1], SHAPES),
    ("tagged", (1, 2), "global", [0], SHAPES),
    ("tagged", (2, 2), "share", [None], [(10, 20), (8, 7)]),
    # Numbers beside the loss have no rows, so that each number of rows is a form of its own.
    ("scored", (1, 2), "share", [None], [(8, 6), (6, 9)]),
    # Buffers are results that nothing makes.
    ("with_buffer", (1, 2), "share", [0], [(8, 6), (6, 9)]),
    # From the last stage back to the first, to a parameter that is not used there for the loss.
    *(("looking_back", mesh, "share", [0, 1], SHAPES) for mesh in OTHER_KINDS),
    ("looking_back", ("placed", 1), "share", [0, 1], SHAPES),
    *(("with_buffer", mesh, "share", [0], [(8, 6), (6, 9)]) for mesh in OTHER_KINDS),
    ("gpt2_ignored", (1, 2), "share", [None, 3, 4], [(6, 20), (4, 7)]),
    ("bert", (2, 2), "share", [None, 3, 4], [(6, 20), (4, 7)]),
    ("llama", (1, 2), "share", [None, 3, 4], [(6, 20), (4, 7)]),
    *(("tagged", mesh, "share", [0, 1, 2], SHAPES) for mesh in (*OTHER_KINDS, ("placed", 1))),
    *(("scored", mesh, "share", [0], [(8, 6), (6, 9)]) for mesh in (*OTHER_KINDS, ("placed", 1))),
    *((name, mesh, "share", [0, 1], TEXTS) for name in ("gpt2_ignored", "bert", "llama")
      for mesh in (("gpipe", 2, 2), ("interleaved_1f1b", 2, 2), ("placed", 1))),
    # On four ranks.
    ("tagged", (1, 2, 2), "share", [0, 1, 2, 3], SHAPES), ("tagged", (2, 4), "share", [0, 1, 2, 3], SHAPES),
    *((name, mesh, "share", [0, 1, 2, 3], shapes)
      for name, shapes in (("tagged", SHAPES), ("gpt2_ignored", TEXTS))
      for mesh in (("1f1b", 2, 2, 2), ("gpipe", 2, 2, 2))),
], ids=str)  # fmt: skip
def test_all_results_of_any_shape(pool, name, mesh, batch, seeds, shapes):
    """All that a model returns is what the plain one returns, and as many ranks pass rows of their own as the
    kind of plan lets."""
    shares = mesh[0] in (1, 2) and batch == "share" and seeds[0] is None
    for found in pool.run(jobs.evaluated, name, mesh, batch, seeds, shapes):
        assert max(far for far, *_ in found) < NEAR
        assert {count for _, count, _ in found} == {TENSORS.get(name, 2)}
        assert found[0][2] == mesh[1] if shares else isinstance(mesh[0], int) or found[0][2] == 1


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize(
    ("name", "mesh"), [*(("tagged", mesh) for mesh in [(1, 2), *OTHER_KINDS]), ("gpt2", (1, 2))], ids=str
)
def test_calls_without_targets(ranks, name, mesh):
    for far, losses in ranks.run(jobs.without_labels, name, mesh):
        assert far < NEAR
        assert losses == 0


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize(
    ("name", "mesh", "rows"),
    [
        *[("tagged", (1, 2), 8), ("tagged", (1, 2), 1), ("tagged", (2, 2), 1), ("tagged", ("1f1b", 2, 2), 8)],
        *[("normed", ("gpipe", 1, 2), 8), ("normed", ("placed", 1), 8)],
    ],
    ids=str,
)
def test_weights_are_those_of_the_moment(ranks, name, mesh, rows):
    """Also of training in which a rank has no rows."""
    for far in ranks.run(jobs.trained, name, mesh, rows):
        assert max(far) < NEAR


@pytest.mark.slow
def test_the_loss_alone(ranks):
    """A larger batch and another length each need a capture."""
    for far, none, forms in ranks.run(jobs.loss_alone, (1, 2)):
        assert max(far) < NEAR
        assert none
        assert forms == 2


def test_what_ranks_pass_unlike_is_refused_on_all(ranks):
    for said in ranks.run(jobs.refused):
        assert "rank 1 evaluates ids (4, 9), labels (4, 9), but rank 0 ids (4, 7)" in said["lengths"]
        assert "pad them to one length" in said["lengths"]
        assert "the plan is for a call with ids, labels" in said["called"]
        assert "ranks evaluate 3 and 4 rows" in said["rows"]
        assert said["well"] == ""
        assert "rank 1 passed another batch than rank 0" in said["values"]
        assert "ranks evaluate 0 and 1 rows, and a smaller batch cannot be filled up" in said["no rows"]
        assert "has 1, which cannot be divided among 2 ranks; pass drop_last=True" in said["sampler"]
        assert said["left out"] == ""


@pytest.mark.parametrize("mesh", [(1, 2), *OTHER_KINDS], ids=str)
@pytest.mark.sweep
def test_a_returned_parameter_is_refused(ranks, mesh):
    for said in ranks.run(jobs.returned_parameter, mesh):
        assert "returns its parameter embed.weight, of which ranks have parts; return what" in said


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", OTHER_KINDS, ids=str)
def test_other_kinds_evaluate_their_own_graph(ranks, mesh):
    for far in ranks.run(jobs.without_what_is_not_read, mesh):
        assert far < NEAR
    for far in ranks.run(jobs.in_inference_mode, mesh):
        assert far < NEAR


@pytest.mark.sweep(quick=4)
@pytest.mark.parametrize("outputs", ["all", "loss"])
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2), *OTHER_KINDS, (1, 4)], ids=str)
def test_ranks_without_rows(pool, mesh, outputs):
    """A last batch has fewer rows than there are ranks; an empty one is a mean of nothing."""
    for found in pool.run(jobs.few_rows, "tagged", mesh, outputs, [1, 2, 3, 5, 0]):
        assert max(far for far, _ in found) < NEAR
        assert not any(differs for _, differs in found)
