"""Ways in which a script calls an engine and goes backward, and the gradients that each has to give."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.engine.models import model_values
from tensoropt.engine.runtime import Runtime
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import GroupGraph, group_operators
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.collectives import Collective
from tensoropt.verify.fake_ranks import fake_job
from tensoropt.verify.recorder import CollectiveRecorder
from tests.engine.threads import ThreadRuntime, on_ranks, unsplit_engine
from tests.simulate.strategies import written

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
    mesh, labels, layout = (micro, 2), ("none" if micro == 1 else "d0", "d0"), (stored, dim)
    if copies > 1:
        mesh, labels, layout = (*mesh, copies), (*labels, "d0"), (*layout, "R/P")
    return written(graph, mesh, labels, layout)


def issued_by(
    strategy: Strategy, values: Mapping[str, torch.Tensor], x: torch.Tensor, rank: int = 0
) -> tuple[list[Collective], list[Collective]]:
    """What forward and backward of a fake rank issue."""
    with fake_job(rank, strategy.devices), CollectiveRecorder(strategy.mesh) as recorder:
        engine = ShardedEngine(strategy, values, runtime=Runtime(strategy.mesh))
        loss = engine(x)[0]
        forward = len(recorder.issued)
        loss.backward()
    return recorder.issued[:forward], recorder.issued[forward:]


def captured_of(
    model: nn.Module, *inputs: torch.Tensor, **how: Any
) -> tuple[GroupGraph, dict[str, torch.Tensor]]:
    """The grouped graph of a model, and its values."""
    captured = capture(model, inputs, **how)
    return group_operators(refine_graph(captured.graph)), model_values(captured)


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
