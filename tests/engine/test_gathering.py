"""Parameters gathered one block ahead: what is issued when, and numbers in calls of all kinds.

Parameters that several groups use, gathered together with others: what is issued when, and numbers.
"""

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
from tensoropt.sharding.strategy import Scattered
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


BOTH = [(stored, micro, 1) for stored in ("ahead", "held", "held/P") for micro in (1, 2)]


@pytest.mark.parametrize(
    ("loop", "stored", "micro", "copies"), each_loop([*BOTH, ("ahead", 1, 2), ("held/P", 2, 2)])
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


def scattered(rank, world):
    """What a rank gets of three values, the collectives issued, and the sizes of what has to stay."""
    assert dist.group.WORLD is not None
    values = [torch.arange(n, dtype=torch.float32) + 100 * rank for n in (4, 2, 6)]
    with CollectiveRecorder((1, world)) as recorder:
        arriving = scatter(values, dist.group.WORLD)
    return [wait(part).tolist() for part in arriving], recorder.issued, [value.numel() for value in values]


def complex_exchange(rank, world):
    own = [torch.complex(torch.arange(2.0) + rank, torch.full((2,), float(n))) for n in range(world)]
    whole = [wait(value) for value in gather(own, dist.group.WORLD)]
    return whole, [wait(value) for value in scatter(list(own), dist.group.WORLD)]


def test_complex_values_travel_as_pairs(ranks):
    """Gloo ends with "Invalid scalar type" where it is given complex numbers together; NCCL knows none."""
    for rank, (whole, parts) in enumerate(ranks.run(complex_exchange)):
        assert [v.tolist() for v in whole] == [
            [0 + n * 1j, 1 + n * 1j, 1 + n * 1j, 2 + n * 1j] for n in range(2)
        ]
        assert [v.tolist() for v in parts] == [[2 * rank + 1 + 2j * n] for n in range(2)]


def test_gloo_reduces_several_gradients_in_one_message(ranks):
    for rank, (parts, issued, stays) in enumerate(ranks.run(scattered)):
        want = [torch.arange(n, dtype=torch.float32) * 2 + 100 for n in (4, 2, 6)]
        assert parts == [value.chunk(2)[rank].tolist() for value in want]
        assert issued == [Collective("reduce_scatter", (1,), 12 * 4)]
        assert stays == [12]


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


OF_TIED = torch.randn(8, WIDTH)


def tied(batch: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model as a source, by name."""
    return Tied(), (torch.randn(batch, WIDTH),)


@functools.cache
def captured_tied(dtype: str = "float32") -> tuple[GroupGraph, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return captured_of(Tied(), OF_TIED, dtype=dtype)


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
    forward, backward = issued_by(data_parallel(graph, stored), values, OF_TIED)
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
    _, backward = issued_by(strategy, values, OF_TIED)
    sent = [(c.kind, c.axes) for c in backward if c.kind != GATHER]
    scatter, reduce = (SCATTER, (1,)), ("all_reduce", (2,))
    assert sent == [scatter, reduce, scatter, reduce, scatter, reduce, reduce]


@pytest.mark.parametrize(
    ("loop", "stored", "micro", "copies"), each_loop([*BOTH, ("ahead", 2, 2), ("held", 2, 2)])
)
def test_gradients_of_tied_parameters_are_those_of_the_unsplit_model(loop, stored, micro, copies):
    graph, values = captured_tied()
    check_gradients(data_parallel(graph, stored, micro, copies), values, OF_TIED, loop)


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
        usual(engine, OF_TIED)
        assert kept == []

    on_ranks((1, 2), work)
