"""Habits of training scripts: each of them works under a plan, or is refused by name on the first step."""

import pytest

from tensoropt.engine import runtime
from tests.execute import habit_jobs as jobs

KINDS = [(1, 2), (2, 2), ("1f1b", 2, 2), ("placed", 1)]
"""Sharded plans, with micro-batches too, pipelines and placed plans."""
MOSTLY_SLOW = [
    pytest.param(mesh, marks=[] if mesh == (2, 2) else [pytest.mark.slow], id=str(mesh)) for mesh in KINDS
]
"""The same, of which the fast tests take one."""


@pytest.mark.parametrize("mesh", MOSTLY_SLOW)
@pytest.mark.parametrize("what", ["batch", "shape", "arguments", "mode"])
def test_ranks_that_are_fed_unlike(ranks, mesh, what):
    """All ranks are told, and none waits for another."""
    found = ranks.run(jobs.unlike, mesh, what)
    for *said, alike in found:
        assert alike == ""
        assert all(said) or what == "batch"
    first = [said[0] for said in found]
    if what == "batch":
        joined = " ".join(line for said in found for line in said)
        assert "rank 1 passed another batch than rank 0 in" in joined
        assert all(any(said) for said in found)
    elif what == "shape":
        assert "rank 1 refused this call" in first[0]
        assert "has (15, 24) torch.float32 in x" in first[1]
        assert "float64 in y; convert it" in found[1][1]
    elif what == "arguments":
        assert "rank 1 refused this call" in first[0]
        assert "too many positional arguments; the plan is for a call with x, y" in first[1]
    else:
        assert all("rank 1 calls the model in evaluation, but rank 0 in training" in said for said in first)


def test_inputs_are_compared_every_so_often(ranks):
    assert runtime._EVERY == 1000  # as documented
    for found in ranks.run(jobs.unlike_later, (1, 2), 22):
        assert found == [9, 19]


def test_a_job_that_is_left_keeps_no_group(ranks):
    """Two threads of each look for work a hundred times a second."""
    for before, after in ranks.run(jobs.threads_left, (1, 2)):
        assert after <= before - 6
    ranks.reset()


def test_ranks_need_not_be_compared(ranks):
    assert ranks.run(jobs.not_compared, (1, 2)) == ["", ""]


@pytest.mark.parametrize("mesh", [("1f1b", 2, 2), ("placed", 1)], ids=str)
def test_a_rank_may_pass_zeros_for_what_it_does_not_read(ranks, mesh):
    found = ranks.run(jobs.unread_inputs, mesh)
    assert any(not all(reads) for reads in found)
    assert all(any(reads[i] for reads in found) for i in range(2))


@pytest.mark.parametrize("mesh", MOSTLY_SLOW)
def test_weights_that_differ_are_refused_or_sent(ranks, mesh):
    for said, _ in ranks.run(jobs.unlike_weights, mesh, "seed", False):
        assert "rank 1 has other weights than rank 0, first in the parameter first.weight" in said
        assert "sync_weights=True" in said
    for said, far in ranks.run(jobs.unlike_weights, mesh, "seed", True):
        assert said == ""
        assert far < 1e-5


@pytest.mark.sweep
@pytest.mark.parametrize(("what", "says"), [
    ("one element", "first in the parameter second.weight"),
    ("buffer", "first in the buffer average"),
    ("dtype", "rank 1 has another model than rank 0"),
])  # fmt: skip
def test_any_weight_is_compared(ranks, what, says):
    for said, _ in ranks.run(jobs.unlike_weights, (1, 2), what, False):
        assert says in said
    if what == "buffer":
        for said, far in ranks.run(jobs.unlike_weights, (1, 2), what, True):
            assert said == ""
            assert far < 1e-5


def test_a_model_that_one_rank_refuses(ranks):
    """The others are told, and do not wait for it."""
    first, second = ranks.run(jobs.refused_on_one, (1, 2), timeout_s=120.0)
    assert first == "rank 1 refused its model, plan or weights; see its own error"
    assert "checkpoint" in second
    for said in ranks.run(jobs.refused_on_one, (1, 2), True, timeout_s=120.0):
        assert "checkpoint" in said


SAYS = {
    "assign": "first.weight is another tensor than when the model was parallelized",
    "data": "first.weight was given other data after parallelize",
    "head": "third is another Linear than when the model was parallelized",
    "layers": "second has more modules than when the model was parallelized (extra)",
    "away": "third is not set now, but was Linear",
    "parameter": "first.bias is another tensor",
    "hook": "second has more forward hooks than when",
    "checkpointing": "second has more forward hooks than when the model was parallelized (make_inputs",
    "gradient hook": "a hook on the gradient of second.weight was added",
    "step hook": "a hook on the gradient of second.weight was added",
    "parametrised": "second has more modules than when the model was parallelized (parametrizations)",
    "forward": "second.forward is <lambda> now, but was not set",
    "lora": "second is Call now, but was Linear",
}
AT_ONCE = {
    "half": "first.weight is torch.float32 in the plan, and would become torch.float16",
    "bfloat16": "would become torch.bfloat16; convert the model before it is explored",
    "double": "second.weight is torch.float32 in the plan, and would become torch.float64",
    "meta": "first.weight is on cpu, where the plan runs, and would go to meta",
    "share": "would move, or change its layout in memory",
    "copy": "cannot be copied or pickled",
    "pickle": "cannot be copied or pickled",
    "average": "cannot be copied or pickled",
}


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", KINDS, ids=str)
def test_a_change_that_the_plan_would_not_follow(ranks, mesh):
    """Refused on the first step, or at once and then nothing has changed."""
    assert set(jobs.CHANGES) == {*SAYS, *AT_ONCE}
    for found in ranks.run(jobs.changed, mesh, list(jobs.CHANGES)):
        for change, (said, step) in found.items():
            assert SAYS.get(change, "") in step
            assert AT_ONCE.get(change, "") in said
            if mesh == (1, 2):
                assert (bool(said), bool(step)) == (change in AT_ONCE, change in SAYS), change


@pytest.mark.parametrize("mesh", MOSTLY_SLOW)
def test_what_is_followed(ranks, mesh):
    for found in ranks.run(jobs.harmless, mesh):
        assert all(far < 1e-5 for far in found.values()), found


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize(("name", "mesh", "seed"), [
    ("mlp", (1, 2), 3), ("transformer", (2, 2), 7), ("odd", (1, 2), 5), ("mlp", ("1f1b", 2, 2), 3),
    ("mlp", ("placed", 1), 3),
])  # fmt: skip
def test_an_optimizer_that_was_made_before(ranks, name, mesh, seed):
    """It goes on, with its groups, its schedule and the state that it has; a kept list is warned of."""
    for far, said in ranks.run(jobs.optimizer_before, name, mesh, seed):
        assert far < 1e-4
        assert len(said) == 1
        assert "still refers to the parameters that the model had before parallelize" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "seed"), [
    ((2, 2), 14), ((1, 2), 5), ((1, 2), 14), ((2, 2), 122), (("1f1b", 2, 2), 3), (("placed", 1), 3),
], ids=str)  # fmt: skip
def test_a_penalty_beside_the_loss(ranks, mesh, seed):
    """Its gradient is added to the plan's, in whatever order the two come."""
    for found in ranks.run(jobs.penalised, mesh, seed):
        assert all(far < 1e-5 for far in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "seed"),
    [((1, 2), 5), (("1f1b", 2, 2), 3), ((2, 2), 14), ((1, 2), 14), (("placed", 1), 5)],
    ids=str,
)
def test_what_is_read_with_a_penalty_is_what_one_process_reads(ranks, mesh, seed):
    """On every rank: losses, the penalty itself, formatted ones, clipped norms, norms of parameters."""
    for found in ranks.run(jobs.read_penalties, mesh, seed):
        assert all(far < 1e-4 for far in found.values()), found


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", [("placed", 1), ("1f1b", 2, 2)], ids=str)
def test_a_penalty_that_parts_of_parameters_cannot_give(ranks, mesh):
    for said in ranks.run(jobs.refused_penalties, mesh):
        assert all("first.weight" in line for line in said)
        assert "the script computes T of first.weight, of which ranks have parts" in said[0]
        assert "is combined with a tensor of shape" in said[5]


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize(("mesh", "what", "says"), [
    (("placed", 1), "state", "in model.state_dict(), which under this plan sends parts"),
    (("gpipe", 1, 2), "buffers", "in model.state_dict(), which under this plan sends parts"),
    (("placed", 1), "norm", "in a sum or norm of parameters"),
    ((1, 2), "norm", "in a sum or norm of parameters"),
    ((1, 2), "sum", "in reading a sum or norm of parameters"),
], ids=str)  # fmt: skip
def test_one_rank_alone_is_told_what_takes_all(ranks, mesh, what, says):
    """It would wait for good."""
    first, *_ = ranks.run(jobs.alone, mesh, what, timeout_s=60.0)
    assert "rank 1 has gone on to the next call of the model while rank 0 waits for it" in first
    assert says in first


FUSED = ("transformer", (1, 2), 7)
"""A plan that stores a fused projection split on heads."""


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize(
    ("name", "mesh", "seed"),
    [FUSED, ("transformer", (2, 2), 2), ("odd", ("1f1b", 2, 2), 3), ("odd", ("placed", 1), 3)],
)
def test_groups_by_shape_are_those_of_the_model(ranks, name, mesh, seed):
    for found in ranks.run(jobs.groups_by_shape, name, mesh, seed):
        assert all(found)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("meshes", "by_pytorch"),
    [(((1, 2), (2, 2)), False), (((2, 2), ("1f1b", 2, 2)), False), (((1, 2), (1, 2)), True)],
    ids=str,
)
def test_resuming_under_another_plan(ranks, tmp_path, meshes, by_pytorch):
    """Rates, decay and their schedule go on: the losses are those of one run without a break."""
    for before, after, extra in ranks.run(
        jobs.resumed, "transformer", meshes, str(tmp_path / "state"), by_pytorch
    ):
        assert before < 1e-5
        assert after < 1e-5
        assert extra == (None if by_pytorch else 3)


def test_whole_state_dicts_by_pytorch(ranks):
    for found in ranks.run(jobs.whole_state, *FUSED):
        assert all(found)


def test_one_rank_may_ask_for_its_state_dict(ranks):
    sizes = ranks.run(jobs.state_of_one_rank, *FUSED, timeout_s=60.0)
    assert sizes[0] > 0


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "mesh", "seed", "lacks"), [
    ("mlp", ("1f1b", 2, 2), 3, "parameters, which are on other ranks"),
    (*FUSED, "lacks parts of"),
    ("mlp", ("placed", 1), 3, ""),
])  # fmt: skip
def test_a_state_dict_that_lacks_parts_says_so_when_it_is_written(ranks, name, mesh, seed, lacks):
    for said, alike in ranks.run(jobs.written, name, mesh, seed):
        assert alike
        assert len(said) == bool(lacks)
        assert all(lacks in line for line in said)


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize("mesh", KINDS, ids=str)
def test_gradients_requested_of_autograd(ranks, mesh):
    for said in ranks.run(jobs.requested, mesh):
        for how in ("grad", "unused", "inputs"):
            assert "gives no gradients by request" in said[how], how
            assert "read param.grad" in said[how]
        assert "gives no gradients of gradients" in said["twice"]
        assert said["well"] == ""
        assert said["own"] == "6.0"


# -- as a plain module -----------------------------------------------------------------------------


ROUNDING = 2e-4


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize(("name", "mesh", "seed"), [
    ("gpt2_ignored", (2, 2), 3),  # tied, with a fused projection
    ("moving_average", (1, 2), 3),  # with buffers that steps change
    ("mlp", ("1f1b", 2, 2), 3),
    ("mlp", ("placed", 1), 3),
    *(("gpt2_ignored", mesh, seed) for mesh in [(1, 2, 2), (2, 4), ("1f1b", 2, 2, 2)] for seed in range(3)),
], ids=str)  # fmt: skip
def test_a_plain_module(pool, name, mesh, seed):
    for found in pool.run(jobs.whole_model, name, mesh, seed):
        assert found["keys"]
        assert found["plain"]
        assert found["apart"]
        assert all(found.get(far, 0.0) < ROUNDING for far in ("first", "values", "called", "second")), found


def test_generated_and_saved(ranks, tmp_path):
    for found in ranks.run(jobs.generated, (1, 2), str(tmp_path)):
        assert found["same"]
        assert found["read"] < ROUNDING
        assert "Perceptron has no save_pretrained" in found["other"]
