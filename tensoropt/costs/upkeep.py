"""Upkeep: what a step spends beside operators and collectives.

Copies around collectives, the way of each gradient into its bucket, the fixed cost of issuing an edge and of
stepping a parameter, and what it takes that autograd asks for each tensor of a recomputed region: small per
item, but a plan with many edges and micro-batches has hundreds of them.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist

from tensoropt.cluster import DeviceKind
from tensoropt.costs.measure import make_optimizer
from tensoropt.costs.pool import RankPool
from tensoropt.costs.roofline import LAUNCH_S
from tensoropt.costs.stopwatch import Stopwatch, stopwatch_here
from tensoropt.costs.store import ProfileStore
from tensoropt.sharding.placement import chunk
from tensoropt.sharding.recomputing import recomputed

_ELEMENTS = 1 << 22
_CHAIN, _PARAMETERS = 40, 64
_KEY = "upkeep-5"  # counts how often the way of measuring changed
_ISSUE_S = 2e-5
"""Issuing one edge: Python, autograd and a launch. Data sheets do not say; a CPU rank takes about as long."""
_LAUNCHES = 200


@dataclass(frozen=True)
class Upkeep:
    """Seconds per byte of a local copy and of an in-place addition, per issued edge direction, per operator
    call of a recomputed region beside its second forward (on a GPU hidden behind its queue), per parameter of
    an optimizer's step beside its elements, per edge direction in which nothing moves; and per gradient that
    is copied into its bucket, and that is added there, beside its bytes."""

    copy_s_per_byte: float = 0.0
    add_s_per_byte: float = 0.0
    call_s: float = 0.0
    again_s: float = 0.0
    step_s: float = 0.0
    pass_s: float = 0.0
    arrive_s: float = 0.0
    accumulate_s: float = 0.0

    @classmethod
    def from_record(cls, record: Mapping[str, float]) -> Upkeep:
        """Of a record as of :func:`dataclasses.asdict`; in older ones a copy into a bucket took what an edge
        takes."""
        return cls(**{"arrive_s": record.get("call_s", 0.0), **record})

    def arrival_s(self, gradient_bytes: float, micro_batches: int = 1, *, copied: bool = True) -> float:
        """Seconds per micro-batch until a gradient is where it waits for the optimizer.

        Args:
            copied: the first micro-batch's is copied to a bucket, not left where autograd made it; those of
                the others are added.
        """
        first = self.arrive_s + gradient_bytes * self.copy_s_per_byte if copied else 0.0
        other = self.accumulate_s + gradient_bytes * self.add_s_per_byte
        return (first + (micro_batches - 1) * other) / micro_batches


Routes = dict[object, Callable[[torch.Tensor], torch.Tensor]]


class _Edge(torch.autograd.Function):
    """An edge without a collective, on a tensor that costs nothing to copy: each way its route is looked up
    and gone, as the executor does it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, routes: Routes, edge: object) -> torch.Tensor:
        ctx.routes, ctx.edge, ctx.micro_batch, ctx.dtype = routes, edge, 0, x.dtype
        result = routes[edge, False, 0](x)
        return result.view_as(result) if result is x else result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.routes[ctx.edge, True, ctx.micro_batch](grad).to(ctx.dtype), None, None


def _cut(x: torch.Tensor) -> torch.Tensor:
    return x.narrow(0, *chunk(x.shape[0], 1, 0)).clone(memory_format=torch.contiguous_format)


def _passed(x: torch.Tensor) -> torch.Tensor:
    return x


def time_upkeep(rank: int, world_size: int, optimizer: str) -> dict[str, float]:
    """Upkeep on this rank, all ranks at once (runs in the pool)."""
    watch = stopwatch_here()
    x, y = (torch.randn(_ELEMENTS, device=watch.device) for _ in range(2))
    spans = []
    for _ in range(7):
        if world_size > 1:
            dist.barrier()
        start = watch.mark()
        x.clone()
        middle = watch.mark()
        x.add_(y)
        spans += [(start, middle), (middle, watch.mark())]
    seconds = watch.seconds(spans)
    copies, additions = seconds[::2], seconds[1::2]
    size = x.numel() * x.element_size()
    on_cpu = watch.device.type == "cpu"
    call_s, pass_s = _edge_s(watch.device)
    launch_s = 0.0 if on_cpu else _launch_s(watch)
    return asdict(
        Upkeep(
            statistics.median(copies) / size,
            statistics.median(additions) / size,
            call_s,
            _again_s() if on_cpu else 0.0,
            _step_s(optimizer, watch.device),
            pass_s,
            call_s if on_cpu else launch_s,
            launch_s,
        )
    )


def _launch_s(watch: Stopwatch) -> float:
    """Seconds of a small copy among many, as a GPU's queue sees gradients come: a kernel each."""
    parts = torch.zeros(_LAUNCHES, 16, device=watch.device).unbind()
    spans = []
    for _ in range(5):
        start = watch.mark()
        for part, other in zip(parts, reversed(parts), strict=True):
            part.copy_(other)
        spans.append((start, watch.mark()))
    return statistics.median(watch.seconds(spans)) / _LAUNCHES


def _edge_s(device: torch.device) -> tuple[float, float]:
    """Seconds of one direction of an edge between operators, where it takes about twice as long as in a loop
    of nothing else: with a copy, and with nothing that moves. Issuing takes the processor's time on any
    device."""
    small = torch.randn(4, 64, requires_grad=True, device=device)
    kinds = [torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Softmax(-1)]
    layers = [kind.to(device) for kind in kinds] * _CHAIN
    routes: dict[str, Routes] = {
        way.__name__: {(edge, back, 0): way for edge in range(len(layers)) for back in (False, True)}
        for way in (_cut, _passed)
    }

    def run(way: str | None) -> None:
        value = small
        for number, layer in enumerate(layers):
            value = layer(value)
            if way is not None:
                value = _Edge.apply(value, routes[way], number)
        value.sum().backward()

    bare_s, cut_s, passed_s = (_usual_s(functools.partial(run, way)) for way in (None, *routes))
    cut_s, passed_s = (max(s - bare_s, 0.0) / (2 * len(layers)) for s in (cut_s, passed_s))
    return cut_s, min(passed_s, cut_s)


def _step_s(optimizer: str, device: torch.device) -> float:
    """Seconds of an optimizer's step per parameter, of parameters with next to no elements."""
    parameters = [torch.randn(16, device=device).requires_grad_() for _ in range(_PARAMETERS)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return _usual_s(make_optimizer(optimizer, parameters).step) / _PARAMETERS


def _again_s() -> float:
    """What a call more takes in a recomputed chain, second forward included, over what its forward and
    backward and one more forward take."""
    x = torch.randn(8, 16, requires_grad=True)
    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(_CHAIN // 2)]

    def chain(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x

    def plain() -> None:
        chain(x).sum().backward()

    def again() -> None:
        recomputed(chain, x).sum().backward()

    with torch.no_grad():
        forward = _usual_s(lambda: chain(x))
    return max(_usual_s(again) - _usual_s(plain) - forward, 0.0) / _CHAIN


def _usual_s(run: Callable[[], object], repeats: int = 15) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure_upkeep(pool: RankPool, store: ProfileStore, prefix: str, optimizer: str) -> Upkeep:
    """Upkeep of the slowest rank, from the store where it is known."""
    known = known_upkeep(store, prefix, optimizer)
    if known is not None:
        return known
    rounds = [
        pool.run(time_upkeep, optimizer) for _ in range(2)
    ]  # the first may find ranks that just started
    record = {name: min(max(r[name] for r in ranks) for ranks in rounds) for name in rounds[0][0]}
    store.put(f"{prefix}/{_KEY}-{optimizer}", record)
    return Upkeep.from_record(record)


def known_upkeep(store: ProfileStore, prefix: str, optimizer: str) -> Upkeep | None:
    """What was measured before."""
    record = store.get(f"{prefix}/{_KEY}-{optimizer}")
    return Upkeep.from_record(record) if record is not None else None


def data_sheet_upkeep(device: DeviceKind) -> Upkeep:
    """Upkeep from memory bandwidth: a copy reads and writes, an addition reads twice and writes.

    On a GPU a gradient's copy into its bucket, and the addition of another micro-batch's, are a kernel each,
    launched as those of operators are.
    """
    on_gpu = device.type == "cuda"
    return Upkeep(
        2 / device.memory_bandwidth,
        3 / device.memory_bandwidth,
        _ISSUE_S,
        pass_s=_ISSUE_S / 2,
        arrive_s=LAUNCH_S if on_gpu else _ISSUE_S,
        accumulate_s=LAUNCH_S if on_gpu else 0.0,
    )


def slowest_upkeep(kinds: Iterable[Upkeep]) -> Upkeep:
    """Of ranks that wait for each other."""
    rows = zip(*(astuple(kind) for kind in kinds), strict=True)
    return Upkeep(*(max(row) for row in rows))
