"""parallelize: the user's own training script keeps working, by every kind of plan."""

import inspect
import random
from typing import Any

import pytest
import torch

from tensoropt import PlanError, load_checkpoint, load_cluster, parallelize, save_checkpoint
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import load_model
from tensoropt.ops.layouts import GATHERED_ONCE, REDUCED_LAST
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.placement.execute.engine import PlacedEngine
from tensoropt.sharding.strategy import Strategy
from tensoropt.verify.fake_ranks import step_on
from tensoropt.verify.random_strategies import random_pipeline
from tests.execute import jobs
from tests.execute.test_train import write_plan
from tests.placement.execute.cases import record_moves
from tests.placement.execute.random_placed import random_placed

ROUNDING = 2e-4
SHARDED, PLACED, PIPELINE, GPIPE = (1, 2), ("placed", 1), ("1f1b", 2, 2), ("gpipe", 1, 2)
SPLIT = ("1f1b", 2, 2, 2)
"""A pipeline of two places of two ranks."""


def alike(found: list[dict[str, float]]) -> bool:
    """Whether all figures of all ranks are those of the plain model, as far as these are rounded."""
    return all(value < ROUNDING for of_rank in found for value in of_rank.values())


@pytest.mark.sweep(quick=8)
@pytest.mark.parametrize(("name", "mesh", "seed"), [
    ("gpt2_small", SHARDED, 3), ("odd", (2, 2), 3),
    ("transformer_frozen", SHARDED, 3), ("transformer_frozen", (2, 2), 5),
    ("transformer", PIPELINE, 3), ("transformer", GPIPE, 3), ("vgg_norm_plain", GPIPE, 3),
    ("transformer", PLACED, 3),
    ("transformer", (2, 2), 3), ("vgg_norm_plain", SHARDED, 3), ("vgg_norm_plain", PLACED, 3),
    ("transformer", ("placed", 4), 3), ("transformer", ("interleaved_1f1b", 2, 2), 3),
    ("transformer", ("zero_bubble", 4, 2), 3), ("transformer_frozen", ("zero_bubble", 4, 2), 3),
    ("transformer_frozen", PIPELINE, 3), ("transformer_frozen", PIPELINE, 4),
    ("transformer_frozen", PLACED, 3),
    ("quantised_base", SHARDED, 0), ("quantised_base", SHARDED, 1), ("quantised_base", (2, 2), 0),
    ("quantised_base", PIPELINE, 0), ("quantised_base", PLACED, 0),
], ids=str)  # fmt: skip
def test_usual_loop(ranks, name, mesh, seed):
    """Losses, gradients, their norm over all ranks, clipped steps, evaluation; of models with dropout, batch
    norms, tied weights, frozen, unused and shared modules, and weights of bytes."""
    found = ranks.run(jobs.train_alike, name, mesh, seed)
    assert alike(found), found


@pytest.mark.sweep(quick=4)
@pytest.mark.parametrize(("name", "mesh", "seed"), [
    ("mlp", SHARDED, 5), ("mlp", SHARDED, 14), ("transformer", PIPELINE, 5), ("mlp", PLACED, 5),
    ("mlp", (2, 2), 14), ("mlp", SHARDED, 122), ("mlp", (2, 2), 122),
], ids=str)  # fmt: skip
def test_accumulation(ranks, name, mesh, seed):
    if seed != 5:
        strategy = jobs.strategy_of(load_model(jobs.spec(name)), mesh, seed)
        assert isinstance(strategy, Strategy)
        if seed == 14:  # with gradients that leave at once, and such that wait beside a held copy
            assert {strategy.stored[n][0] for n in strategy.unsharded} == {GATHERED_ONCE, REDUCED_LAST}
        else:  # with parameters that are gathered ahead
            assert sum(edge.block is not None for edge in strategy.edges()) == 2
    found = ranks.run(jobs.accumulate, name, mesh, seed)
    assert alike(found), found


GATHERED = [("transformer_dropout", (1, 2), 4, 0.0), ("transformer_dropout", (2, 2), 1, 0.7),
            ("gpt2_small", (1, 2), 3, 0.5), ("transformer_dropout", (1, 2, 2), 3, 0.5)]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "mesh", "seed", "recompute"), GATHERED)
def test_copies_gathered_again_change_no_bit(pool, name, mesh, seed, recompute):
    for found in pool.run(jobs.gather_alike, name, mesh, seed, recompute):
        assert all(found.values()), found


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize(
    ("name", "mesh", "seed", "fused"),
    [("transformer", SHARDED, 7, True), ("transformer", PLACED, 7, False), ("bert_small", SHARDED, 3, False)],
)
def test_state_dict(ranks, name, mesh, seed, fused):
    for found in ranks.run(jobs.state_dicts, name, mesh, seed):
        assert found.pop("strided") == fused  # whether a projection is stored split on heads
        assert found.pop("loss") < ROUNDING
        assert all(found.values()), found


@pytest.mark.sweep(quick=3)
@pytest.mark.parametrize(("mesh", "other", "name"), [
    (SHARDED, (2, 2), "transformer"), (PIPELINE, SHARDED, "transformer"), (PLACED, SHARDED, "transformer"),
    ((2, 2), PIPELINE, "transformer"), (PIPELINE, PLACED, "transformer"), (PIPELINE, GPIPE, "transformer"),
    (("placed", 2), (2, 2), "transformer"), ((2, 2), PLACED, "transformer"),
    ((1, 4), (1, 2, 2), "mlp"), (SPLIT, (1, 4), "transformer"),
], ids=str)  # fmt: skip
def test_checkpoint_moves_between_plans(pool, tmp_path, mesh, other, name):
    """Also shards of a fused projection split on heads, and of a parameter that two stages share."""
    for found in pool.run(jobs.checkpoints, name, mesh, other, str(tmp_path)):
        assert all(found["same"])
        assert max(found["value"], found["continued"]) < ROUNDING
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b"}


@pytest.mark.slow
def test_norm_of_stages_that_are_split(four_ranks):
    """Replicas, shards and tied copies count once."""
    norms = four_ranks.run(jobs.norms, "transformer", SPLIT, 3)
    for ours, plain in norms:
        assert ours == pytest.approx(plain, rel=ROUNDING)
    assert len({tuple(ours) for ours, _ in norms}) == 1


def test_a_rank_asks_for_its_own_parameters_only(ranks):
    asked = ranks.run(jobs.asked_for, "transformer", PIPELINE, 3)
    (first, last), everything = (set(names) for names, _ in asked), set(asked[0][1])
    assert first | last == everything
    assert first != everything != last


def test_ranks_of_all_stages_meet_for_a_state_dict_that_one_stage_gathers():
    """A fused projection whose heads three ranks share unevenly has no DTensor of its own shape."""
    loaded = load_model(jobs.spec("transformer"))
    data = random_pipeline(loaded.graph, (2, 2, 3), "1f1b", random.Random(3)).to_data()
    for stage in data["stages"]:
        stage["stored"] = {name: ["R/P", "R/P"] for name in stage["stored"]}
    name = "p_model_blocks_0_qkv_weight"
    for layout, gathers in (("R/P", False), ("S(1)", True)):
        data["stages"][0]["stored"][name] = ["R/P", layout]
        strategy = PipelinedStrategy.from_data(data, loaded.graph)
        assert strategy.holders(name) == (0,)
        for rank, copies in ((0, 1 if gathers else 3), (5, 1)):
            with step_on(rank, loaded, strategy, "sgd") as step:
                shards = step.engine.shards
                assert shards.gathers_state == gathers
                assert (shards.in_state(name), shards.copies(name)) == (rank == 0, copies)


def test_a_save_that_died_leaves_a_checkpoint(tmp_path):
    """Killed while writing, and killed between taking the old one away and putting the new one there."""
    model = unsplit_mlp()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    target = tmp_path / "state"
    save_checkpoint(target, model)
    (tmp_path / "state.partial").mkdir()
    target.rename(tmp_path / "state.old")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_checkpoint(target, model)
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    save_checkpoint(target, model)
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    with pytest.raises(PlanError, match="no checkpoint at"):
        load_checkpoint(tmp_path / "other", model)


def unsplit_mlp() -> torch.nn.Module:
    model, args, _ = jobs.spec("mlp").build()
    return parallelize(model, unsplit_strategy(load_model(jobs.spec("mlp")).graph), args)


@pytest.mark.sweep(quick=4)
@pytest.mark.parametrize(("name", "mesh"), [
    ("vgg_norm", SHARDED), ("vgg_norm", GPIPE), ("vgg_norm", PLACED),
    ("vgg_dropout", ("zbv", 4, 2)),  # stages that follow one another share a place
    ("vgg_dropout", (2, 2)),
], ids=str)  # fmt: skip
def test_evaluation(ranks, name, mesh):
    for found in ranks.run(jobs.evaluated, name, mesh):
        assert max(found) < 1e-5


@pytest.mark.parametrize(
    ("cluster", "told"), [("dgx-h100[1]", True), ("local:1", False), (None, False)], ids=str
)
def test_a_plan_for_another_kind_of_device_is_said_once(tmp_path, monkeypatch, cluster, told):
    data = {} if cluster is None else load_cluster(cluster).to_dict()
    plan = write_plan(tmp_path / "plan.json", (1,), cluster=data)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        model, args, _ = jobs.spec("mlp").build()
        with jobs.heard("the plan was made for") as texts:
            parallelize(model, plan, args, as_measured=False)
        assert len(texts) == (told and rank == "0")
        if texts:
            assert "made for 1 x H100-80GB (cuda) of cluster dgx-h100[1], but here it runs on cpu" in texts[0]


def test_from_a_plan_file(ranks, tmp_path):
    for found in ranks.run(jobs.from_file, str(write_plan(tmp_path / "plan.json"))):
        assert found["difference"] < 1e-4
        assert found["calls"]
        batch, missing, again = found["refusals"]
        assert "(16, 24) torch.float32, but this call has (3, 24)" in batch
        assert "missing a required argument: 'y'" in missing
        assert "already parallelized" in again


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize(("name", "mesh"), [("mlp", SHARDED), ("odd", PLACED), ("odd", SHARDED)], ids=str)
def test_any_optimizer(ranks, name, mesh):
    found = ranks.run(jobs.optimizers, name, mesh, 5)
    assert alike(found), found


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "mesh"), [("aot_eager", (1, 2)), ("inductor", (1,))])
def test_compiled(ranks, backend, mesh):
    """What the model does in front of and behind the lowered graph stays Python; the result is the same."""
    for found in ranks.run(jobs.compiled, "mlp", mesh, backend, timeout_s=600.0):
        assert found < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("batch", ["global", "share"])
def test_every_kind_of_plan_compiled(ranks, micro, batch):
    """Or left as it is, which is said: parameters that stay gathered, recomputation in micro-batches."""
    for found in ranks.run(
        jobs.compiled_or_not, "mlp", (micro, 2), [1, 3, 5, 14, 122], batch, timeout_s=600.0
    ):
        assert all(compiles != warned for compiles, warned, _ in found)
        assert {compiles for compiles, _, _ in found} == {True, False}
        assert all(far < ROUNDING for *_, far in found)


def test_dropout_is_compiled_once_for_all_steps():
    """A mask changes with the step, which the second compilation leaves open: there is no third."""
    (model, args, _), (plain, _, _) = jobs.spec("vgg_dropout").build(), jobs.spec("vgg_dropout").build()
    strategy = unsplit_strategy(load_model(jobs.spec("vgg_dropout")).graph)
    for each in (model, plain):
        parallelize(each.train(), strategy, args)
    compiled = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(module)
        return module.forward

    torch._dynamo.reset()
    fast = torch.compile(model, backend=backend)
    losses = [(float(fast(*args).detach()), float(plain(*args).detach())) for _ in range(4)]
    assert len(compiled) <= 2
    assert all(ours == alone for ours, alone in losses)
    assert len(set(losses)) == 4


def test_forward_keeps_its_signature():
    model, args, _ = jobs.spec("mlp").build()
    before = inspect.signature(model.forward)
    parallelize(model, unsplit_strategy(load_model(jobs.spec("mlp")).graph), args)
    assert inspect.signature(model.forward) == before
    assert model.forward.__name__ == "forward"


def test_one_process_runs_all_devices_of_a_placed_plan(monkeypatch):
    """Of a job of one rank; a compiler is told why it changes nothing."""
    moved = record_moves(monkeypatch)
    (model, args, _), (plain, _, _) = jobs.spec("mlp").build(), jobs.spec("mlp").build()
    parallelize(model, random_placed(load_model(jobs.spec("mlp")).graph, 3, random.Random(1)), args)
    assert isinstance(model._tensoropt.engine, PlacedEngine)
    for each in (model, plain):
        each(*args).backward()
        torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    for name, value in plain.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, atol=1e-6)
    assert moved
    loss = float(model(*args).detach())
    with pytest.warns(UserWarning, match="torch.compile changes nothing here: a placed plan"):
        assert float(torch.compile(model, backend="eager")(*args).detach()) == loss
