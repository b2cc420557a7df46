"""The time of an edge beyond its collective, measured through the code that the executor runs.

Between two edges of a step, operators move more data than a core's own caches hold, so an edge finds neither
its code nor its tensors in the caches, and takes two to four times as long as in a loop of nothing else. Each
edge is therefore timed after other memory has been read and written, which flushes the caches. On a GPU it is
not, because the data of its operators never comes near the processor that issues them. There the host issues
an edge and the device runs its kernels; these are seconds of two queues.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE, Layout
from tensoropt.profiling.link_timing import collective_call
from tensoropt.profiling.timers import DeviceTimer, Repeats, Span, counted
from tensoropt.sharding.reshard.redistribute import AT_THE_USE, Ahead, EdgeSpec, Route, redistribute
from tensoropt.sharding.reshard.steps import COLLECTIVES, edge_steps

_PASSED, _ARRIVED, _ADDED, _NO_EDGE, _UNUSED = "passed", "arrived", "added", "no edge", "unused"
"""The figures timed in addition to directions with a step, which are named after the kind of that step."""
_ROUNDS = 40  # an assumption
_FLUSHED_BYTES = 4 * 2**20
"""More than a core's second-level cache holds."""
_R, _P, _GRAD = REPLICATE, PARTIAL, PARTIAL_GRAD
_ALONE: tuple[tuple[Layout, Layout], ...] = (((_GRAD, _R), (1, _R)), ((_R, _R), (_P, _R)))
_TOGETHER: tuple[tuple[Layout, Layout], ...] = (
    ((_R, _P), (_R, _GRAD)),
    ((_R, 1), (_R, _GRAD)),
    ((_R, 1), (_R, 2)),
)
"""Layouts on (micro-batches, ranks): edges with one step forward, and one or none backward."""


class EdgeSeconds(NamedTuple):
    """The seconds on one rank, of its device or of its host, without collectives and for a negligible number
    of bytes.

    Attributes:
        by_kind: of one direction of an edge, by the kind of its only step.
        pass_s: of a direction in which nothing moves.
        arrive_s: of a gradient that moves from autograd to its bucket.
        add_s: of a gradient that is added to its bucket.
    """

    by_kind: dict[str, float]
    pass_s: float
    arrive_s: float
    add_s: float


@dataclass
class _RankContext:
    """This rank as :func:`redistribute` sees it, in the second of two micro-batches.

    All ranks form one axis of the mesh.
    """

    mesh: tuple[int, int]
    place: tuple[int, int]
    micro_batch: int = 1
    routes: dict[object, Route] = field(default_factory=dict)
    unsharded: Mapping[str, torch.Tensor] = field(default_factory=dict)
    ahead: Ahead = AT_THE_USE

    def gathered(self, *_: object) -> None:
        """Do nothing, because no parameters are tracked while edges are timed."""

    def parts(self, axes: tuple[int, ...]) -> int:
        return prod(self.mesh[axis] for axis in axes)

    def coordinate(self, axes: tuple[int, ...]) -> int:
        (axis,) = axes
        return self.place[axis]

    def group(self, axes: tuple[int, ...]) -> dist.ProcessGroup | None:
        return dist.group.WORLD if axes == (1,) else None


@dataclass
class _Stamps:
    """Records spans of the directions of edges, each after the caches were flushed.

    Args:
        memory: the memory that is read and written for this; nothing is flushed if None.
    """

    timer: DeviceTimer
    memory: torch.Tensor | None
    spans: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    begun: Any = None

    def begin(self) -> None:
        if self.memory is not None:
            self.memory.add_(1)
        self.begun = self.timer.begin()

    def end(self, what: str) -> None:
        self.spans[what].append(self.timer.end(self.begun))


class _Before(torch.autograd.Function):
    """Begins the following edge in forward, and ends it in backward, where the span is called ``back``."""

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
    """Ends the preceding edge in forward, where the span is called ``there``, and begins it in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stamps: _Stamps, there: str) -> torch.Tensor:
        stamps.end(there)
        ctx.stamps = stamps
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.stamps.begin()
        return grad, None, None


def time_edges(rank: int, world_size: int, timer: DeviceTimer) -> tuple[EdgeSeconds, EdgeSeconds]:
    """The seconds of edges, and of gradients on their way to their buckets, on this rank's device and on its
    host (0 if they are the same).

    Runs in the pool, on all ranks at once.
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
    found = {what: counted(timer, spans) for what, spans in stamps.spans.items()}
    return _without_collectives(found, calls, host=False), _without_collectives(found, calls, host=True)


def _without_collectives(found: Mapping[str, Repeats], calls: Iterable[str], *, host: bool) -> EdgeSeconds:
    """The seconds of the device or of the host. Every figure contains the stamps themselves and the
    collectives: both are timed separately and subtracted; the host's time to issue a collective belongs to
    its edge."""
    usual = {
        what: statistics.median(repeats.host_s if host else repeats.device_s)
        for what, repeats in found.items()
    }
    bare, _ = usual.pop(_NO_EDGE), usual.pop(_UNUSED)
    alone = {kind: (0.0 if host else 1.0) * usual.pop(f"only {kind}") for kind in calls}
    by_kind = {kind: max(s - bare - alone.get(kind, 0.0), 0.0) for kind, s in usual.items()}
    pass_s, arrive_s, add_s = (by_kind.pop(what) for what in (_PASSED, _ARRIVED, _ADDED))
    return EdgeSeconds(by_kind, pass_s, arrive_s, add_s)


def _edge(context: _RankContext, atoms: tuple[int, ...], source: Layout, target: Layout) -> EdgeSpec:
    forward, backward = edge_steps(atoms, context.mesh, source, target)
    return EdgeSpec("", tuple((n,) for n in atoms), context.mesh, source, target, forward, backward)


def _shard(spec: EdgeSpec, context: _RankContext, device: torch.device) -> torch.Tensor:
    """This rank's shard of the tensor at the edge's source."""
    sizes = [
        n // prod(context.mesh[axis] for axis, code in enumerate(spec.source) if code == atom)
        for atom, (n,) in enumerate(spec.atoms)
    ]
    return torch.randn(sizes, device=device, requires_grad=True)


def _leaf(stamps: _Stamps, device: torch.device) -> torch.Tensor:
    """A parameter whose gradients are copied to a bucket."""
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
    """Let the gradients of two micro-batches arrive, one after the other."""
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
    """Move along an edge and back, with the ranks in step before each."""
    if world_size > 1:
        dist.barrier()
    result = _After.apply(edge(_Before.apply(x, stamps, back)), stamps, there).sum()
    if world_size > 1:
        dist.barrier()
    result.backward()
    x.grad = None
