"""The overheads of a step beyond operators and collectives, on the device and on its host.

Copies around collectives, gradients' ways into buckets, edges, the optimizer's parameters, and autograd's
requests in recomputed regions. An edge in a step finds cold caches and takes two to four times as long as in
a loop, so on CPU ranks caches are flushed before each; a GPU's operators do not touch its host's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tensoropt.cluster import DeviceKind, host_seconds
from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE, Layout
from tensoropt.profiling.link_timing import collective_call
from tensoropt.profiling.optimizers import make_optimizer
from tensoropt.profiling.store import ProfileStore
from tensoropt.profiling.timers import DeviceTimer, Repeats, Span, WallTimer, counted, local_timer, repeated
from tensoropt.ranks.pool import RankPool
from tensoropt.sharding.regions import recomputed
from tensoropt.sharding.reshard.redistribute import AT_THE_USE, Ahead, EdgeSpec, Route, redistribute
from tensoropt.sharding.reshard.steps import COLLECTIVES, edge_steps

_PASSED, _ARRIVED, _ADDED, _NO_EDGE, _UNUSED = "passed", "arrived", "added", "no edge", "unused"
"""Figures besides directions with a step, which are named after its kind."""
_ROUNDS = 40  # an assumption
_FLUSHED_BYTES = 4 * 2**20
"""More than a core's second-level cache."""
_R, _P, _GRAD = REPLICATE, PARTIAL, PARTIAL_GRAD
_ALONE: tuple[tuple[Layout, Layout], ...] = (((_GRAD, _R), (1, _R)), ((_R, _R), (_P, _R)))
_TOGETHER: tuple[tuple[Layout, Layout], ...] = (
    ((_R, _P), (_R, _GRAD)),
    ((_R, 1), (_R, _GRAD)),
    ((_R, 1), (_R, 2)),
)
"""Layouts on (micro-batches, ranks) of edges with one step forward, and at most one backward."""


class EdgeSeconds(NamedTuple):
    """Seconds on one rank's device or host, without collectives and bytes.

    Attributes:
        by_kind: of an edge's direction, by the kind of its only step.
        pass_s: of a direction in which nothing moves.
        arrive_s: of a gradient copied to its bucket.
        add_s: of a gradient added to its bucket.
    """

    by_kind: dict[str, float]
    pass_s: float
    arrive_s: float
    add_s: float


@dataclass
class _RankContext:
    """This rank as :func:`redistribute` sees it, in the second of two micro-batches, on one axis."""

    mesh: tuple[int, int]
    place: tuple[int, int]
    micro_batch: int = 1
    routes: dict[object, Route] = field(default_factory=dict)
    unsharded: Mapping[str, torch.Tensor] = field(default_factory=dict)
    ahead: Ahead = AT_THE_USE

    def gathered(self, *_: object) -> None: ...

    def parts(self, axes: tuple[int, ...]) -> int:
        return prod(self.mesh[axis] for axis in axes)

    def coordinate(self, axes: tuple[int, ...]) -> int:
        (axis,) = axes
        return self.place[axis]

    def group(self, axes: tuple[int, ...]) -> dist.ProcessGroup | None:
        return dist.group.WORLD if axes == (1,) else None


@dataclass
class _Stamps:
    """Records spans of edges' directions, each after flushing the caches by ``memory``, if given."""

    timer: DeviceTimer
    memory: torch.Tensor | None
    spans: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    begun: Any = None

    def begin(self) -> None:
        if self.memory is not None:
            self.memory.add_(1)
        self.begun = self.timer.begin()

    def end(self, name: str) -> None:
        self.spans[name].append(self.timer.end(self.begun))


class _Before(torch.autograd.Function):
    """Begins the following edge in forward, and ends it in backward (the span ``back``)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stamps: _Stamps, back: str) -> torch.Tensor:
        ctx.stamps, ctx.back = stamps, back
        result = x.view_as(x)
        stamps.begin()
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.stamps.end(ctx.back)
        return grad, None, None


class _After(torch.autograd.Function):
    """Ends the preceding edge in forward (the span ``there``), and begins it in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stamps: _Stamps, there: str) -> torch.Tensor:
        stamps.end(there)
        ctx.stamps = stamps
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.stamps.begin()
        return grad, None, None


def _time_edges(rank: int, world_size: int, timer: DeviceTimer) -> tuple[EdgeSeconds, EdgeSeconds]:
    """Return the seconds of edges and of gradients' ways to buckets, on the device and its host (0 on
    CPUs).
    """
    device = timer.device
    # Two micro-batches, because edges along that axis are timed too.
    context = _RankContext((2, world_size), (1, rank))
    # Sizes that every split divides, with negligible bytes: the time of bytes is priced separately.
    atoms = (4, 8 * world_size, 16 * world_size)
    edges = [_edge(context, atoms, *ends) for ends in (*_ALONE, *(_TOGETHER if world_size > 1 else ()))]
    same = (_R, _R)
    edges.append(EdgeSpec("", tuple((n,) for n in atoms), context.mesh, same, same, (), ()))
    flushed = None if timer.host_apart else torch.zeros(_FLUSHED_BYTES, dtype=torch.uint8)
    stamps = _Stamps(timer, flushed)
    leaf = _leaf(stamps, device)
    inputs = [_shard(spec, context, device) for spec in edges]
    moved = 4 * prod(atoms) // world_size
    calls = {
        kind: collective_call(kind, dist.group.WORLD, world_size, 0, moved)
        for kind in (COLLECTIVES if world_size > 1 else ())
    }
    for number in range(_ROUNDS + 1):
        if number == 1:
            stamps.spans.clear()  # the first one computes routes
        for spec, x in zip(edges, inputs, strict=True):
            there, back = ((steps[0].kind if steps else _PASSED) for steps in (spec.forward, spec.backward))
            _go(partial(redistribute, context, spec), x, stamps, there, back, world_size)
        # Stamps without an edge between them; every figure contains this time.
        _go(lambda y: y, inputs[-1], stamps, _NO_EDGE, _NO_EDGE, world_size)
        _arrive(leaf, stamps)
        # A collective alone, also with flushed caches: the rest is the edge's own time.
        for kind, call in calls.items():
            dist.barrier()
            stamps.begin()
            call()
            stamps.end(f"only {kind}")
    timed = {name: counted(timer, spans) for name, spans in stamps.spans.items()}
    return _without_collectives(timed, calls, host=False), _without_collectives(timed, calls, host=True)


def _without_collectives(timed: Mapping[str, Repeats], calls: Iterable[str], *, host: bool) -> EdgeSeconds:
    """Return the edges' seconds on the device or host, with stamps and collectives subtracted."""
    seconds = {name: repeats.host_s if host else repeats.device_s for name, repeats in timed.items()}
    bare, _ = seconds.pop(_NO_EDGE), seconds.pop(_UNUSED)
    alone = {kind: (0.0 if host else 1.0) * seconds.pop(f"only {kind}") for kind in calls}
    by_kind = {kind: max(s - bare - alone.get(kind, 0.0), 0.0) for kind, s in seconds.items()}
    pass_s, arrive_s, add_s = (by_kind.pop(name) for name in (_PASSED, _ARRIVED, _ADDED))
    return EdgeSeconds(by_kind, pass_s, arrive_s, add_s)


def _edge(context: _RankContext, atoms: tuple[int, ...], source: Layout, target: Layout) -> EdgeSpec:
    forward, backward = edge_steps(atoms, context.mesh, source, target)
    return EdgeSpec("", tuple((n,) for n in atoms), context.mesh, source, target, forward, backward)


def _shard(spec: EdgeSpec, context: _RankContext, device: torch.device) -> torch.Tensor:
    sizes = [
        n // prod(context.mesh[axis] for axis, code in enumerate(spec.source) if code == atom)
        for atom, (n,) in enumerate(spec.atoms)
    ]
    return torch.randn(sizes, device=device, requires_grad=True)


def _leaf(stamps: _Stamps, device: torch.device) -> torch.Tensor:
    leaf, bucket = torch.randn(64, device=device, requires_grad=True), torch.zeros(64, device=device)

    @torch.no_grad()
    def arrived(leaf: torch.Tensor) -> None:
        # In the first micro-batch autograd has created a new gradient; in the second one it has added to the
        # bucket.
        added = leaf.grad is bucket
        if leaf.grad is not None and not added:
            bucket.copy_(leaf.grad)
            leaf.grad = bucket
        stamps.end(_ADDED if added else _ARRIVED)

    # The hook that the executor uses, so that its call is part of the figure.
    leaf.register_post_accumulate_grad_hook(arrived)
    return leaf


def _arrive(leaf: torch.Tensor, stamps: _Stamps) -> None:
    leaf.grad = None
    for _ in range(2):
        _After.apply(leaf, stamps, _UNUSED).sum().backward()


def _go(
    edge: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    stamps: _Stamps,
    there: str,
    back: str,
    world_size: int,
) -> None:
    if world_size > 1:
        dist.barrier()
    result = _After.apply(edge(_Before.apply(x, stamps, back)), stamps, there).sum()
    if world_size > 1:
        dist.barrier()
    result.backward()
    x.grad = None


_ELEMENTS = 1 << 22
"""Elements of timed copies and additions: 16 MiB, beyond any core's cache."""
_CHAIN, _PARAMETERS = 40, 64
"""Calls of the recomputed chain, and parameters of the optimizer, over which costs are averaged."""
_KEY = "upkeep-6"  # counts changes in the way of measuring
_ISSUE_COLD_S = 1e-4
"""Seconds of launching one edge on a CPU rank with cold caches, which data sheets lack."""
_LAUNCHES = 200


@dataclass(frozen=True)
class Overheads:
    """The seconds of the small items of a step, on a device or its host.

    Attributes:
        copy_s_per_byte, add_s_per_byte: local copies, and in-place additions.
        call_s: one direction of an edge of an unmeasured kind.
        again_s: per recomputed call, besides its second forward; on a GPU's host only.
        step_s: per parameter of the optimizer's step, besides elements.
        pass_s: one direction of an edge in which nothing moves.
        arrive_s, accumulate_s: a gradient copied, or added, into its bucket, besides bytes.
        step_kinds_s: one direction of an edge, by the kind of its only step.
        of_host: the same for a separate host; bytes cost it nothing.
    """

    copy_s_per_byte: float = 0.0
    add_s_per_byte: float = 0.0
    call_s: float = 0.0
    again_s: float = 0.0
    step_s: float = 0.0
    pass_s: float = 0.0
    arrive_s: float = 0.0
    accumulate_s: float = 0.0
    step_kinds_s: Mapping[str, float] = field(default_factory=dict)
    of_host: Overheads | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Overheads:
        host = record.get("of_host")
        return cls(**{**record, "of_host": None if host is None else cls.from_record(host)})

    @property
    def host(self) -> Overheads:
        """The host's seconds; 0 on CPUs."""
        return self.of_host or NO_OVERHEADS

    def issuing_s(self, kinds: Sequence[str]) -> float:
        """Return the seconds of one direction of an edge with these steps, besides bytes."""
        if not kinds:
            return 0.0
        own = (self.step_kinds_s.get(kind, self.call_s) - self.pass_s for kind in kinds)
        return self.pass_s + sum(max(s, 0.0) for s in own)  # a busy minute may reverse two figures

    def arrival_s(self, gradient_bytes: float, micro_batches: int = 1, *, copied: bool = True) -> float:
        """Return the seconds per micro-batch until a gradient is where it waits for the optimizer.

        Args:
            copied: the first micro-batch's gradient is copied to a bucket; later ones are added.
        """
        first = self.arrive_s + gradient_bytes * self.copy_s_per_byte if copied else 0.0
        other = self.accumulate_s + gradient_bytes * self.add_s_per_byte
        return (first + (micro_batches - 1) * other) / micro_batches


NO_OVERHEADS = Overheads()


def _time_overheads(rank: int, world_size: int, optimizer: str) -> dict[str, Any]:
    timer = local_timer()
    x, y = (torch.randn(_ELEMENTS, device=timer.device) for _ in range(2))
    meet = dist.barrier if world_size > 1 else lambda: None
    copies = repeated(timer, x.clone, 7, before=meet, warm_ups=timer.host_apart)
    additions = repeated(timer, lambda: x.add_(y), 7, before=meet, warm_ups=timer.host_apart)
    size = x.numel() * x.element_size()
    edges, of_host = _time_edges(rank, world_size, timer)
    step = _step(optimizer, timer)
    rates = copies.device_s / size, additions.device_s / size
    if not timer.host_apart:
        return asdict(_overheads(rates, edges, step.device_s, _again_s()))
    launch_s = _launch_s(timer)
    # On the device a gradient is one kernel among many, unlike the start of an edge.
    on_device = _overheads(rates, edges._replace(arrive_s=launch_s, add_s=launch_s), step.device_s, 0.0)
    # What PyTorch asks of saved tensors is Python, and takes the same time on any device.
    host = _overheads((0.0, 0.0), of_host, step.host_s, _again_s())
    return asdict(replace(on_device, of_host=host))


def _overheads(rates: tuple[float, float], edges: EdgeSeconds, step_s: float, again_s: float) -> Overheads:
    """Return one queue's overheads from copy and addition rates, edges, and a parameter's step."""
    return Overheads(
        *rates,
        call_s=edges.by_kind["slice"],  # kinds that were not measured count as a copy
        again_s=again_s,
        step_s=step_s / _PARAMETERS,
        pass_s=edges.pass_s,
        arrive_s=edges.arrive_s,
        accumulate_s=edges.add_s,
        step_kinds_s=edges.by_kind,
    )


def _launch_s(timer: DeviceTimer) -> float:
    parts = torch.zeros(_LAUNCHES, 16, device=timer.device).unbind()

    def copy_all() -> None:
        for part, other in zip(parts, reversed(parts), strict=True):
            part.copy_(other)

    return repeated(timer, copy_all, 5, warm_ups=2).device_s / _LAUNCHES


def _step(optimizer: str, timer: DeviceTimer) -> Repeats:
    parameters = [torch.randn(16, device=timer.device).requires_grad_() for _ in range(_PARAMETERS)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return repeated(timer, make_optimizer(optimizer, parameters).step, 15, warm_ups=1)


def _again_s() -> float:
    """Return a recomputed call's time beyond its forward, backward and second forward."""
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

    # A recomputed chain runs forward twice, the first time without autograd: that one is subtracted here.
    with torch.no_grad():
        forward = _host_s(lambda: chain(x))
    # Two calls per layer (product and tanh): _CHAIN counts calls, and there are half as many weights.
    return max(_host_s(again) - _host_s(plain) - forward, 0.0) / _CHAIN


def _host_s(run: Callable[[], object]) -> float:
    return repeated(WallTimer(), run, 15, warm_ups=1).device_s


def measure_overheads(pool: RankPool, store: ProfileStore, prefix: str, optimizer: str) -> Overheads:
    """Return the overheads of the slowest rank, from the store or measured."""
    stored = known_overheads(store, prefix, optimizer)
    if stored is not None:
        return stored

    # Twice, using the better of both: the first may run on ranks that have just started.
    found = _each([_slowest(pool.run(_time_overheads, optimizer)) for _ in range(2)], min)
    store.put(f"{prefix}/{_KEY}-{optimizer}", found)
    return Overheads.from_record(found)


def known_overheads(store: ProfileStore, prefix: str, optimizer: str) -> Overheads | None:
    """Return the stored overheads, or None."""
    record = store.get(f"{prefix}/{_KEY}-{optimizer}")
    return None if record is None else Overheads.from_record(record)


def data_sheet_overheads(device: DeviceKind) -> Overheads:
    """Return a device's overheads by its data sheet: a copy passes over bytes twice, an addition three
    times.
    """
    copy, add = 2 / device.memory_bandwidth, 3 / device.memory_bandwidth
    host = host_seconds(device.type)
    if host is None:
        # Half of the issuing time is an assumption: an edge in which nothing moves still passes autograd.
        # Another assumption is that only the bytes of an addition count.
        return Overheads(copy, add, _ISSUE_COLD_S, pass_s=_ISSUE_COLD_S / 2, arrive_s=_ISSUE_COLD_S)
    of_host = Overheads(
        call_s=host.edge_s,
        again_s=host.again_s,
        step_s=host.parameter_s,
        pass_s=host.pass_s,
        arrive_s=host.gradient_s,
        accumulate_s=host.gradient_s,
    )
    kernel_s = host.kernel_s
    return Overheads(copy, add, kernel_s, arrive_s=kernel_s, accumulate_s=kernel_s, of_host=of_host)


def slowest_overheads(kinds: Iterable[Overheads]) -> Overheads:
    """Return the largest of each figure, as ranks of several kinds wait for each other."""
    return Overheads.from_record(_slowest([asdict(kind) for kind in kinds]))


def _slowest(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return _each(records, max)


def _each(records: Sequence[Mapping[str, Any]], choose: Callable[[list[float]], float]) -> dict[str, Any]:
    """Return one record chosen figure by figure from several, nested ones included."""
    return {
        name: _each([r[name] for r in records], choose)
        if isinstance(value, Mapping)
        else (None if value is None else choose([r[name] for r in records]))
        for name, value in records[0].items()
    }
