"""Models placed at random, and how far their results are from the unsplit model's."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from tensoropt.engine.engine import Engine, unsplit_strategy
from tensoropt.engine.models import CapturedModel, open_model
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.placement.execute.engine import PlacedEngine
from tensoropt.placement.execute.transport import Alone
from tensoropt.placement.strategy import PlacedStrategy
from tensoropt.verify.reference import largest_of, named_difference
from tests.execute.jobs import spec
from tests.placement.execute.random_placed import random_placed

CPU = torch.device("cpu")


@cache
def opened(name: str, **more: Any) -> CapturedModel:
    return open_model(spec(name, **more))


def placed(
    loaded: CapturedModel, seed: int, devices: int = 3, share: float = 0.4, micro_batches: int = 1
) -> PlacedStrategy:
    return random_placed(loaded.graph, devices, random.Random(seed), share, micro_batches)


def in_one_process(loaded: CapturedModel, strategy: PlacedStrategy, seed: int = 0) -> PlacedEngine:
    return PlacedEngine(strategy, loaded.values, devices=[CPU] * strategy.devices, seed=seed)


def unsplit(loaded: CapturedModel, seed: int = 0) -> ShardedEngine:
    return ShardedEngine(unsplit_strategy(loaded.graph), loaded.values, seed=seed)


def step(engine: Engine, loaded: CapturedModel) -> float:
    engine.shards.clear()
    loss = engine(*loaded.inputs)[0]
    loss.backward()
    return float(loss.detach())


def difference(found: Any, wanted: Any) -> float:
    """Largest difference of any named tensor, relative to its largest value, or to a thousandth of the
    largest of all."""
    return named_difference(found, wanted, 1e-3 * largest_of(wanted.values()))


def record_moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every value and gradient that engines made from now on move inside this process."""
    moved: list[int] = []
    send = Alone.send

    def recording(self: Alone, number: int, target: int, value: torch.Tensor) -> None:
        moved.append(value.numel() * value.element_size())
        send(self, number, target, value)

    monkeypatch.setattr(Alone, "send", recording)
    return moved
