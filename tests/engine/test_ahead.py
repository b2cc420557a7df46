"""Parameters gathered one block ahead: what is issued when, and numbers in calls of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensoropt.capture import capture
from tensoropt.engine.ahead import scatter, wait
from tensoropt.engine.counts import unsplit_strategy
from tensoropt.engine.models import model_values
from tensoropt.engine.runtime import Runtime
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.ranks.pool import RankPool
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import GroupGraph, group_operators
from tensoropt.sharding.serialise import strategy_from_dict
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.collectives import Collective
from tensoropt.verify.fake_ranks import fake_job
from tensoropt.verify.recorder import CollectiveRecorder
from tests.engine.threads import ThreadRuntime, on_ranks

X = torch.randn(4, 8)


class Stack(nn.Module):
    """Four products; each is a block, of which the two in the middle are gathered ahead."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8, bias=bias) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def captured_stack(**settings: Any) -> tuple[GroupGraph, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    captured = capture(Stack(**settings), (X,))
    return group_operators(refine_graph(captured.graph)), model_values(captured)


def data_parallel(graph: GroupGraph, stored: str = "ahead", micro: int = 1) -> Strategy:
    data = {
        "mesh": [micro, 2],
        "groups": {group.name: ["none" if micro == 1 else "d0", "d0"] for group in graph.groups},
        "hubs": {},
        "stored": {t.name: [stored, "S(0)"] for t in graph.atoms.graph.parameters},
    }
    return strategy_from_dict(data, graph)


def test_a_block_is_gathered_together_as_the_one_before_begins() -> None:
    """Weights of 256 bytes and biases of 32: alone 256 and 32, together 288."""
    graph, values = captured_stack()
    with fake_job(0, 2), CollectiveRecorder((1, 2)) as recorder:
        engine = ShardedEngine(data_parallel(graph), values)
        loss = engine(X)[0]
        forward = len(recorder.issued)
        loss.backward()
    sent = [(c.kind, c.bytes) for c in recorder.issued]
    gather, scatter = "all_gather", "reduce_scatter"
    first = [(gather, 256), (gather, 32)]
    assert sorted(sent[1:3]) == sorted(first)
    assert sorted(sent[4:6]) == sorted(first)
    assert (
        sent[:forward]
        == [
            (
                gather,
                288,
            ),  # the second block's, as the first begins, whose own are gathered where they are used
            *sent[1:3],
            (gather, 288),  # the third's
            *sent[4:6],  # the last one's own
            ("all_reduce", 4),
        ]
    )
    backward = sent[forward:]
    # A bias is not needed again, and of the first weight nothing as nobody asks for the input's gradient.
    assert backward[:2] == [(gather, 256), (gather, 256)]  # the third's ahead, the last one's own
    assert sorted(backward[2:4]) == [(scatter, 32), (scatter, 256)]  # of the last one
    assert backward[4:7] == [(gather, 256), (scatter, 288), (scatter, 288)]
    assert sorted(backward[7:]) == [(scatter, 32), (scatter, 256)]  # of the first


Loop = Callable[[ShardedEngine], None]


def usual(engine: ShardedEngine) -> None:
    engine(X)[0].backward()


def two_calls_and_one_backward(engine: ShardedEngine) -> None:
    (engine(X)[0] + 2 * engine(X.flip(0) * 0.5)[0]).backward()


def kept_graph(engine: ShardedEngine) -> None:
    loss = engine(X)[0]
    loss.backward(retain_graph=True)
    loss.backward()


def with_calls_that_nobody_uses(engine: ShardedEngine) -> None:
    engine(X)
    with torch.no_grad():
        engine(X, evaluating=True)
    engine(X)[0].backward()


def added_up(engine: ShardedEngine) -> None:
    for factor in (1.0, 0.5):
        (factor * engine(X)[0]).backward()


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(
    "loop", [usual, two_calls_and_one_backward, kept_graph, with_calls_that_nobody_uses, added_up]
)
def test_gradients_are_those_of_the_unsplit_model(loop: Loop, micro: int) -> None:
    if micro > 1 and loop is kept_graph:
        pytest.skip("the backward of micro-batches comes once")
    graph, values = captured_stack()
    whole = ShardedEngine(unsplit_strategy(graph), values, runtime=Runtime((1,), rank=0))
    loop(whole)
    strategy = data_parallel(graph, micro=micro)
    assert len(strategy.blocks.first) == 4

    def work(own: ThreadRuntime) -> tuple[int, dict[str, torch.Tensor]]:
        engine = ShardedEngine(strategy, values, runtime=own)
        loop(engine)
        return own.rank, {n: g.clone() for n, g in engine.shards.gradients.items()}

    for rank, gradients in on_ranks(strategy.mesh, work):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, whole.shards.gradients[name].chunk(2)[rank])


def test_nothing_is_left_of_a_call() -> None:
    """Neither gathered parameters nor whole gradients outlive backward."""
    graph, values = captured_stack(bias=False)

    def work(own: ThreadRuntime) -> None:
        engine = ShardedEngine(data_parallel(graph), values, runtime=own)
        usual(engine)
        assert engine._calls == []
        ahead: Any = own.ahead
        assert not ahead._ready
        assert not ahead._whole
        assert not ahead._gradients
        assert not ahead._gathering
        assert not ahead._scattering

    on_ranks((1, 2), work)


def scattered(rank: int, world: int) -> tuple[list[list[float]], list[Collective], list[int]]:
    """What a rank gets of three values, the collectives issued, and the sizes of what has to stay."""
    assert dist.group.WORLD is not None
    values = [torch.arange(n, dtype=torch.float32) + 100 * rank for n in (4, 2, 6)]
    with CollectiveRecorder((1, world)) as recorder:
        arriving = scatter(values, dist.group.WORLD)
    return [wait(part).tolist() for part in arriving], recorder.issued, [value.numel() for value in values]


@pytest.mark.distributed
def test_gloo_reduces_several_gradients_in_one_message(ranks: RankPool) -> None:
    for rank, (parts, issued, stays) in enumerate(ranks.run(scattered)):
        want = [torch.arange(n, dtype=torch.float32) * 2 + 100 for n in (4, 2, 6)]
        assert parts == [value.chunk(2)[rank].tolist() for value in want]
        assert issued == [Collective("reduce_scatter", (1,), 12 * 4)]
        assert stays == [12]
