"""Ways in which a script calls an engine and goes backward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tensoropt.engine.sharded_engine import ShardedEngine

Loop = Callable[[ShardedEngine, torch.Tensor], None]


def usual(engine: ShardedEngine, x: torch.Tensor) -> None:
    engine(x)[0].backward()


def two_calls_and_one_backward(engine: ShardedEngine, x: torch.Tensor) -> None:
    (engine(x)[0] + 2 * engine(x.flip(0) * 0.5)[0]).backward()


def kept_graph(engine: ShardedEngine, x: torch.Tensor) -> None:
    loss = engine(x)[0]
    loss.backward(retain_graph=True)
    loss.backward()


def with_calls_that_nobody_uses(engine: ShardedEngine, x: torch.Tensor) -> None:
    engine(x)
    with torch.no_grad():
        engine(x, evaluating=True)
    engine(x)[0].backward()


def added_up(engine: ShardedEngine, x: torch.Tensor) -> None:
    for factor in (1.0, 0.5):
        (factor * engine(x)[0]).backward()
