"""Ways in which a script calls an engine and goes backward, and the gradients that each has to give."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.strategy import Strategy
from tests.engine.threads import ThreadRuntime, on_ranks, unsplit_engine

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


LOOPS = (usual, two_calls_and_one_backward, kept_graph, with_calls_that_nobody_uses, added_up)


def each_loop(ways: list[tuple[str, int, int]]) -> list[tuple[Loop, str, int, int]]:
    """Every loop with each (storage, micro-batches, copies); the backward of micro-batches comes once."""
    return [(loop, *way) for way in ways for loop in LOOPS if way[1] == 1 or loop is not kept_graph]


def data_parallel(
    graph: GroupGraph, stored: str = "ahead", micro: int = 1, copies: int = 1, dim: str = "S(0)"
) -> Strategy:
    """Data parallel on two ranks, or on ``copies`` times two that reduce what the shards' gradients leave."""
    further = [copies] if copies > 1 else []
    data = {
        "mesh": [micro, 2, *further],
        "groups": {
            g.name: ["none" if micro == 1 else "d0", "d0", *("d0" for _ in further)] for g in graph.groups
        },
        "hubs": {},
        "stored": {t.name: [stored, dim, *("R/P" for _ in further)] for t in graph.atoms.graph.parameters},
    }
    return Strategy.from_data(data, graph)


def check_gradients(
    strategy: Strategy, values: Mapping[str, torch.Tensor], x: torch.Tensor, loop: Loop, dim: int = 0
) -> None:
    """After a loop two ranks have the halves of the unsplit model's gradients, and nothing under way."""
    whole = unsplit_engine(strategy.graph, values)
    loop(whole, x)

    def work(own: ThreadRuntime) -> tuple[int, dict[str, torch.Tensor]]:
        engine = ShardedEngine(strategy, values, runtime=own)
        loop(engine, x)
        assert engine._calls == []
        for name in ("taken", "ready", "whole", "gradients", "last", "copying", "gathering", "scattering"):
            assert not getattr(own.ahead, f"_{name}"), name
        return own.position[0], {n: g.clone() for n, g in engine.shards.gradients.items()}

    for shard, gradients in on_ranks(strategy.mesh, work):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, whole.shards.gradients[name].chunk(2, dim)[shard])
