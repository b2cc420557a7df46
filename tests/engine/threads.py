"""All ranks of a mesh as threads of this process: the executor itself, without processes or sockets.

What crosses between ranks goes over a board with a barrier per group, so the collectives here are their
definitions. Ranks that issue different collectives, or different numbers of them, are an error.
"""

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensoropt.capture.steps import difference, largest_of, worst
from tensoropt.engine import gathering, gradients, runtime
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.parameters import shard_of
from tensoropt.engine.runtime import Runtime
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.reshard import redistribute
from tensoropt.sharding.strategy import Strategy
from tensoropt.verify.reference import outputs_difference

WAIT_S = 120.0


class Board:
    """Where the members of a group meet; one for every set of ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._barriers: dict[tuple[int, ...], threading.Barrier] = {}
        self._values: dict[tuple[tuple[int, ...], int], tuple[str, torch.Tensor]] = {}

    def barrier(self, members: tuple[int, ...]) -> threading.Barrier:
        with self._lock:
            return self._barriers.setdefault(members, threading.Barrier(len(members), timeout=WAIT_S))

    def abort(self) -> None:
        with self._lock:
            for barrier in self._barriers.values():
                barrier.abort()

    def exchange(
        self, members: tuple[int, ...], rank: int, kind: str, value: torch.Tensor
    ) -> list[torch.Tensor]:
        barrier = self.barrier(members)
        self._values[members, rank] = (f"{kind} of {tuple(value.shape)}", value.detach().clone())
        barrier.wait()
        found = [self._values[members, member] for member in members]
        barrier.wait()
        kinds = {kind for kind, _ in found}
        assert len(kinds) == 1, f"ranks {members} issue different collectives: {sorted(kinds)}"
        return [value for _, value in found]


class Group:
    """One rank's handle of a process group."""

    def __init__(self, board: Board, members: tuple[int, ...], rank: int):
        self.board, self.members, self.rank = board, members, rank

    @property
    def index(self) -> int:
        return self.members.index(self.rank)

    def exchange(self, kind: str, value: torch.Tensor) -> list[torch.Tensor]:
        return self.board.exchange(self.members, self.rank, kind, value)


def all_reduce(value: torch.Tensor, op: str = "sum", group: Any = None, async_op: bool = False) -> Any:
    values = torch.stack(group.exchange(f"all_reduce {op}", value))
    value.copy_(values.amax(0) if op == "max" else values.sum(0))
    return SimpleNamespace(wait=lambda: None) if async_op else None


def all_gather_into_tensor(out: torch.Tensor, value: torch.Tensor, group: Any) -> None:
    out.copy_(torch.cat([v.flatten() for v in group.exchange("all_gather", value)]).view(out.shape))


def reduce_scatter_tensor(out: torch.Tensor, value: torch.Tensor, group: Any, async_op: bool = False) -> Any:
    total = torch.stack(group.exchange("reduce_scatter", value)).sum(0)
    out.copy_(total.flatten().chunk(len(group.members))[group.index].view(out.shape))
    return SimpleNamespace(wait=lambda: None) if async_op else None


def all_to_all_single(out: torch.Tensor, value: torch.Tensor, group: Any) -> None:
    values = group.exchange("all_to_all", value)
    mine = [v.flatten().chunk(len(group.members))[group.index] for v in values]
    out.copy_(torch.cat(mine).view(out.shape))


def batch_isend_irecv(messages: Sequence[SimpleNamespace]) -> list[SimpleNamespace]:
    """Of messages that go around a ring: one to the next rank, one from the rank before."""
    sent, received = messages
    group = sent.group
    size = len(group.members)
    assert (sent.peer, received.peer) == ((group.index + 1) % size, (group.index - 1) % size)
    received.tensor.copy_(group.exchange("ring_send", sent.tensor)[received.peer])
    return [SimpleNamespace(wait=lambda: None)]


def gather_together(values: Sequence[torch.Tensor], group: Any) -> list[torch.Tensor]:
    return [torch.cat(group.exchange("all_gather", value)) for value in values]


def scatter_together(values: Sequence[torch.Tensor], group: Any) -> list[torch.Tensor]:
    sums = [torch.stack(group.exchange("reduce_scatter", value)).sum(0) for value in values]
    return [total.chunk(len(group.members))[group.index] for total in sums]


DIST = SimpleNamespace(
    all_reduce=all_reduce,
    all_gather_into_tensor=all_gather_into_tensor,
    reduce_scatter_tensor=reduce_scatter_tensor,
    all_to_all_single=all_to_all_single,
    isend="isend",
    irecv="irecv",
    P2POp=lambda op, tensor, group, tag, group_peer: SimpleNamespace(
        op=op, tensor=tensor, group=group, peer=group_peer
    ),
    batch_isend_irecv=batch_isend_irecv,
    ReduceOp=SimpleNamespace(MAX="max", SUM="sum"),
)


class ThreadRuntime(Runtime):
    """A rank's runtime whose groups are those of a :class:`Board`."""

    def __init__(self, mesh: Sequence[int], rank: int, board: Board, seed: int = 0):
        super().__init__((mesh[0],), rank=0, seed=seed)
        self.mesh, self.rank = tuple(mesh), rank
        places = list(itertools.product(*(range(n) for n in self.mesh[1:])))
        self.position = places[rank]
        axes = [a for a in range(1, len(self.mesh)) if self.mesh[a] > 1]
        self._groups: dict[tuple[int, ...], Any] = {}
        for count in range(1, len(axes) + 1):
            for subset in itertools.combinations(axes, count):
                (members,) = [part for part in self._partitions(subset) if rank in part]
                self._groups[subset] = Group(board, tuple(members), rank)


@contextmanager
def threaded_collectives() -> Iterator[None]:
    """The executor's collectives are those of this module."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (gradients, redistribute, runtime):
            patch.setattr(module, "dist", DIST)
        patch.setattr(gathering, "gather", gather_together)
        patch.setattr(gathering, "scatter", scatter_together)
        patch.setattr(gathering, "wait", lambda value: value)
        yield


def on_ranks(mesh: Sequence[int], work: Callable[[ThreadRuntime], Any], seed: int = 0) -> list[Any]:
    """``work(runtime)`` on every rank of the mesh; the first real error is raised."""
    board = Board()
    with threaded_collectives():
        return in_threads(
            math.prod(mesh[1:]), lambda rank: work(ThreadRuntime(mesh, rank, board, seed)), board.abort
        )


def in_threads(count: int, work: Callable[[int], Any], abort: Callable[[], None]) -> list[Any]:
    """``work(rank)`` in a thread each; the first real error is raised, and ``abort`` lets the others go."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
            abort()

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


def unsplit_engine(graph: GroupGraph, values: Mapping[str, torch.Tensor]) -> ShardedEngine:
    """The whole model on one rank."""
    return ShardedEngine(unsplit_strategy(graph), values, runtime=Runtime((1,), rank=0))


def step(engine: ShardedEngine, inputs: Sequence[torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients of the local shards) of one training step."""
    loss = engine(*inputs)[0]
    loss.backward()
    return float(loss.detach()), {n: g.clone() for n, g in engine.shards.gradients.items()}


def largest_differences(
    strategy: Strategy, values: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor],
    whole: tuple[float, Mapping[str, torch.Tensor]],
) -> tuple[float, float, str]:  # fmt: skip
    """How far a strategy's step is from the unsplit one's ``whole``: of the loss and of the gradients,
    both relative (a gradient to no less than a thousandth of the largest one), and the worst gradient.
    Buffers beside the gradients are compared as well, as the step leaves them."""
    loss, gradients = whole
    floor = 1e-3 * largest_of(gradients.values())

    def work(own: ThreadRuntime) -> tuple[float, dict[str, float]]:
        engine = ShardedEngine(strategy, values, runtime=own)
        found, pieces = step(engine, inputs)
        far = {}
        for name, piece in pieces.items():
            whole_one = gradients[name]
            want = shard_of(own, name, strategy.atoms(name), strategy.stored[name], whole_one)
            assert piece.shape == want.shape, (name, piece.shape, want.shape)
            far[name] = difference(piece, want, whole_one, floor)
        for name in engine.buffers.keys() & gradients.keys():
            far[name] = difference(engine.buffers[name], gradients[name], gradients[name], floor)
        return outputs_difference([torch.tensor(found)], [torch.tensor(loss)]), far

    ranks = on_ranks(strategy.mesh, work)
    gradient, name = max(worst(far) for _, far in ranks)
    return max(loss for loss, _ in ranks), gradient, name
