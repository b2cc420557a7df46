"""Models on fake CUDA devices, in a process of their own: what their steps make, send and keep alive.

``python -m tests.fake_cuda.sweep LIBRARY`` reads cases as JSON from standard input and prints what was
seen, a line each.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import traceback
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

from tensoropt.fake_cuda import load

DEVICES = 8


def main() -> None:
    """Answer all cases."""
    load(Path(sys.argv[1]), DEVICES)
    from tensoropt.fake_cuda.operators import cuda_operators

    with cuda_operators():
        for case in json.load(sys.stdin):
            try:
                seen = KINDS[case["kind"]](case)
            except Exception as error:
                seen = {"error": "".join(traceback.format_exception(error)[-6:])}
            print(json.dumps({**case, **seen}), flush=True)


def sharded(case: dict[str, Any]) -> dict[str, Any]:
    """One random sharded strategy, on a CPU rank and on a CUDA rank."""
    from tensoropt.fake_cuda.operators import CAPABILITY
    from tensoropt.profiling.fact_finding import find_facts
    from tensoropt.profiling.workload import workload
    from tensoropt.sharding.configurations import MicroBatchRefused
    from tensoropt.simulate.memory_curve import memory_curve
    from tensoropt.verify.random_strategies import micro_strategies, random_strategy

    loaded = loaded_of(case)
    mesh = tuple(case["mesh"])
    try:
        micro = micro_strategies(loaded.graph, mesh[0])
    except MicroBatchRefused:
        mesh = (1, *mesh[1:])
        micro = micro_strategies(loaded.graph, 1)
    strategy = random_strategy(loaded.graph, mesh, micro, random.Random(case["seed"]), 0.3)
    works = {n: workload(loaded.graph, c, strategy.mesh) for n, c in strategy.configurations.items()}
    facts = {n: find_facts(work, True, CAPABILITY) for n, work in works.items()}
    predicted = memory_curve(strategy, facts, "adam").peak.total
    # Shards are as large on the first rank; where gradients of parameters are padded, the last has more.
    return watched(loaded, strategy, predicted, [0, prod(mesh) // mesh[0] - 1])


def placed(case: dict[str, Any]) -> dict[str, Any]:
    """One random placement on three devices, a process each."""
    loaded = loaded_of(case)
    strategy, predicted = placement(loaded, case["seed"])
    return watched(loaded, strategy, predicted, range(3))


def one_process(case: dict[str, Any]) -> dict[str, Any]:
    """One random placement on three devices that one process runs."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tensoropt.placement.execute.engine import PlacedEngine
    from tests.fake_cuda.devices import MadeOnTheCpu

    loaded = loaded_of(case)
    # All in pieces, so that pieces of the loss are on several devices.
    strategy, _ = placement(loaded, case["seed"], 1.0)
    with FakeTensorMode(allow_non_fake_inputs=True):

        def on(values: Any) -> list[torch.Tensor]:
            return [torch.empty(v.shape, dtype=v.dtype, device="cuda:0") for v in values]

        values = dict(zip(loaded.values, on(loaded.values.values()), strict=True))
        engine = PlacedEngine(strategy, values, devices=[f"cuda:{i}" for i in range(3)])
        inputs = on(loaded.inputs)
        engine(*inputs)[0].backward()
        with MadeOnTheCpu() as noted:
            engine(*inputs)[0].backward()
    return {"cpu": sorted(noted.operators)}


def script(case: dict[str, Any]) -> dict[str, Any]:
    """What a training script does with a parallelized model, on the first of four ranks."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

    from tensoropt.engine import sharded_model
    from tensoropt.engine.models import ModelSpec
    from tensoropt.execute import job, parallel
    from tensoropt.verify.fake_ranks import fake_job
    from tensoropt.verify.random_strategies import micro_strategies, random_strategy
    from tests.fake_cuda.devices import MadeOnTheCpu

    loaded = loaded_of(case)
    micro = micro_strategies(loaded.graph, 2)
    strategy = random_strategy(loaded.graph, (2, 2, 2), micro, random.Random(case["seed"]), 0.3)
    model, args, kwargs = ModelSpec(case["model"], 0).build()
    make_mesh, fake = sharded_model.init_device_mesh, FakeTensorMode(allow_non_fake_inputs=True)

    def real_mesh(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():  # a mesh looks at the numbers of its ranks
            return make_mesh(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_job(0, 4))
        for where, name, value in (
            (job, "why_no_gpu", lambda: ""),
            (torch.cuda, "device_count", lambda: DEVICES),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "set_device", lambda _: None),
            (sharded_model, "init_device_mesh", real_mesh),
            # From here on, after the capture, tensors are fake.
            (
                parallel,
                "_join_job",
                lambda _: stack.enter_context(fake),
            ),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        parallel.parallelize(model, strategy, args, kwargs, device="cuda")
        inputs = [torch.empty(v.shape, dtype=v.dtype, device="cuda") for v in args]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step() -> list[torch.Tensor]:
            optimizer.zero_grad()
            loss = model(*inputs, **kwargs)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return [loss, norm]

        results = step()
        with MadeOnTheCpu() as noted:
            results += step()
        results += model.state_dict().values()
        model.eval()
        with torch.no_grad():
            results.append(model(*inputs, **kwargs))
    elsewhere = [value.device.type for value in results if value.device.type != "cuda"]
    return {"cpu": sorted(noted.operators) + elsewhere}


def captured(case: dict[str, Any]) -> dict[str, Any]:
    """A model on a GPU, captured with example inputs on the CPU and on the GPU."""
    from tensoropt.capture import capture
    from tensoropt.engine.models import ModelSpec
    from tests.fake_cuda.devices import OnCuda, put_on_cuda

    model, args, kwargs = ModelSpec(case["model"], 0).build()
    there = {name: OnCuda(value) for name, value in kwargs.items()}
    wanted = capture(model, args, kwargs, dtype=case["dtype"]).graph.fingerprint
    put_on_cuda(model)
    calls = ((args, kwargs), (tuple(OnCuda(value) for value in args), there))
    found = [capture(model, *call, dtype=case["dtype"]).graph.fingerprint for call in calls]
    left = [v.device.type for v in (*model.parameters(), *model.buffers()) if v.device.type != "cuda"]
    return {"cpu": left + [f"another graph: {one}" for one in found if one != wanted]}


def from_plan(case: dict[str, Any]) -> dict[str, Any]:
    """A model on a GPU that is parallelized by a plan's file alone, without an example call."""

    import tensoropt
    from tensoropt.engine.models import ModelSpec
    from tensoropt.execute import parallel
    from tensoropt.execute.resolve import ResolvedPlan
    from tests.fake_cuda.devices import put_on_cuda

    model, args, kwargs = ModelSpec(case["model"], 0).build()
    found = tensoropt.explore(
        model, args, kwargs, cluster="dgx-a100[1]", measure="never", micro_batches=(1,), recompute="never"
    )
    prepared = []
    prepare = ResolvedPlan.prepare

    class PreparedError(Exception):
        """All that has to do with the example call is done."""

    def noted(*args: Any) -> Any:
        prepared.append(prepare(*args))
        raise PreparedError

    with tempfile.TemporaryDirectory() as folder:
        found.choose().save(f"{folder}/plan.json")
        put_on_cuda(model)
        with mock.patch.object(ResolvedPlan, "prepare", noted), contextlib.suppress(PreparedError):
            parallel.parallelize(model, f"{folder}/plan.json")
    graph = prepared[0].captured.graph
    shapes = [graph.tensors[name].shape for name in graph.inputs]
    assert shapes == [tuple(v.shape) for v in (*args, *kwargs.values())]
    return {"cpu": []}


def placement(loaded: Any, seed: int, share: float = 0.3) -> tuple[Any, float]:
    """A random placement on three devices, a share of the operators in pieces; bytes of the fullest."""
    from tensoropt.cluster import load_cluster
    from tensoropt.costs.source import CostSource
    from tensoropt.placement.plans import PlacedStrategy
    from tensoropt.placement.prices import PlacedPrices
    from tensoropt.plan.settings import Settings
    from tensoropt.profiling.store import ProfileStore
    from tensoropt.verify.predict import predict_placed
    from tensoropt.verify.random_placements import random_placement, random_splits

    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, ProfileStore(Path(folder) / "profiles.sqlite") as store:
        costs = CostSource(load_cluster("dgx-a100[3]"), store, Settings(measure="never"), None)
        graph = PlacedPrices(loaded.graph, costs.cluster, costs).price(
            random_splits(loaded.graph, 3, rng, share)
        )
        where = random_placement(graph.graph, 3, rng)
        strategy, prediction = predict_placed(graph, where)
    return PlacedStrategy(strategy.graph, where, strategy.transfers), prediction.memory_bytes


def loaded_of(case: dict[str, Any]) -> Any:
    """The model of a case, without memory."""
    from tensoropt.engine.models import ModelSpec, load_model

    # Models of tests make tensors where they are not told to.
    device = "meta" if case["model"].startswith("zoo:") else "cpu"
    return load_model(ModelSpec(case["model"], 0, compute_dtype=case["dtype"], device=device))


def watched(loaded: Any, strategy: Any, predicted: float, ranks: Sequence[int]) -> dict[str, Any]:
    """What steps send and keep alive on CPU and on CUDA ranks, and which operators gave CPU tensors there."""
    from tensoropt.verify.fake_ranks import step_on
    from tensoropt.verify.steps import issued, tracked_memory
    from tests.fake_cuda.devices import MadeOnTheCpu

    sent: dict[str, list[Any]] = {"cpu": [], "cuda": []}
    tracked, made = 0, set()
    for rank in ranks:
        for device, of_device in sent.items():
            with step_on(rank, loaded, strategy, "adam", device) as step:
                of_device.append(issued(step.engine, step))
                if device == "cuda":
                    with MadeOnTheCpu() as noted:
                        tracked = max(tracked, tracked_memory(step)["peak"])
                    made |= noted.operators
    return {
        "alike": sent["cpu"] == sent["cuda"],
        "tracked": tracked,
        "predicted": predicted,
        "cpu": sorted(made),
    }


KINDS = {
    "sharded": sharded,
    "placed": placed,
    "one_process": one_process,
    "script": script,
    "captured": captured,
    "from_plan": from_plan,
}

if __name__ == "__main__":
    main()
