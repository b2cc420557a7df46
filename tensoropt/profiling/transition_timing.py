"""The function that each rank runs to alternate work and collectives, as in a step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tensoropt.profiling.link_timing import collective_call

_LONG_S = 0.03
"""A longer collective is not timed in turns: coming from work adds a millisecond at most."""
LAYER_KINDS = 8
_ROWS, _WIDTH, _LAYERS = 32, 64, 96  # 6 MiB of parameters and their gradients


@dataclass(frozen=True)
class Turns:
    """Blocks of work alternating with collectives.

    Attributes:
        layers: the layers per block.
        size: bytes of the collective after each block; 0 for none, in which case blocks follow one another.
        blocks: the number that are timed, after one that is not.
    """

    layers: int
    size: int
    blocks: int


def time_transitions(
    rank: int, world_size: int, groups: Sequence[Sequence[int]], plan: Sequence[Turns], laps: int
) -> list[list[list[tuple[float, float, float]]]]:
    """Alternate work and all-reduces, each rank at its own pace, as in a step.

    Work is forward and backward of small layers of several kinds, always different ones, so that code and
    parameters are as cold as in a step. The machine's pace changes from second to second: a lap goes through
    the whole plan, and figures of one lap are compared.

    Returns:
        for each lap, each entry of the plan and each block: when its work began and ended, and when the
        collective after it ended; no blocks if the collective takes so long that turns do not matter.
    """
    import torch
    import torch.distributed as dist

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
        start = time.perf_counter()
        work(count)
        middle = time.perf_counter()
        action()
        return start, middle, time.perf_counter()

    try:
        group, ranks, first = handles[mine], len(groups[mine]), groups[mine][0]
        actions = {
            # ``int`` is a call that does nothing: blocks without a collective run the same code.
            size: collective_call("all_reduce", group, ranks, first, size) if size else int
            for size in dict.fromkeys(turn.size for turn in plan)
        }
        # _slowest gives all ranks the same number, so all of them leave out the same sizes.
        short = {size for size, action in actions.items() if _slowest(action) <= _LONG_S}
        found = []
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
            found.append(lap)
        return found
    finally:
        dist.destroy_process_group(handles[mine])


def _slowest(action: Callable[[], object]) -> float:
    """The seconds of an action on the rank where it takes longest, the same number on all ranks."""
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
    """Makers of small layers that differ from each other as a step's operators do; they preserve the
    shape."""
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

    def gate(x: torch.Tensor, one: Any, other: Any) -> torch.Tensor:
        return torch.tanh(one(x)) * torch.sigmoid(other(x))

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
