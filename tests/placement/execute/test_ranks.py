"""Placed plans on processes of their own: numbers, messages, memory.

Placed plan files: trained by a job, verified, and run in a user's process.
"""

import json
import random
from typing import Any

import pytest

import tensoropt
from tensoropt import load_plan, verify_plan
from tensoropt.costs.source import CostSource
from tensoropt.engine.models import CapturedModel, ModelSpec, load_model
from tensoropt.placement import Placement
from tensoropt.placement.graph import Splits
from tensoropt.placement.prices import PlacedPrices
from tensoropt.placement.strategy import PlacedStrategy
from tensoropt.ranks.pool import RankPool
from tensoropt.verify.fake_ranks import check_on_fake_ranks
from tensoropt.verify.predict import Prediction, predict_placed
from tensoropt.verify.random_strategies import random_placement, random_splits
from tensoropt.verify.rank_checks import CheckOptions
from tensoropt.verify.real_ranks import verify_strategies
from tensoropt.verify.recorder import compare_collectives, shown_axes
from tests.docs.programs import run_job
from tests.execute import jobs
from tests.execute.test_train import SOURCE
from tests.placement.execute.cases import costs_on, opened, plan_of


@pytest.fixture(scope="module")
def costs():
    """Bytes are the same everywhere, seconds do not matter here."""
    return costs_on("netsplit-paper")


def drawn(
    loaded: CapturedModel, costs: CostSource, seed: int, devices: int, count: int | None = None,
    *, parallel: bool = False,
) -> tuple[PlacedStrategy, Prediction]:  # fmt: skip
    """A placement at random, of operators in pieces, which may all be ``parallel``: pieces of the batch; in
    micro-batches of whole ones, with seed 0 in the model's order."""
    rng = random.Random(seed)
    prices = PlacedPrices(loaded.graph, costs.cluster, costs)
    splits: Splits | None = random_splits(loaded.graph, devices, rng, 0.3) if count is None else None
    graph = prices.price(prices.price().data_parallel() if parallel else splits, micro_batches=count or 1)
    size = graph.problem.size
    placement = random_placement(graph.graph, devices, rng)
    if count is not None and not seed:
        placement = Placement.in_order([devices * i // size for i in range(size)], devices)
    more = tuple(() for _ in range(costs.cluster.device_count - devices))
    wide = Placement(placement.device, placement.forward + more, placement.backward + more)
    strategy, prediction = predict_placed(graph, wide)
    return PlacedStrategy(strategy.placed_graph, placement, strategy.transfers), prediction


def unlike(prediction: Prediction, issued: list[dict[str, Any]]) -> list[str]:
    return compare_collectives(prediction.collectives, [row | {"axes": shown_axes(row)} for row in issued])


def check_on(pool: RankPool, spec: ModelSpec, pairs: list[tuple[PlacedStrategy, Prediction]]) -> None:
    """Numerics against the unsplit model, messages and memory."""
    data, options = [strategy.to_data() for strategy, _ in pairs], CheckOptions(timed_steps=1)
    found = verify_strategies(spec, data, pool=pool, options=options)
    for (_, prediction), result in zip(pairs, found, strict=True):
        assert result.numerics_ok, result
        assert unlike(prediction, result.collectives_issued) == []
        assert result.time_measured_s > 0
        # A message may be under way for longer or shorter than predicted, and these models are all messages.
        assert result.memory_tracked_bytes == pytest.approx(prediction.memory_bytes, rel=0.12)


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize(("source", "counts"), [
    ("tests.execute.models:mlp", (None, None, None, 2, 4)),
    ("tests.execute.models:vgg_norm", (None,) * 3),
    ("tests.execute.models:transformer_dropout", (None,) * 3),
    ("zoo:gpt2-tiny", (2, 4)),
    ("zoo:transformer-tiny", (2, 4)),
])  # fmt: skip
def test_on_two_ranks(ranks, costs, source, counts):
    """The last is an encoder and a decoder."""
    spec = ModelSpec(source)
    # The first in micro-batches has seed 0, which is the model's order.
    drawn_in = [drawn(load_model(spec), costs, i % 3, 2, count) for i, count in enumerate(counts)]
    check_on(ranks, spec, drawn_in)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [
    *((name, None) for name in ("mlp", "vgg_norm", "transformer_dropout")),
    *((name, count) for name in ("mlp", "transformer_dropout", "vgg_dropout") for count in (2, 4)),
])  # fmt: skip
def test_messages_and_memory_on_fake_ranks(costs, name, count):
    loaded = opened(name)
    for seed in range(3):
        # A message is there for more or fewer operators than simulated, and one is 7 % of the perceptron's
        # device: two were, on a busy machine. In micro-batches measured 0.971 to 1.002.
        check_fake(loaded, *drawn(loaded, costs, seed, 3, count), near=0.12 if count is None else 0.04)


def check_fake(loaded: CapturedModel, strategy: PlacedStrategy, prediction: Prediction, near: float) -> None:
    found = check_on_fake_ranks(loaded, strategy, "adam")
    assert unlike(prediction, found.collectives_issued) == []
    assert found.memory_tracked_bytes == pytest.approx(prediction.memory_bytes, rel=near)
    assert len(found.memory_tracked_of_ranks) == strategy.devices


@pytest.mark.slow
def test_batch_norms_in_pieces_on_two_ranks(ranks, costs):
    """Four pieces of each on two ranks: running statistics, too."""
    spec = ModelSpec("tests.execute.models:vgg_norm_plain")
    pairs = [drawn(load_model(spec), costs, seed, 2, parallel=True) for seed in range(2)]
    assert all(len(strategy.placed_graph.steps) == 4 for strategy, _ in pairs)
    check_on(ranks, spec, pairs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_batch_norms_in_pieces_on_fake_ranks(costs, dtype):
    loaded = load_model(ModelSpec("zoo:unet-tiny", compute_dtype=dtype, device="meta"))
    strategy, prediction = drawn(loaded, costs, 0, 3, parallel=True)
    assert len(strategy.placed_graph.steps) == 2 * 10
    check_fake(loaded, strategy, prediction, near=0.02)


def test_what_micro_batches_keep_is_all_there_when_forward_ends(costs):
    """Nothing is gained where all forwards run first: eight micro-batches keep what one batch keeps."""
    loaded = opened("transformer")
    kept = [drawn(loaded, costs, 0, 1, count)[1].memory_bytes for count in (1, 8)]
    graph = PlacedPrices(loaded.graph, costs.cluster, costs).price().problem
    stored = float(graph.stored_bytes.sum())
    assert kept[1] > stored + 0.5 * (kept[0] - stored)


def test_what_is_wrong_is_noticed(costs):
    strategy, prediction = drawn(opened("mlp"), costs, 1, 3)
    found = check_on_fake_ranks(opened("mlp"), strategy, "adam").collectives_issued
    message = next(row for row in found if row["kind"] == "send")
    message["count"] += 1
    (line,) = unlike(prediction, found)
    assert f"from device {message['axes'][0]} to {message['axes'][1]}" in line


def test_one_device_alone_is_predicted_closely(costs):
    strategy, prediction = drawn(opened("mlp"), costs, 0, 1, 1)
    found = check_on_fake_ranks(opened("mlp"), strategy, "adam")
    assert found.memory_tracked_bytes == pytest.approx(prediction.memory_bytes, rel=5e-3)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    """A random placement of the perceptron on two ranks of this machine."""
    groups, costs, rng = opened("mlp").graph, costs_on("local:2"), random.Random(2)
    priced = PlacedPrices(groups, costs.cluster, costs).price(random_splits(groups, 2, rng, 0.5))
    placement = random_placement(priced.graph, 2, rng)
    _, prediction = predict_placed(priced, placement)
    sends = [row for row in prediction.collectives if row["kind"] == "send"]
    file = tmp_path_factory.mktemp("placed") / "plan.json"
    plan_of(priced, placement, SOURCE, sends).save(file)
    return file


def test_ranks_of_a_job_train_it(plan_file, tmp_path, ranks):
    """What each of torchrun's processes does; ``tests/execute/test_train.py`` has jobs of real processes."""
    file = tmp_path / "result.json"
    command = f"--nproc-per-node 2 -m tensoropt.execute {plan_file} --steps 4 --json {file}"
    run_job(ranks, command.split())
    result = json.loads(file.read_text())
    assert len(result["losses"]) == 4
    assert result["losses"][-1] < result["losses"][0]


@pytest.mark.distributed
def test_verify_a_plan(plan_file):
    result = verify_plan(load_plan(plan_file), where="fake", progress=lambda *_: None)
    (found,) = result["plans"]
    assert result["ok"], found
    assert found["collectives_predicted"]
    assert found["mesh"] == "placed on 2"
    # 42 KB are tracked where 40 KB are predicted, and up to 3 KB more in a process that ran other tests
    # before; where these come from is not known. Larger placed plans are held closer in test_ranks.py.
    assert found["memory_tracked_bytes"] == pytest.approx(found["memory_predicted_bytes"], rel=0.13)


def test_a_plan_file_in_one_process(plan_file):
    (model, args, _), (plain, _, _) = jobs.spec("mlp").build(), jobs.spec("mlp").build()
    tensoropt.parallelize(model, plan_file, args)
    assert float(model(*args).detach()) == pytest.approx(float(plain(*args).detach()), rel=1e-6)
