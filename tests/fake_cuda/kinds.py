"""What is done with a model on fake CUDA devices. Import this only where such devices exist."""

from __future__ import annotations

import contextlib
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

import tensoropt
from tensoropt.capture import capture
from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.engine import runtime
from tensoropt.engine.evaluation import CallEvaluator
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.execute import parallel
from tensoropt.execute.executable import ResolvedPlan
from tensoropt.placement.execute.engine import PlacedEngine
from tensoropt.placement.points import PlacedStrategy
from tensoropt.placement.prices import PlacedPrices
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tensoropt.verify.fake_ranks import fake_job, step_on
from tensoropt.verify.predict import predict_placed
from tensoropt.verify.random_strategies import (
    micro_strategies,
    random_placement,
    random_splits,
    random_strategy,
)
from tests.fake_cuda.devices import OnCuda, put_on_cuda
from tests.fake_cuda.library import DEVICES
from tests.fake_cuda.steps import MadeOnTheCpu, watched, watched_random

RANKS = 4
"""Of the job that a script belongs to."""


def sharded(case: dict[str, Any]) -> dict[str, Any]:
    """One random sharded strategy, on a CPU rank and on a CUDA rank."""
    return watched_random(loaded_of(case), tuple(case["mesh"]), case["seed"])


def placed(case: dict[str, Any]) -> dict[str, Any]:
    """One random placement on three devices, a process each."""
    loaded = loaded_of(case)
    strategy, predicted = placement(loaded, case["seed"])
    return watched(loaded, strategy, predicted, range(3))


def through_host(case: dict[str, Any]) -> dict[str, Any]:
    """One random placement on three devices whose messages are copied through the host, as gloo needs it."""
    carried: set[str] = set()

    class Messages(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d" and func._schema.name in ("c10d::send", "c10d::recv_"):
                carried.update(value.device.type for value in args[0])
            return func(*args, **(kwargs or {}))

    loaded = loaded_of(case)
    strategy, _ = placement(loaded, case["seed"])
    made: set[str] = set()
    with mock.patch.object(runtime, "through_host", lambda device: device.type != "cpu"):
        for rank in range(3):
            with step_on(rank, loaded, strategy, "adam", "cuda") as step:
                step()
                with MadeOnTheCpu() as noted, Messages():
                    step()
                made |= noted.operators
                where = {value.device.type for value in step.engine.shards.gradients.values()}
                carried |= {f"gradient on {device}" for device in where - {"cuda"}}
    # Copies to the host, and what a message arrives in.
    staged = {"aten._to_copy.default", "aten.empty.memory_format", "c10d.recv_.default", "c10d.send.default"}
    return {"carried": sorted(carried), "cpu": sorted(made - staged)}


def one_process(case: dict[str, Any]) -> dict[str, Any]:
    """One random placement on three devices that one process runs."""
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
    """What a training script does with a parallelized model, on the first rank of a job."""
    loaded = loaded_of(case)
    micro = micro_strategies(loaded.graph, 2)
    strategy = random_strategy(loaded.graph, (2, 2, 2), micro, random.Random(case["seed"]), 0.3)
    model, args, kwargs = ModelSpec(case["model"], 0).build()
    make_mesh, fake = runtime.init_device_mesh, FakeTensorMode(allow_non_fake_inputs=True)

    def real_mesh(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():  # a mesh looks at the numbers of its ranks
            return make_mesh(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_job(0, RANKS))
        for where, name, value in (
            (parallel, "why_no_gpu", lambda: ""),
            (torch.cuda, "device_count", lambda: DEVICES),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "set_device", lambda _: None),
            (runtime, "init_device_mesh", real_mesh),
            # What ranks pass is compared by values, which fake tensors lack too; all pass the same.
            (CallEvaluator, "_agreed", lambda _, call, __: ([call.rows] * RANKS, call.fits)),
            # From here on, after the capture, tensors are fake.
            (parallel, "_join_job", lambda _: stack.enter_context(fake)),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        # Fake tensors have no values that could be compared.
        parallel.parallelize(model, strategy, args, kwargs, device="cuda", compare_ranks=False)
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
        # Buffers that no step changes are constants of the graph, and stay where they are.
        weights = dict(model.named_parameters())
        results += [value for name, value in model.state_dict().items() if name in weights]
        model.eval()
        with torch.no_grad():
            results.append(model(*inputs, **kwargs))
    elsewhere = [value.device.type for value in results if value.device.type != "cuda"]
    return {"cpu": sorted(noted.operators) + elsewhere}


def captured(case: dict[str, Any]) -> dict[str, Any]:
    """A model on a GPU, captured with example inputs on the CPU and on the GPU."""
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
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, ProfileStore(Path(folder) / "profiles.sqlite") as store:
        costs = CostSource(load_cluster("dgx-a100[3]"), store, Settings(measure="never"), None)
        graph = PlacedPrices(loaded.graph, costs.cluster, costs).price(
            random_splits(loaded.graph, 3, rng, share)
        )
        where = random_placement(graph.graph, 3, rng)
        strategy, prediction = predict_placed(graph, where)
    return PlacedStrategy(strategy.placed_graph, where, strategy.transfers), prediction.memory_bytes


def loaded_of(case: dict[str, Any]) -> Any:
    """The model of a case, without memory."""
    # Models of tests make tensors where they are not told to.
    device = "meta" if case["model"].startswith("zoo:") else "cpu"
    return load_model(ModelSpec(case["model"], 0, compute_dtype=case["dtype"], device=device))


KINDS = {
    "sharded": sharded,
    "placed": placed,
    "through_host": through_host,
    "one_process": one_process,
    "script": script,
    "captured": captured,
    "from_plan": from_plan,
}
