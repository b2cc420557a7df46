"""Parameters that several groups use, gathered together with others: what is issued when, and numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tensoropt.engine import parameters
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.sharding.buckets import gradient_buckets
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.strategy import Scattered
from tests.engine.loops import captured_of, check_gradients, data_parallel, each_loop, issued_by, usual
from tests.engine.threads import ThreadRuntime, on_ranks, unsplit_engine

WIDTH = 7
W = WIDTH * WIDTH * 4
"""Bytes of a weight; 8 rows of 7 are sent of it, as two ranks have 4 rows and 3."""
SENT = 8 * WIDTH * 4
GATHER, SCATTER = "all_gather", "reduce_scatter"


class Tied(nn.Module):
    """``a b b c d b``, five products of four weights: blocks ``a b b``, ``c`` and ``d b``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.b(torch.tanh(self.b(torch.tanh(self.a(x))))))
        x = torch.sigmoid(self.c(x)) + 1
        return self.b(torch.relu(self.d(x))).square().sum()


X = torch.randn(8, WIDTH)


def tied(batch: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model as a source, by name."""
    return Tied(), (torch.randn(batch, WIDTH),)


@functools.cache
def captured_tied(dtype: str = "float32") -> tuple[GroupGraph, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return captured_of(Tied(), X, dtype=dtype)


def blocks_of(graph: GroupGraph) -> list[list[str]]:
    """Per block the last letters of the parameters that its groups read."""
    strategy = data_parallel(graph)
    found: list[list[str]] = [[] for _ in strategy.blocks.first]
    for group in graph.groups:
        names = (*group.parameters, *group.shared)
        found[strategy.blocks.of[group.name]] += [name.removesuffix("_weight")[-1] for name in names]
    return found


def sizes_of(graph: GroupGraph, values: dict[str, torch.Tensor], stored: str) -> tuple[list, list]:
    """(kind, bytes) of what forward and backward of a fake rank issue."""
    forward, backward = issued_by(data_parallel(graph, stored), values, X)
    return [(c.kind, c.bytes) for c in forward], [(c.kind, c.bytes) for c in backward]


def test_uses_of_one_block_share_what_is_gathered_and_gradients_of_all_are_scattered_at_once():
    graph, values = captured_tied()
    assert blocks_of(graph) == [["a", "b", "b"], ["c"], ["d", "b"]]
    forward, backward = sizes_of(graph, values, "ahead")
    # The first block's own and the second's as the first begins, the third's as the second does.
    assert forward == [(GATHER, 2 * SENT), (GATHER, SENT), (GATHER, 2 * SENT), ("all_reduce", 4)]
    assert backward == [
        *[(GATHER, 2 * SENT), (GATHER, SENT)],  # as backward begins the last block: its own, and the second's
        *[(GATHER, SENT), (SCATTER, SENT)],  # as it begins the second: of the first b alone, and d's gradient
        (SCATTER, SENT),  # as it begins the first: c's
        (SCATTER, 2 * SENT),  # a's, and the sum of all of b's
    ]


def test_a_copy_comes_with_the_first_block_and_its_gradients_are_scattered_at_once():
    graph, values = captured_tied()
    forward, backward = sizes_of(graph, values, "held")
    assert forward == [(GATHER, 2 * SENT), (GATHER, SENT), (GATHER, SENT), ("all_reduce", 4)]
    assert backward == [(SCATTER, SENT), (SCATTER, SENT), (SCATTER, 2 * SENT)]


def test_a_bucket_waits_for_the_gradients_of_all_blocks(monkeypatch):
    """Hybrid sharding, each weight's shard in a bucket of its own."""
    monkeypatch.setattr(parameters, "gradient_buckets", functools.partial(gradient_buckets, limit_bytes=1))
    graph, values = captured_tied()
    strategy = data_parallel(graph, copies=2)
    assert set(strategy.scattered.values()) == {Scattered(1)}
    _, backward = issued_by(strategy, values, X)
    sent = [(c.kind, c.axes) for c in backward if c.kind != GATHER]
    scatter, reduce = (SCATTER, (1,)), ("all_reduce", (2,))
    assert sent == [scatter, reduce, scatter, reduce, scatter, reduce, reduce]


@pytest.mark.parametrize(
    ("loop", "stored", "micro", "copies"),
    each_loop(
        [
            *((stored, micro, 1) for stored in ("ahead", "held", "held/P") for micro in (1, 2)),
            ("ahead", 2, 2),
            ("held", 2, 2),
        ]
    ),
)
def test_gradients_are_those_of_the_unsplit_model(loop, stored, micro, copies):
    graph, values = captured_tied()
    check_gradients(data_parallel(graph, stored, micro, copies), values, X, loop)


def test_backward_keeps_no_gathered_copy():
    """Each reader of a shared copy has a tensor of its own: none of them is what autograd saves."""
    graph, values = captured_tied()

    def work(own: ThreadRuntime) -> None:
        engine = ShardedEngine(data_parallel(graph), values, runtime=own)
        kept: list[int] = []
        pack = engine.regathered.pack

        def told(value: torch.Tensor) -> Any:
            packed = pack(value)
            if isinstance(packed, torch.Tensor) and packed.shape[-2:] == (WIDTH, WIDTH):
                kept.append(packed.numel())
            return packed

        engine.regathered.pack = told  # type: ignore[method-assign]
        usual(engine, X)
        assert kept == []

    on_ranks((1, 2), work)


def gradients_on(rank: int, world: int, stored: str, dtype: str) -> dict[str, torch.Tensor]:
    """A rank's gradients after a step over gloo."""
    graph, values = captured_tied(dtype)
    engine = ShardedEngine(data_parallel(graph, stored), values)
    usual(engine, inputs())
    return {n: g.clone() for n, g in engine.shards.gradients.items()}


def inputs() -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.sweep(quick=2)
@pytest.mark.distributed
@pytest.mark.parametrize("stored", ["ahead", "held", "held/P"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_agree_with_the_unsplit_model(ranks, stored, dtype):
    graph, values = captured_tied(dtype)
    whole = unsplit_engine(graph, values)
    usual(whole, inputs())
    close = {"rtol": 0.05, "atol": 0.05 * _largest(whole.shards.gradients.values())}
    if dtype == "float32":
        close = {"rtol": 1e-5, "atol": 1e-6}
    for shard, gradients in enumerate(ranks.run(gradients_on, stored, dtype)):
        for name, gradient in gradients.items():
            want = whole.shards.gradients[name].chunk(2)[shard]
            torch.testing.assert_close(gradient, want, **close)


def _largest(values: Sequence[torch.Tensor]) -> float:
    return max(float(value.abs().max()) for value in values)
