"""Functions that run on ranks when links are measured: collectives and messages between clock stamps."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensoropt.profiling.timers import local_timer
from tensoropt.ranks.worker import common_clock

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_WARM_UPS = 2  # one for sizes with few repeats, because these are long
_LAPS, _FEWEST_IN_A_LAP = 5, 10
"""The laps over which the repeats of a size are spread, and the fewest repeats per lap."""


class SizeStamps(NamedTuple):
    """The repeats of one size on one rank, in seconds.

    Attributes:
        starts, ends: from idle, on the common clock.
        in_stream: behind work on the device; NaN if the host was not ahead, None on CPUs.
    """

    starts: list[float]
    ends: list[float]
    in_stream: list[float]


_Stamps = list[SizeStamps]


def time_collective(
    rank: int,
    world_size: int,
    kind: str,
    groups: Sequence[Sequence[int]],
    plan: Sequence[tuple[int, int]],
) -> _Stamps:
    """Run one collective in this rank's group, all groups at once; sizes take turns in laps.

    Args:
        groups: a partition of all ranks.
        plan: ``(bytes, repeats)`` per size, as in :mod:`tensoropt.profiling.links`.
    """
    import torch.distributed as dist

    clock = common_clock()
    handles = [dist.new_group(list(group)) for group in groups]  # every rank creates every group
    mine = next(index for index, group in enumerate(groups) if rank in group)
    try:
        group, ranks, first = handles[mine], len(groups[mine]), groups[mine][0]
        meet = collective_call("all_reduce", group, ranks, first, 4 * ranks)
        stamps: _Stamps = [SizeStamps([], [], []) for _ in plan]
        for lap in range(_LAPS):
            for (size, repeats), (starts, ends, in_stream) in zip(plan, stamps, strict=True):
                laps = min(_LAPS, max(1, repeats // _FEWEST_IN_A_LAP))  # long ones need no more
                # The repeats of a size are spread evenly over its laps: lap, lap + laps, ...
                if turns := len(range(lap, repeats, laps)) if lap < laps else 0:
                    action = collective_call(kind, group, ranks, first, size)
                    begun, ended = _repeat(action, turns, clock)
                    starts += begun
                    ends += ended
                    in_stream += _in_stream(action, turns, meet)
        return stamps
    finally:
        dist.destroy_process_group(handles[mine])


def time_pair(rank: int, world_size: int, pair: Sequence[int], plan: Sequence[tuple[int, int]]) -> _Stamps:
    """Send a message from the first rank of the pair to the second and back; the others wait."""
    import torch
    import torch.distributed as dist

    clock, stamps = common_clock(), _Stamps()
    small = torch.zeros(1, device=_device())
    for size, repeats in plan:
        message = torch.zeros(max(1, size // 4), device=_device())

        def there_and_back(message: torch.Tensor = message) -> None:
            if rank == pair[0]:
                dist.send(message, pair[1])
                dist.recv(message, pair[1])
            elif rank == pair[1]:
                dist.recv(message, pair[0])
                dist.send(message, pair[0])

        def meet(there_and_back: Callable[..., None] = there_and_back) -> None:
            there_and_back(small)

        stamps.append(
            SizeStamps(*_repeat(there_and_back, repeats, clock), _in_stream(there_and_back, repeats, meet))
        )
    return stamps


def collective_call(kind: str, group: Any, ranks: int, first: int, size: int) -> Callable[[], object]:
    """Return a collective of ``size`` bytes among ``ranks``, with the source ``first`` if any."""
    import torch
    import torch.distributed as dist

    part = max(1, size // 4 // ranks)  # float32 elements of one rank's share
    whole = torch.zeros(part * ranks, device=_device())
    share = torch.zeros(part, device=_device())
    other = torch.empty_like(whole)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_single(whole, share, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(share, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, first, group=group),
    }
    return calls[kind]


def _repeat(
    action: Callable[[], object], repeats: int, clock: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Run an action several times, each after a barrier; return its starts and ends on the common clock."""
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available() and dist.get_backend() == "nccl"

    def synchronise() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    for _ in range(min(_WARM_UPS, repeats // 3)):
        action()
    starts, ends = [], []
    for _ in range(repeats):
        # Before the barrier, so that a GPU's queue is empty when the clock is read.
        synchronise()
        dist.barrier()
        starts.append(clock())
        action()
        synchronise()
        ends.append(clock())
    return starts, ends


def _in_stream(action: Callable[[], object], repeats: int, meet: Callable[[], object]) -> list[float]:
    """Return the seconds of an action behind work of the device, per repeat; none on CPUs.

    Args:
        meet: synchronises all ranks' devices, so that none waits for another in the action.
    """
    timer = local_timer()
    if not timer.host_apart:
        return []
    spans = []
    for _ in range(repeats + _WARM_UPS):  # from which the timer learns the lead that the host needs
        begun = timer.begin(first=meet)
        action()
        spans.append(timer.end(begun))
    spans = spans[_WARM_UPS:]
    return [s if span.ahead else math.nan for s, span in zip(timer.seconds(spans), spans, strict=True)]


def _device() -> str:
    import torch
    import torch.distributed as dist

    return f"cuda:{torch.cuda.current_device()}" if dist.get_backend() == "nccl" else "cpu"


_LONG_S = 0.03
"""A longer collective is not timed in turns, which add a millisecond at most."""
LAYER_KINDS = 8
_ROWS, _WIDTH, _LAYERS = 32, 64, 96  # 6 MiB of parameters and their gradients


@dataclass(frozen=True)
class Turns:
    """Blocks of work alternating with collectives.

    Attributes:
        layers: the layers per block.
        size: bytes of the collective after each block; 0 for none.
        blocks: the timed number, after a warm-up.
    """

    layers: int
    size: int
    blocks: int


def time_transitions(
    rank: int, world_size: int, groups: Sequence[Sequence[int]], plan: Sequence[Turns], laps: int
) -> list[list[list[tuple[float, float, float]]]]:
    """Alternate work and all-reduces, each rank at its own pace, as in a step.

    Work is forward and backward of always different small layers, so that code and parameters are cold. A lap
    goes through the whole plan.

    Returns:
        by lap, entry of the plan and block: start and end of work, end of the collective; no blocks if the
            collective
        is too long.
    """
    import torch
    import torch.distributed as dist

    clock = common_clock()
    handles = [dist.new_group(list(group)) for group in groups]
    mine = next(index for index, group in enumerate(groups) if rank in group)
    # More parameters than a core's own caches hold, used in turn across blocks: none is warm.
    layers = [kind() for kind, _ in zip(itertools.cycle(_kinds()), range(_LAYERS), strict=False)]
    inputs, turns = torch.randn(_ROWS, _WIDTH, requires_grad=True), itertools.cycle(layers)

    def work(count: int) -> None:
        hidden = inputs
        for layer in itertools.islice(turns, count):
            hidden = layer(hidden)
        if count:
            hidden.sum().backward()

    def block(count: int, action: Callable[[], object]) -> tuple[float, float, float]:
        start = clock()
        work(count)
        middle = clock()
        action()
        return start, middle, clock()

    try:
        group, ranks, first = handles[mine], len(groups[mine]), groups[mine][0]
        actions = {
            # ``int`` is a call that does nothing: blocks without a collective run the same code.
            size: collective_call("all_reduce", group, ranks, first, size) if size else int
            for size in dict.fromkeys(turn.size for turn in plan)
        }
        # _slowest gives all ranks the same number, so all of them leave out the same sizes.
        short = {size for size, action in actions.items() if _slowest(action) <= _LONG_S}
        laps_done = []
        for _ in range(laps):
            lap: list[list[tuple[float, float, float]]] = []
            for turn in plan:
                dist.barrier()
                action = actions[turn.size]
                if turn.size not in short:
                    lap.append([])
                    continue
                # One that is not timed: it leaves the caches as they are after this kind of turn.
                block(turn.layers, action)
                lap.append([block(turn.layers, action) for _ in range(turn.blocks)])
            laps_done.append(lap)
        return laps_done
    finally:
        dist.destroy_process_group(handles[mine])


def _slowest(action: Callable[[], object]) -> float:
    """Return the seconds of an action on the slowest rank."""
    import torch
    import torch.distributed as dist

    seconds = 0.0
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        action()
        seconds = time.perf_counter() - start
    longest = torch.tensor(seconds)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def _kinds() -> list[Callable[[], Any]]:
    """Return makers of different small layers that preserve the shape."""
    import torch
    from torch.nn import functional

    class Layer(torch.nn.Module):
        def __init__(self, function: Callable[..., torch.Tensor], *parts: torch.nn.Module):
            super().__init__()
            self.function, self.parts = function, torch.nn.ModuleList(parts)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.function(x, *self.parts)

    def attention(x: torch.Tensor, project: Any) -> torch.Tensor:
        q, k, v = project(x).view(1, _ROWS, 3, 4, -1).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)

    def feed(x: torch.Tensor, up: Any, down: Any) -> torch.Tensor:
        return down(functional.gelu(up(x)))

    def gate(x: torch.Tensor, first: Any, second: Any) -> torch.Tensor:
        return torch.tanh(first(x)) * torch.sigmoid(second(x))

    def lookup(x: torch.Tensor, table: Any) -> torch.Tensor:
        return x + table(places)

    def swap(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([piece.contiguous() for piece in x.chunk(2, 1)][::-1], 1)

    def along_rows(x: torch.Tensor, convolution: Any) -> torch.Tensor:
        return functional.relu(convolution(x.t()[None])[0].t())

    linear, places = torch.nn.Linear, torch.arange(_ROWS)
    return [
        lambda: torch.nn.LayerNorm(_WIDTH),
        lambda: Layer(attention, linear(_WIDTH, 3 * _WIDTH)),
        lambda: Layer(gate, linear(_WIDTH, _WIDTH), linear(_WIDTH, _WIDTH)),
        lambda: Layer(feed, linear(_WIDTH, 2 * _WIDTH), linear(2 * _WIDTH, _WIDTH)),
        lambda: Layer(lookup, torch.nn.Embedding(_ROWS, _WIDTH)),
        lambda: torch.nn.Softmax(-1),
        lambda: Layer(swap),
        lambda: Layer(along_rows, torch.nn.Conv1d(_WIDTH, _WIDTH, 3, padding=1)),
    ]
