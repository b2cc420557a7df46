"""Parameters gathered one block ahead: what is issued when, and numbers in calls of all kinds."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensoropt.engine import parameters
from tensoropt.engine.gathering import gather, scatter, wait
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.sharding.buckets import gradient_buckets
from tensoropt.sharding.groups import GroupGraph
from tensoropt.simulate.collectives import Collective
from tensoropt.verify.recorder import CollectiveRecorder
from tests.engine.loops import captured_of, check_gradients, data_parallel, each_loop, issued_by, usual
from tests.engine.threads import ThreadRuntime, on_ranks

X = torch.randn(8, 8)


class Stack(nn.Module):
    """Four products; each is a block."""

    def __init__(self, *, bias: bool = True, width: int = 8) -> None:
        super().__init__()
        sizes = [8, width, width, width, 8]
        self.layers = nn.Sequential(*(nn.Linear(*two, bias=bias) for two in pairwise(sizes)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


@functools.cache
def captured_stack(dtype: str = "float32", **settings: Any) -> tuple[GroupGraph, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return captured_of(Stack(**settings), X, dtype=dtype)


def test_a_block_is_gathered_together_as_the_one_before_begins():
    """Weights of 256 bytes and biases of 32: alone 256 and 32, together 288."""
    graph, values = captured_stack()
    forward, backward = (
        [(c.kind, c.bytes) for c in one] for one in issued_by(data_parallel(graph), values, X)
    )
    gather, scatter = "all_gather", "reduce_scatter"
    # The first block's own and the second's as the first begins, the others' as the one before begins.
    assert forward == [*[(gather, 288)] * 4, ("all_reduce", 4)]
    # A bias is not needed again, and of the first weight nothing as nobody asks for the input's gradient. The
    # last block's is gathered as backward begins, and the third's; gradients go one block behind.
    assert backward == [*[(gather, 256)] * 3, *[(scatter, 288)] * 4]


def test_shards_are_reduced_over_copies_while_backward_goes_on(monkeypatch):
    """Hybrid sharding, each weight's shard in a bucket of its own that is reduced once the shard is there."""
    monkeypatch.setattr(parameters, "gradient_buckets", functools.partial(gradient_buckets, limit_bytes=1))
    graph, values = captured_stack(bias=False)
    _, backward = issued_by(data_parallel(graph, copies=2), values, X)
    sent = [(c.kind, c.axes) for c in backward if c.kind != "all_gather"]
    scatter, reduce = ("reduce_scatter", (1,)), ("all_reduce", (2,))
    # Each is reduced as backward begins another block, or is over, before the next one's is scattered.
    assert sent == [scatter, reduce] * 4


@pytest.mark.parametrize(
    ("loop", "stored", "micro", "copies"),
    each_loop(
        [
            ("ahead", 1, 1),
            ("ahead", 2, 1),
            ("ahead", 1, 2),
            *((stored, micro, 1) for stored in ("held", "held/P") for micro in (1, 2)),
            ("held/P", 2, 2),
        ]
    ),
)
def test_gradients_are_those_of_the_unsplit_model(loop, stored, micro, copies):
    graph, values = captured_stack()
    strategy = data_parallel(graph, stored, micro, copies)
    assert len(strategy.blocks.first) == 4
    check_gradients(strategy, values, X, loop)


@pytest.mark.parametrize("stored", ["ahead", "held", "held/P"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("dim", ["S(0)", "S(1)"])
def test_gradients_of_uneven_shards_are_those_of_the_unsplit_model(stored, micro, dim):
    """Of 7 rows or columns one rank has 4, the other 3."""
    graph, values = captured_stack(bias=False, width=7)
    strategy = data_parallel(graph, stored, micro, dim=dim)
    assert all(
        strategy.use(name, group).block is not None or stored == "held/P"
        for group in graph.groups
        for name in group.parameters
    )
    check_gradients(strategy, values, X, usual, int(dim[2]))


def test_uneven_shards_are_sent_padded():
    """Weights of 7x8, 7x7, 7x7 and 8x7, the first dim in two: shards of 4 rows, the last rank's with 3."""
    graph, values = captured_stack(bias=False, width=7)
    both = [issued_by(data_parallel(graph), values, X, rank) for rank in range(2)]
    sent = [[(c.kind, c.bytes) for c in (*forward, *backward)] for forward, backward in both]
    assert sent[0] == sent[1]
    first, second, third, last = (4 * n for n in (2 * 4 * 8, 2 * 4 * 7, 2 * 4 * 7, 8 * 7))
    gather, scatter = "all_gather", "reduce_scatter"
    assert sent[0] == [
        *((gather, size) for size in (first, second, third, last)),
        ("all_reduce", 4),
        *((gather, size) for size in (last, third, second)),
        *((scatter, size) for size in (last, third, second, first)),
    ]


def test_copies_are_gathered_in_the_first_micro_batch_and_reduced_in_the_last():
    graph, values = captured_stack(bias=False)
    forward, backward = issued_by(data_parallel(graph, "held/P", micro=4), values, X)
    sent = [c.kind for c in (*forward, *backward)]
    # The loss is a sum over all ranks' rows.
    assert sent == [*["all_gather"] * 4, *["all_reduce"] * 4, *["reduce_scatter"] * 4]


def test_narrow_copies_add_up_wide():
    """In mixed precision the gradients of a copy wait in the type in which the parameter is stored."""
    graph, values = captured_stack("bfloat16", bias=False)
    strategy = data_parallel(graph, "held/P", micro=4)

    def work(own: ThreadRuntime) -> None:
        engine = ShardedEngine(strategy, values, runtime=own)
        usual(engine, X)
        assert {g.dtype for g in engine.unsharded.unreduced.values()} == {torch.float32}
        assert not any(g.any() for g in engine.unsharded.unreduced.values())
        assert {w.dtype for w in engine.unsharded.values.values()} == {torch.bfloat16}
        assert {g.dtype for g in engine.shards.gradients.values()} == {torch.float32}
        assert all(w.grad is None for w in engine.unsharded.values.values())

    on_ranks(strategy.mesh, work)


def scattered(rank: int, world: int) -> tuple[list[list[float]], list[Collective], list[int]]:
    """What a rank gets of three values, the collectives issued, and the sizes of what has to stay."""
    assert dist.group.WORLD is not None
    values = [torch.arange(n, dtype=torch.float32) + 100 * rank for n in (4, 2, 6)]
    with CollectiveRecorder((1, world)) as recorder:
        arriving = scatter(values, dist.group.WORLD)
    return [wait(part).tolist() for part in arriving], recorder.issued, [value.numel() for value in values]


def complex_exchange(rank: int, world: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    own = [torch.complex(torch.arange(2.0) + rank, torch.full((2,), float(n))) for n in range(world)]
    whole = [wait(value) for value in gather(own, dist.group.WORLD)]
    return whole, [wait(value) for value in scatter(list(own), dist.group.WORLD)]


@pytest.mark.distributed
def test_complex_values_travel_as_pairs(ranks):
    """Gloo ends with "Invalid scalar type" where it is given complex numbers together; NCCL knows none."""
    for rank, (whole, parts) in enumerate(ranks.run(complex_exchange)):
        assert [v.tolist() for v in whole] == [
            [0 + n * 1j, 1 + n * 1j, 1 + n * 1j, 2 + n * 1j] for n in range(2)
        ]
        assert [v.tolist() for v in parts] == [[2 * rank + 1 + 2j * n] for n in range(2)]


@pytest.mark.distributed
def test_gloo_reduces_several_gradients_in_one_message(ranks):
    for rank, (parts, issued, stays) in enumerate(ranks.run(scattered)):
        want = [torch.arange(n, dtype=torch.float32) * 2 + 100 for n in (4, 2, 6)]
        assert parts == [value.chunk(2)[rank].tolist() for value in want]
        assert issued == [Collective("reduce_scatter", (1,), 12 * 4)]
        assert stays == [12]
