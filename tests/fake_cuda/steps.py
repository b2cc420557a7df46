"""Steps on fake CUDA devices: what they make, send and keep alive. Import this only where such devices
exist."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensoropt.engine.models import CapturedModel
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.workload import workload
from tensoropt.sharding.configurations import MicroBatchRefused
from tensoropt.sharding.strategy import ParallelStrategy
from tensoropt.verify.fake_ranks import recorded, step_on, tracked_memory
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.fake_cuda.operators import CAPABILITY
from tests.simulate.strategies import memory_curve

ON_THE_CPU = {
    "aten.lift_fresh.default": "Python numbers that PyTorch's optimizers wrap; they are operands as they are"
}
"""Operators that may return a CPU tensor in a step on CUDA, and why."""
_RECOMPUTE = 0.3
"""The probability that a repeated block of a random strategy is recomputed; an assumption."""


class MadeOnTheCpu(TorchDispatchMode):
    """A mode that records the operators that return a tensor on the CPU although no operand is there."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = [v for v in torch.utils._pytree.tree_leaves(result) if isinstance(v, torch.Tensor)]
        if any(value.device.type == "cpu" for value in results):
            self.operators.add(str(func))
        return result


def watched_random(loaded: CapturedModel, mesh: tuple[int, ...], seed: int) -> dict[str, Any]:
    """Run :func:`watched` on one random sharded strategy.

    Args:
        mesh: micro-batches (if the model allows them), then the axis sizes.
    """
    try:
        micro = micro_strategies(loaded.graph, mesh[0])
    except MicroBatchRefused:
        mesh = (1, *mesh[1:])
        micro = micro_strategies(loaded.graph, 1)
    strategy = random_strategy(loaded.graph, mesh, micro, random.Random(seed), _RECOMPUTE)
    works = {n: workload(loaded.graph, c, strategy.mesh) for n, c in strategy.configurations.items()}
    facts = {n: find_facts(work, True, CAPABILITY) for n, work in works.items()}
    predicted = memory_curve(strategy, facts, "adam").peak.total
    # Shards are as large on the first rank; if gradients of parameters are padded, the last rank has more.
    return watched(loaded, strategy, predicted, [0, prod(mesh) // mesh[0] - 1])


def watched(
    loaded: CapturedModel, strategy: ParallelStrategy, predicted: float, ranks: Sequence[int]
) -> dict[str, Any]:
    """Return what steps send and keep alive on CPU and on CUDA ranks, and which operators returned CPU
    tensors there.

    Returns:
        ``alike``: whether both send the same; ``tracked``: bytes of the fullest CUDA rank; ``predicted``
        bytes; ``cpu``: the operators.
    """
    sent: dict[str, list[Any]] = {"cpu": [], "cuda": []}
    tracked, made = 0, set()
    for rank in ranks:
        for device, of_device in sent.items():
            with step_on(rank, loaded, strategy, "adam", device) as step:
                of_device.append(recorded(step.engine, step).issued)
                if device == "cuda":
                    with MadeOnTheCpu() as noted:
                        memory = tracked_memory(step)
                        tracked = max(tracked, memory["peak"] - memory["constants"])
                    made |= noted.operators
    return {
        "alike": sent["cpu"] == sent["cuda"],
        "tracked": tracked,
        "predicted": predicted,
        "cpu": sorted(made),
    }
