"""Random placement problems, for planners that place."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np

from tensoropt.placement import DeviceSet, PlacedTensor, PlacementProblem
from tensoropt.planners.placed import local_search
from tensoropt.planners.placed.common.units import PlacedAnswer
from tests.planners.placed.hand import problem_of


def places(
    problem: PlacementProblem, limit: float | None, seed: int, settings: Any = local_search.DEFAULTS
) -> list[PlacedAnswer]:
    """What the local search answers for a problem without a graph."""
    graph: Any = SimpleNamespace(problem=problem)
    return [answer for _, answer in local_search.placements(graph, limit, seed, settings)]


def without_queues(problem: PlacementProblem) -> PlacementProblem:
    """The problem on devices whose messages pass each other."""
    pairs = permutations(range(problem.devices.count), 2)
    return replace(problem, devices=replace(problem.devices, lanes=dict.fromkeys(pairs, ())))


def with_capacity(problem: PlacementProblem, capacity: float) -> PlacementProblem:
    """The problem on devices of so many bytes each."""
    full = np.full(problem.devices.count, capacity)
    return replace(problem, devices=replace(problem.devices, capacity_bytes=full))


def all_bytes(problem: PlacementProblem) -> float:
    """What the operators of a step need in all."""
    return sum(problem.step_bytes(operator) for operator in range(problem.size))


def random_problem(
    seed: int,
    operators: int = 12,
    devices: int = 3,
    *,
    training: bool = True,
    capacity_bytes: float = float("inf"),
    transfer: float = 0.5,
    width: int = 3,
    mixed: bool = False,
) -> PlacementProblem:
    """A random directed graph of operators.

    Args:
        transfer: a tensor's time on the slowest link, in mean operator times.
        width: how far back an operator may read.
        mixed: devices of different speed, and links of different bandwidth.
    """
    rng = np.random.default_rng(seed)
    n, d = operators, devices
    base = rng.integers(1, 100, size=n) * 1e-4
    speed = rng.uniform(0.5, 1.0, size=d) if mixed else np.ones(d)
    readers: list[list[int]] = [[] for _ in range(n)]
    for reader in range(1, n):
        low = max(0, reader - width)
        count = int(rng.integers(1, min(3, reader - low) + 1))
        for producer in rng.choice(np.arange(low, reader), size=count, replace=False):
            readers[int(producer)].append(reader)
    sizes = rng.integers(1, 64, size=n) * 2**20
    tensors = tuple(
        PlacedTensor(
            name=f"t{i}",
            bytes=int(sizes[i]),
            producer=i,
            readers=tuple(readers[i]),
            kept_by=tuple(o for o in (i, *readers[i]) if rng.random() < 0.4),
            gradient=bool(rng.random() < 0.9),
        )
        for i in range(n)
    )
    per_byte = np.full((d, d), transfer * base.mean() / (32 * 2**20))
    if mixed:
        per_byte *= rng.uniform(0.3, 1.0, size=(d, d))
        per_byte = np.maximum(per_byte, per_byte.T)
    np.fill_diagonal(per_byte, 0.0)
    latency = np.full((d, d), 1e-5)
    np.fill_diagonal(latency, 0.0)
    parameters = rng.integers(0, 32, size=n) * 2.0**20
    return replace(
        problem_of(base[:, None] / speed, [], devices=d, training=training),
        update_s=(parameters * 1e-12)[:, None] * np.ones(d) * training,
        parameter_bytes=parameters,
        gradient_bytes=parameters * training,
        optimizer_bytes=2 * parameters * training,
        kept_bytes=rng.integers(0, 16, size=n) * 2.0**20 * training,
        forward_peak_bytes=rng.integers(0, 8, size=n) * 2.0**20,
        backward_peak_bytes=rng.integers(0, 8, size=n) * 2.0**20 * training,
        tensors=tensors,
        devices=DeviceSet(
            capacity_bytes=np.full(d, capacity_bytes), latency_s=latency, seconds_per_byte=per_byte, lanes={}
        ),
    )
