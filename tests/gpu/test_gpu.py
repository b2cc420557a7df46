"""What only a GPU can show: the lowered graph's numbers, plans of each kind on one card, memory and seconds
beside what is predicted.

``make test-gpu`` runs this where there is one. ``TENSOROPT_GPU_TESTS=cpu`` runs it on CPU ranks, as a test
of itself: the bounds of seconds and of the allocator's bytes say nothing there.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import tensoropt
from tensoropt.cluster import load_cluster
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import CapturedModel, ModelSpec, load_model, open_model
from tensoropt.engine.runtime import Runtime
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.ops.families.generators import keep_mask
from tensoropt.ops.kernels import SingleDevice
from tensoropt.profiling.fact_finding import _Probe, find_facts
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.store import ProfileStore
from tensoropt.profiling.timers import local_timer
from tensoropt.profiling.workload import Workload, random_tensor, workload
from tensoropt.question.settings import Settings
from tensoropt.ranks.pool import RankPool
from tensoropt.types import silent
from tensoropt.verify import verify_random
from tensoropt.verify.fake_ranks import RunStep, tracked_memory
from tensoropt.verify.findings import _GRADIENT_TOLERANCE, _LOSS_TOLERANCE
from tensoropt.verify.predict import place_for, predict
from tensoropt.verify.reference import module_difference
from tensoropt.verify.run import predict_and_run, ranks_with
from tests.simulate.strategies import memory_curve

ON_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not ON_GPU and os.environ.get("TENSOROPT_GPU_TESTS") != "cpu", reason="no CUDA device is here"
    ),
]
DEVICE = "cuda" if ON_GPU else "cpu"
MEMORY, TIME = 0.03, 0.10
"""How far memory and seconds may be from what is predicted, as shares."""
SMALL = ("zoo:mlp", "zoo:gpt-mini", "zoo:vgg11-tiny", "zoo:transformer-tiny")
LARGE = (
    # As long as a GPU is busy for some tens of milliseconds, and within 16 GiB.
    ("zoo:gpt-mini", {"layers": 12, "hidden": 768, "heads": 12, "vocabulary": 32768, "batch": 8}),
    ("zoo:vgg16", {"batch": 32}),
    ("zoo:resnet101", {"batch": 32}),
) if ON_GPU else (("zoo:mlp", {"batch": 256}),)  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProfileStore]:
    with ProfileStore(tmp_path_factory.mktemp("gpu") / "profiles.sqlite") as store:
        yield store


def spec_of(source: str, settings: dict[str, int] | None = None, dtype: str = "float32") -> ModelSpec:
    return ModelSpec(source, settings=tuple((settings or {}).items()), compute_dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("source", SMALL)
def test_the_lowered_graph_computes_what_the_module_does(source: str) -> None:
    found = module_difference(0, 1, spec_of(source), 0)
    assert found is not None
    assert not found.not_finite
    loss, gradient = found.differences.loss, found.differences.gradient
    assert loss is not None
    assert loss <= _LOSS_TOLERANCE
    assert gradient is not None
    assert gradient <= _GRADIENT_TOLERANCE


def test_dropout_draws_the_same_bits_as_on_a_cpu() -> None:
    """Masks are a hash of positions, so that ranks of any kind agree."""
    pieces = ((384, 1000, 384, ()), (1000, 1, 1000, ()))
    masks = [
        keep_mask(SingleDevice(7, 3), "drop", 0.1, (384, 1000), pieces, torch.device(where))
        for where in ("cpu", DEVICE)
    ]
    assert torch.equal(masks[0], masks[1].cpu())


@pytest.mark.parametrize(
    ("source", "dtype", "kind"),
    [
        ("zoo:gpt-mini", "float32", {}),
        ("zoo:mlp", "bfloat16", {}),
        ("zoo:gpt-mini", "float32", {"pipeline": 2}),
        ("zoo:mlp", "float32", {"placed": True}),
    ],
)
def test_plans_of_each_kind_on_two_ranks_of_one_card(
    source: str, dtype: str, kind: dict[str, int], store: ProfileStore
) -> None:
    answer = verify_random(
        source, "dgx-a100[2]", 2, dtype=dtype, store=store, progress=False,
        where="share-gpu" if ON_GPU else "ranks", **kind,
    )  # fmt: skip
    assert answer["ok"], [plan["error"] or plan for plan in answer["plans"] if not plan["ok"]]


def found_on_rank(rank: int, world_size: int, work: Workload) -> dict[str, Any]:
    """The facts of a workload as it runs on this rank's device."""
    with local_timer().device:  # for calls that create tensors from nothing
        tensors = {name: random_tensor(spec) for name, spec, _ in work.inputs}
        return _Probe(work, tensors, training=True).observe().to_record()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("source", SMALL)
def test_operators_keep_and_need_what_fake_tensors_say(source: str, dtype: str) -> None:
    graph = open_model(replace(spec_of(source, dtype=dtype), device="cpu")).graph
    strategy = unsplit_strategy(graph)
    made = (workload(graph, c, strategy.mesh) for c in strategy.configurations.values())
    works = list({work.key: work for work in made}.values())
    capability = torch.cuda.get_device_capability(0) if ON_GPU else None
    fake = [find_facts(work, True, capability) for work in works]
    with RankPool(1, backend="nccl" if ON_GPU else "gloo") as pool:
        records = [pool.run(found_on_rank, work)[0] for work in works]
    real = [Facts.from_record(record) for record in records]
    for most in ("forward_peak_bytes", "backward_peak_bytes"):
        predicted, found = (sum(f.kept_bytes + getattr(f, most) for f in facts) for facts in (fake, real))
        assert predicted == pytest.approx(found, rel=MEMORY)


def unsplit_step(loaded: CapturedModel) -> RunStep:
    """A step that has run twice, so that libraries have their workspaces and the optimizer its state."""
    gc.collect()  # or the model before this one would be freed in the middle of the step
    runtime = Runtime((1,), seed=loaded.spec.seed, device=loaded.device)
    engine = ShardedEngine(unsplit_strategy(loaded.graph), loaded.values, runtime=runtime)
    step = RunStep(engine, loaded.inputs, "adam")
    step()
    step()
    return step


@pytest.mark.parametrize(("source", "settings"), LARGE)
def test_a_steps_memory_is_the_allocators_and_the_predicted_one(
    source: str, settings: dict[str, int]
) -> None:
    loaded = load_model(spec_of(source, settings))
    step = unsplit_step(loaded)
    strategy = unsplit_strategy(loaded.graph)
    capability = torch.cuda.get_device_capability(0) if ON_GPU else None
    works = {n: workload(strategy.graph, c, strategy.mesh) for n, c in strategy.configurations.items()}
    facts = {n: find_facts(work, True, capability) for n, work in works.items()}
    predicted = float(memory_curve(strategy, facts, "adam").peak.total)
    before = torch.cuda.memory_allocated(0) if ON_GPU else 0
    memory = tracked_memory(step)
    assert memory["peak"] - memory["constants"] == pytest.approx(predicted, rel=MEMORY)
    if ON_GPU:
        # Inputs, constants and libraries' workspaces lie on the card beside the step.
        outside = before - sum(memory[kind] for kind in ("parameters", "gradients", "optimizer"))
        assert predicted + outside == pytest.approx(memory["allocated"], rel=MEMORY)


@pytest.mark.parametrize(("source", "settings"), LARGE)
def test_a_step_takes_what_its_operators_take(
    source: str, settings: dict[str, int], store: ProfileStore
) -> None:
    """Timed one by one in this run, and added up by the simulator, beside the measured step."""
    cluster = load_cluster("local:1" if ON_GPU else "cpu:1")
    place = place_for(1, cluster.device_type, cluster.name, "auto")
    subject = replace(spec_of(source, settings), device=place.device)
    with ranks_with(subject, place, 1) as pool:
        drawn = [(unsplit_strategy(load_model(subject).graph), cluster.meshes(1)[0])]
        answer = predict_and_run(
            subject, functools.partial(predict, drawn), cluster, place, pool, Settings(dtype="float32"),
            store, silent, numerics=False,
        )  # fmt: skip
    (step,) = answer["plans"]
    assert step["ok"], step["error"]
    assert step["time_measured_s"] > 0
    if ON_GPU:
        assert step["time_predicted_s"] == pytest.approx(step["time_measured_s"], rel=TIME)


def test_a_model_is_captured_explored_and_run_on_this_card() -> None:
    loaded = tensoropt.load_model("zoo:gpt-mini", device=DEVICE)
    found = tensoropt.explore(loaded, cluster="local:1" if ON_GPU else "cpu:1", progress=False)
    model = tensoropt.parallelize(loaded.model, found.choose(knee=True), loaded.args, loaded.kwargs)
    model(*loaded.args, **loaded.kwargs).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
