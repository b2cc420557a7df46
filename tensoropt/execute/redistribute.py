"""Resharding as it runs: the steps of :mod:`tensoropt.sharding.resharding` on local tensors.

One autograd function per edge: forward issues the edge's forward steps, backward its backward steps.
DTensor's ``redistribute`` gives the same results for the combinations it can express (289 of 400 on a
2x2 mesh); it refuses "anything -> Partial", issues one all-reduce per axis where a flattened group
needs one, and costs about 100 us per edge, so the steps are issued directly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tensoropt.execute.runtime import Runtime
from tensoropt.sharding.placement import PARTIAL, Atoms, Layout, chunk, local_atoms, local_shape
from tensoropt.sharding.resharding import Step, gradient_placements, permuted_atoms, permuted_steps

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class EdgeSpec:
    """An edge as the executor needs it.

    Attributes:
        name: the tensor's name, for messages and hooks.
        atoms: global atom sizes per dim.
        mesh: axis sizes, micro-batches first.
        source, target: layouts.
        forward, backward: steps; backward empty when no gradient flows.
        parameter: the source is a stored parameter (its gathered form need not be kept for backward).
        dtype: what the source is cast to before it moves (the master weights of a parameter), or None; its
            gradient is cast back after it moved.
        back: where the gradient goes, if not to the source: the edge then starts from the held copy of a
            parameter (:mod:`tensoropt.execute.held`) and its gradient goes to the stored shard.
        order: how the tensor lies in memory (:func:`tensoropt.costs.workload.memory_orders`), None for the
            order of its dims. What arrives lies so too, so that kernels see the layout they were asked about.
    """

    name: str
    atoms: Atoms
    mesh: tuple[int, ...]
    source: Layout
    target: Layout
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    parameter: bool = False
    dtype: torch.dtype | None = None
    back: Layout | None = None
    order: tuple[int, ...] | None = None

    @property
    def made_again(self) -> bool:
        """Whether backward makes the result anew instead of keeping it."""
        gathered = any(step.kind == "all_gather" for step in self.forward)
        return self.parameter and (gathered or self.dtype is not None)


def run_steps(
    runtime: Runtime, value: torch.Tensor, spec: EdgeSpec, steps: tuple[Step, ...], start: Layout, end: Layout
) -> torch.Tensor:
    """Run ``steps`` on a shard lying as ``start`` and give it the local shape of ``end``.

    Layouts are one-directional here: sharding codes only matter, for the exact shard sizes.
    """
    if spec.order is not None:
        lying = _as_it_lies(spec, steps, start, end)
        return run_steps(runtime, value.permute(spec.order), *lying).permute(_inverse(spec.order))
    sizes, global_sizes = _sizes(spec.atoms, start, spec.mesh, runtime.place)
    value = value.reshape(sizes)
    current = list(start)
    for step in steps:
        value = _STEPS[step.kind](runtime, value, step, current, global_sizes, spec.mesh)
        for axis in step.axes:
            current[axis] = -1 if step.kind not in ("slice", "reduce_scatter", "all_to_all") else end[axis]
    return value.reshape(local_shape(spec.atoms, end, spec.mesh, runtime.place))


@lru_cache(maxsize=1 << 16)
def _as_it_lies(
    spec: EdgeSpec, steps: tuple[Step, ...], start: Layout, end: Layout
) -> tuple[EdgeSpec, tuple[Step, ...], Layout, Layout]:
    """The same edge for the tensor whose dims come in the order in which they lie in memory."""
    assert spec.order is not None
    places = permuted_atoms(spec.atoms, spec.order)

    def moved(layout: Layout) -> Layout:
        return tuple(places[code] if code >= 0 else code for code in layout)

    atoms = tuple(spec.atoms[d] for d in spec.order)
    seen = replace(spec, atoms=atoms, source=moved(spec.source), target=moved(spec.target), order=None)
    return seen, permuted_steps(steps, places), moved(start), moved(end)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(d) for d in range(len(order)))


@lru_cache(maxsize=1 << 16)
def _sizes(atoms: Atoms, layout: Layout, mesh: Sizes, place: Sizes) -> tuple[Sizes, Sizes]:
    """Of a shard's atoms, and of the whole tensor's."""
    own = local_atoms(atoms, layout, mesh, place)
    return tuple(size for dim in own for size in dim), tuple(size for dim in atoms for size in dim)


def _parts(step: Step, mesh: Sizes) -> int:
    return math.prod(mesh[a] for a in step.axes)


def _slice(runtime: Runtime, x: torch.Tensor, step: Step, *_: Any) -> torch.Tensor:
    mesh = runtime.mesh
    start, length = chunk(x.shape[step.atom], _parts(step, mesh), runtime.coordinate(step.axes))
    piece = x.narrow(step.atom, start, length)
    # A view would keep the whole tensor alive for as long as the piece is.
    return piece.clone(memory_format=torch.contiguous_format) if piece.numel() != x.numel() else piece


def _all_reduce(runtime: Runtime, x: torch.Tensor, step: Step, *_: Any) -> torch.Tensor:
    group = runtime.group(step.axes)
    x = x.clone(memory_format=torch.contiguous_format)
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def _sharded_size(step: Step, current: list[int], global_sizes: Sizes, mesh: Sizes) -> int:
    """Size of the step's atom before its axes cut it: what remains after the outer axes."""
    size = global_sizes[step.atom]
    for axis, code in enumerate(current):
        if code == step.atom and axis not in step.axes:
            size //= mesh[axis]
    return size


def _all_gather(
    runtime: Runtime, x: torch.Tensor, step: Step, current: list[int], sizes: Sizes, mesh: Sizes
) -> torch.Tensor:
    group, parts = runtime.group(step.axes), _parts(step, mesh)
    if group is None:
        return x
    whole = _sharded_size(step, current, sizes, mesh)
    shard = -(-whole // parts)
    shape = [shard if i == step.atom else n for i, n in enumerate(x.shape)]
    flat = x.new_empty(parts * math.prod(shape))
    gathered, sent = flat.view(parts, *shape), x.contiguous().flatten()
    if whole != parts * shard:  # sent from its place in the result: a padded copy would be one more
        own = gathered[runtime.coordinate(step.axes)]
        own.narrow(step.atom, 0, x.shape[step.atom]).copy_(x)
        own.narrow(step.atom, x.shape[step.atom], shard - x.shape[step.atom]).zero_()
        sent = own.flatten()
    dist.all_gather_into_tensor(flat, sent, group=group)
    if whole != parts * shard:
        pieces = [gathered[i].narrow(step.atom, 0, chunk(whole, parts, i)[1]) for i in range(parts)]
        return torch.cat(pieces, step.atom)
    joined = [whole_size(i, n, step.atom, whole) for i, n in enumerate(x.shape)]
    return _as_asked(gathered.movedim(0, step.atom).reshape(joined))


def _as_asked(x: torch.Tensor) -> torch.Tensor:
    """Pieces of size 1 are put together without a copy, but lie otherwise."""
    return x.contiguous()


def whole_size(index: int, size: int, atom: int, total: int) -> int:
    return total if index == atom else size


def _reduce_scatter(runtime: Runtime, x: torch.Tensor, step: Step, *_: Any) -> torch.Tensor:
    group, parts = runtime.group(step.axes), _parts(step, runtime.mesh)
    whole = x.shape[step.atom]
    shard = -(-whole // parts)
    if group is None:
        return x
    if whole != shard * parts:
        pieces = x.new_zeros([parts, *(shard if i == step.atom else n for i, n in enumerate(x.shape))])
        for i in range(parts):
            start, length = chunk(whole, parts, i)
            pieces[i].narrow(step.atom, 0, length).copy_(x.narrow(step.atom, start, length))
    else:
        pieces = x.unflatten(step.atom, (parts, shard)).movedim(step.atom, 0).contiguous()
    flat = x.new_empty(pieces[0].numel())
    dist.reduce_scatter_tensor(flat, pieces.flatten(), group=group)
    result = flat.view(pieces.shape[1:])
    length = chunk(whole, parts, runtime.coordinate(step.axes))[1]
    return result.narrow(step.atom, 0, length) if length != shard else result


def _all_to_all(runtime: Runtime, x: torch.Tensor, step: Step, *_: Any) -> torch.Tensor:
    """Atom ``step.atom`` becomes whole, ``step.target`` sharded; both divide evenly."""
    group, parts = runtime.group(step.axes), _parts(step, runtime.mesh)
    if group is None:
        return x
    pieces = x.unflatten(step.target, (parts, -1)).movedim(step.target, 0).contiguous()
    received = torch.empty_like(pieces).flatten()
    dist.all_to_all_single(received, pieces.flatten(), group=group)
    joined = received.view(pieces.shape).movedim(0, step.atom).flatten(step.atom, step.atom + 1)
    return _as_asked(joined)


def _mask(runtime: Runtime, x: torch.Tensor, step: Step, *_: Any) -> torch.Tensor:
    return x if runtime.coordinate(step.axes) == 0 else torch.zeros_like(x)


def _pad(
    runtime: Runtime, x: torch.Tensor, step: Step, current: list[int], sizes: Sizes, mesh: Sizes
) -> torch.Tensor:
    whole = _sharded_size(step, current, sizes, mesh)
    start, length = chunk(whole, _parts(step, mesh), runtime.coordinate(step.axes))
    result = x.new_zeros([whole if i == step.atom else n for i, n in enumerate(x.shape)])
    result.narrow(step.atom, start, length).copy_(x)
    return result


_STEPS = {
    "slice": _slice,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "mask": _mask,
    "pad": _pad,
}


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, runtime: Runtime, spec: EdgeSpec) -> torch.Tensor:
        ctx.runtime, ctx.spec, ctx.micro_batch, ctx.dtype = runtime, spec, runtime.micro_batch, x.dtype
        if spec.back is not None:
            return travel(runtime, runtime.held[spec.name], spec).detach()
        result = travel(runtime, x, spec)
        return result.view_as(result) if result is x else result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        spec = ctx.spec
        source, target = gradient_placements(spec.target), gradient_placements(spec.back or spec.source)
        ctx.runtime.micro_batch = ctx.micro_batch
        result = run_steps(ctx.runtime, grad, spec, spec.backward, source, target)
        return result.to(ctx.dtype), None, None


def travel(runtime: Runtime, x: torch.Tensor, spec: EdgeSpec) -> torch.Tensor:
    """``x`` cast and moved from ``spec.source`` to ``spec.target``, forward only."""
    value = x if spec.dtype is None else x.to(spec.dtype)
    return run_steps(runtime, value, spec, spec.forward, spec.source, spec.target)


def redistribute(runtime: Runtime, spec: EdgeSpec, x: torch.Tensor) -> torch.Tensor:
    """``x`` moved from ``spec.source`` to ``spec.target``, differentiably."""
    result = _Redistribute.apply(x, runtime, spec)
    if spec.made_again:
        runtime.gathered(result, x, spec)
    return result


class Standpoint(Protocol):
    """A coordinate on every axis."""

    @property
    def place(self) -> tuple[int, ...]: ...


def take_shard(runtime: Standpoint, spec: EdgeSpec, x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor every rank has whole (an input or a constant): a view of its shard, and
    zeros on all but the first coordinate of an axis that adds it up."""
    sizes = [size for dim in spec.atoms for size in dim]
    shape = [size for dim in spec.atoms for size in (math.prod(dim),)]
    x = x.expand(shape).reshape(sizes) if sizes else x
    for axis, code in enumerate(spec.target):
        if code >= 0 and spec.mesh[axis] > 1:
            start, length = chunk(x.shape[code], spec.mesh[axis], runtime.place[axis])
            x = x.narrow(code, start, length)
    summed = [a for a, code in enumerate(spec.target) if code == PARTIAL and spec.mesh[a] > 1]
    if any(runtime.place[axis] for axis in summed):
        x = torch.zeros_like(x)
    return x.reshape(local_shape(spec.atoms, spec.target, spec.mesh, runtime.place))
