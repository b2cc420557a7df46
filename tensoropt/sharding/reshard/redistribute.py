"""Resharding as it runs: the steps of :mod:`tensoropt.sharding.reshard.steps` on local tensors.

One autograd function per edge: forward issues the edge's forward steps, backward its backward steps.
DTensor's ``redistribute`` gives the same results for the combinations it can express (289 of 400 on a
2x2 mesh); it refuses "anything -> Partial", issues one all-reduce per axis where a flattened group
needs one, and costs about 100 us per edge, so the steps are issued directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tensoropt.ops.layouts import PARTIAL, Atoms, Layout, chunk, local_atoms, local_shape
from tensoropt.sharding.reshard.reductions import AllReduce, ReduceScatter, resized
from tensoropt.sharding.reshard.steps import Step, gradient_placements, permuted_atoms, permuted_steps

Sizes = tuple[int, ...]


Move = Callable[[torch.Tensor], torch.Tensor]
"""One step of a resharding on this rank's shard, in the tensor's atom view."""


class Ahead(Protocol):
    """Parameters that are gathered ahead, and gradients that are scattered behind backward."""

    def take(self, spec: EdgeSpec) -> torch.Tensor | None:
        """A parameter that was gathered, at its use; None where it has to be gathered now."""
        ...

    def note(self, spec: EdgeSpec) -> None:
        """Backward will ask for a parameter."""
        ...

    def take_again(self, spec: EdgeSpec) -> torch.Tensor | None:
        """A parameter that was gathered for backward, which noted that it would ask; None likewise."""
        ...

    def collect(self, spec: EdgeSpec, gradient: torch.Tensor) -> bool:
        """Take over the gradient of a use, to be scattered with others; False where that is to be done
        now."""
        ...


class AtTheUse:
    """Nothing is gathered ahead."""

    def take(self, spec: EdgeSpec) -> torch.Tensor | None:
        """Nothing is there."""
        return None

    def note(self, spec: EdgeSpec) -> None:
        """Nobody has to know."""

    take_again = take

    def collect(self, spec: EdgeSpec, gradient: torch.Tensor) -> bool:
        """Nothing is taken over."""
        return False


AT_THE_USE = AtTheUse()


class Standpoint(Protocol):
    """A coordinate on every axis."""

    @property
    def place(self) -> tuple[int, ...]: ...


class Rank(Standpoint, Protocol):
    """What an edge needs to know of the rank that it runs on.

    Attributes:
        micro_batch: the coordinate on axis 0, which changes in time.
        unsharded: parameters that are gathered once per step, by name.
        routes: worked out so far.
        gathered: told of each parameter that was made and which backward makes again.
        ahead: what is gathered ahead in the call that runs.
    """

    micro_batch: int
    routes: dict[object, Route]
    ahead: Ahead

    @property
    def gathered(self) -> Callable[..., None]: ...

    @property
    def unsharded(self) -> Mapping[str, torch.Tensor]: ...

    def coordinate(self, axes: tuple[int, ...]) -> int: ...

    def parts(self, axes: tuple[int, ...]) -> int: ...

    def group(self, axes: tuple[int, ...]) -> dist.ProcessGroup | None: ...


@dataclass(frozen=True, eq=False)
class EdgeSpec:
    """An edge as the executor needs it; each is itself only, so that what belongs to one is quickly found.

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
            parameter (:mod:`tensoropt.engine.unsharded`) and its gradient goes to the stored shard.
        order: how the tensor lies in memory (:func:`tensoropt.profiling.workload.memory_orders`), None for
        the order of its dims. What arrives lies so too, so that kernels see the layout they were asked about.
        block: the block that a parameter is gathered ahead for, or of a gradient that is scattered behind; or
            None.
        behind: the block whose backward has made the last of the gradients that are added up and scattered
            behind with this one; None where it goes its own way.
        readers: how many groups take what is gathered ahead.
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
    block: int | None = None
    behind: int | None = None
    readers: int = 1

    def way(self, *, backward: bool) -> tuple[tuple[Step, ...], Layout, Layout]:
        """Steps, start and end of one direction. Layouts are one-directional here: of their codes only those
        that shard matter, for the exact sizes of shards."""
        if not backward:
            return self.forward, self.source, self.target
        ends = self.target, self.back or self.source
        return self.backward, *map(gradient_placements, ends)  # type: ignore[return-value]

    def as_it_lies(self) -> EdgeSpec:
        """The same edge for the tensor whose dims come in the order in which they lie in memory."""
        if self.order is None:
            return self
        places = permuted_atoms(self.atoms, self.order)

        def moved(layout: Layout) -> Layout:
            return tuple(places[code] if code >= 0 else code for code in layout)

        return replace(
            self,
            atoms=tuple(self.atoms[d] for d in self.order),
            source=moved(self.source),
            target=moved(self.target),
            back=moved(self.back) if self.back is not None else None,
            forward=permuted_steps(self.forward, places),
            backward=permuted_steps(self.backward, places),
            order=None,
        )

    @property
    def made_again(self) -> bool:
        """Whether backward makes the result anew instead of keeping it."""
        gathered = any(step.kind == "all_gather" for step in self.forward)
        return self.parameter and (gathered or self.dtype is not None)


@dataclass(frozen=True)
class Route:
    """One direction of an edge as one rank goes it in one micro-batch.

    A step goes hundreds of edges, so what does not change from step to step is worked out once.

    Attributes:
        order, inverse: from the dims' order to that in which the tensor lies, and back; None where it is one.
        sizes: of the atoms of the shard that comes; None where each of its dims is one atom.
        moves: what happens to it.
        shape: of the shard that results; likewise.
    """

    order: Sizes | None
    inverse: Sizes | None
    sizes: Sizes | None
    moves: tuple[Move, ...]
    shape: Sizes | None

    def go(self, value: torch.Tensor) -> torch.Tensor:
        """A shard moved along the route, in the order of its dims again."""
        if not self.moves:
            return value
        value = self._entered(value)
        for move in self.moves:
            value = move(value)
        return self._left(value)

    def begin(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A gradient, which is given up, on its way along a route that is a single reduction.

        Returns:
            what waits for it, and gives what :meth:`go` would have given.
        """
        (move,) = self.moves
        assert isinstance(move, AllReduce | ReduceScatter)
        wait = move.begin(self._entered(value))
        return lambda: self._left(wait())

    def _entered(self, value: torch.Tensor) -> torch.Tensor:
        if self.order is not None:
            value = value.permute(self.order)
        return value if self.sizes is None else value.reshape(self.sizes)

    def _left(self, value: torch.Tensor) -> torch.Tensor:
        if self.shape is not None:
            value = value.reshape(self.shape)
        return value if self.inverse is None else value.permute(self.inverse)


def run_steps(runtime: Rank, value: torch.Tensor, spec: EdgeSpec, *, backward: bool = False) -> torch.Tensor:
    """A shard moved along an edge, or its gradient back."""
    return _known_route(runtime, spec, backward=backward).go(value)


def begin_reduction(runtime: Rank, gradient: torch.Tensor, spec: EdgeSpec) -> Callable[[], torch.Tensor]:
    """A gradient, which is given up, on its way back along an edge whose backward is a single reduction; what
    is returned waits for it."""
    return _known_route(runtime, spec, backward=True).begin(gradient)


def _known_route(runtime: Rank, spec: EdgeSpec, *, backward: bool) -> Route:
    key = spec, backward, runtime.micro_batch
    route = runtime.routes.get(key)
    if route is None:
        route = runtime.routes[key] = _route(runtime, spec, backward=backward)
    return route


def _route(runtime: Rank, spec: EdgeSpec, *, backward: bool) -> Route:
    lying = spec.as_it_lies()
    steps, start, end = lying.way(backward=backward)
    whole = tuple(size for dim in lying.atoms for size in dim)
    dims_are_atoms = all(len(dim) == 1 for dim in lying.atoms)
    own = local_atoms(lying.atoms, start, spec.mesh, runtime.place)
    current, moves = list(start), []
    for step in steps:
        move = _MOVES[step.kind](runtime, step, _sharded_size(step, current, whole, spec.mesh))
        if move is not None:
            moves.append(move)
        for axis in step.axes:
            # These three cut along the atom of the end; all others leave nothing cut along the axis.
            current[axis] = -1 if step.kind not in ("slice", "reduce_scatter", "all_to_all") else end[axis]
    return Route(
        spec.order,
        None if spec.order is None else tuple(spec.order.index(d) for d in range(len(spec.order))),
        None if dims_are_atoms else tuple(size for dim in own for size in dim),
        tuple(moves),
        None if dims_are_atoms else local_shape(lying.atoms, end, spec.mesh, runtime.place),
    )


def _sharded_size(step: Step, current: list[int], global_sizes: Sizes, mesh: Sizes) -> int:
    """Size of the step's atom before its axes cut it: what remains after the outer axes."""
    if step.atom < 0:
        return 0
    size = global_sizes[step.atom]
    for axis, code in enumerate(current):
        if code == step.atom and axis not in step.axes:
            # Exact: an atom that several axes cut divides by all of them (`fits` in configurations.py).
            size //= mesh[axis]
    return size


def _slice(runtime: Rank, step: Step, whole: int) -> Move:
    atom, parts, position = step.atom, runtime.parts(step.axes), runtime.coordinate(step.axes)

    def move(x: torch.Tensor) -> torch.Tensor:
        piece = x.narrow(atom, *chunk(x.shape[atom], parts, position))
        # A view would keep the whole tensor alive for as long as the piece is.
        return piece.clone(memory_format=torch.contiguous_format) if piece.numel() != x.numel() else piece

    return move


def _all_reduce(runtime: Rank, step: Step, whole: int) -> Move:
    return AllReduce(runtime.group(step.axes))


def _all_gather(runtime: Rank, step: Step, whole: int) -> Move | None:
    group, atom, parts = runtime.group(step.axes), step.atom, runtime.parts(step.axes)
    if group is None:
        return None
    # Collectives want pieces of one size: uneven shards travel padded to the largest.
    shard, position = -(-whole // parts), runtime.coordinate(step.axes)
    lengths = [chunk(whole, parts, i)[1] for i in range(parts)]

    def move(x: torch.Tensor) -> torch.Tensor:
        shape = resized(x, atom, shard)
        flat = x.new_empty(parts * math.prod(shape))
        # The pieces arrive one after the other, whichever atom they are of: they are put together afterwards.
        gathered = flat.view(parts, *shape)
        # `chunk` makes only the last pieces smaller: where the last is full, all are.
        if lengths[-1] == shard:
            dist.all_gather_into_tensor(flat, x.contiguous().flatten(), group=group)
            return as_asked(gathered.movedim(0, atom).reshape(resized(x, atom, whole)))
        own = gathered[position]  # sent from its place in the result: a padded copy would be one more
        own.narrow(atom, 0, x.shape[atom]).copy_(x)
        own.narrow(atom, x.shape[atom], shard - x.shape[atom]).zero_()
        dist.all_gather_into_tensor(flat, own.flatten(), group=group)
        return torch.cat([gathered[i].narrow(atom, 0, lengths[i]) for i in range(parts)], atom)

    return move


def as_asked(x: torch.Tensor) -> torch.Tensor:
    """Pieces of size 1 are put together without a copy, but lie otherwise."""
    return x.contiguous()


def _reduce_scatter(runtime: Rank, step: Step, whole: int) -> Move | None:
    group = runtime.group(step.axes)
    if group is None:
        return None
    return ReduceScatter(group, step.atom, runtime.parts(step.axes), runtime.coordinate(step.axes))


def _all_to_all(runtime: Rank, step: Step, whole: int) -> Move | None:
    """Atom ``step.atom`` becomes whole, ``step.target`` sharded; both divide evenly."""
    group, atom, parts = runtime.group(step.axes), step.atom, runtime.parts(step.axes)
    target = step.target
    if group is None:
        return None

    def move(x: torch.Tensor) -> torch.Tensor:
        pieces = x.unflatten(target, (parts, -1)).movedim(target, 0).contiguous()
        received = torch.empty_like(pieces).flatten()
        dist.all_to_all_single(received, pieces.flatten(), group=group)
        joined = received.view(pieces.shape).movedim(0, atom).flatten(atom, atom + 1)
        return as_asked(joined)

    return move


def _mask(runtime: Rank, step: Step, whole: int) -> Move | None:
    # The sum over the axes is then the value itself, whoever adds it up.
    return None if runtime.coordinate(step.axes) == 0 else torch.zeros_like


def _pad(runtime: Rank, step: Step, whole: int) -> Move:
    atom, start = step.atom, chunk(whole, runtime.parts(step.axes), runtime.coordinate(step.axes))[0]

    def move(x: torch.Tensor) -> torch.Tensor:
        result = x.new_zeros([whole if i == atom else n for i, n in enumerate(x.shape)])
        result.narrow(atom, start, x.shape[atom]).copy_(x)
        return result

    return move


_MOVES: dict[str, Callable[[Rank, Step, int], Move | None]] = {
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
    def forward(ctx: Any, x: torch.Tensor, runtime: Rank, spec: EdgeSpec) -> torch.Tensor:
        ctx.runtime, ctx.spec, ctx.micro_batch, ctx.dtype = runtime, spec, runtime.micro_batch, x.dtype
        # A compiled module gathers at the use: what is gathered ahead belongs to one call, for which it would
        # be compiled anew.
        ctx.ahead = None if spec.block is None or torch.compiler.is_compiling() else runtime.ahead
        if spec.back is not None:
            # `x` is the shard, there so that autograd brings the gradient to it; the value is that of the
            # copy.
            return travel(runtime, runtime.unsharded[spec.name], spec).detach()
        found = ctx.ahead.take(spec) if ctx.ahead is not None else None
        result = travel(runtime, x, spec) if found is None else found
        # A function that returned its input as it is would hand out the input itself.
        return result.view_as(result) if result is x else result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        # Backward of a micro-batch may run after the counter has moved on; its slices are those of its
        # forward.
        ctx.runtime.micro_batch = ctx.micro_batch
        if ctx.ahead is not None and ctx.spec.behind is not None and ctx.ahead.collect(ctx.spec, grad):
            return None, None, None
        return run_steps(ctx.runtime, grad, ctx.spec, backward=True).to(ctx.dtype), None, None


def travel(runtime: Rank, x: torch.Tensor, spec: EdgeSpec) -> torch.Tensor:
    """``x`` cast and moved from ``spec.source`` to ``spec.target``, forward only."""
    value = x if spec.dtype is None else x.to(spec.dtype)
    return run_steps(runtime, value, spec)


def redistribute(runtime: Rank, spec: EdgeSpec, x: torch.Tensor) -> torch.Tensor:
    """``x`` moved from ``spec.source`` to ``spec.target``, differentiably."""
    result = _Redistribute.apply(x, runtime, spec)
    if spec.made_again:
        runtime.gathered(result, x, spec)
    return result


def take_shard(runtime: Standpoint, spec: EdgeSpec, x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor every rank has whole (an input or a constant): a view of its shard, and
    zeros on all but the first coordinate of an axis that adds it up."""
    sizes = [size for dim in spec.atoms for size in dim]
    shape = [size for dim in spec.atoms for size in (math.prod(dim),)]
    # A folded constant is kept at size 1 where it does not change.
    x = x.expand(shape).reshape(sizes) if sizes else x
    for axis, code in enumerate(spec.target):
        if code >= 0 and spec.mesh[axis] > 1:
            start, length = chunk(x.shape[code], spec.mesh[axis], runtime.place[axis])
            x = x.narrow(code, start, length)
    summed = [a for a, code in enumerate(spec.target) if code == PARTIAL and spec.mesh[a] > 1]
    if any(runtime.place[axis] for axis in summed):
        x = torch.zeros_like(x)
    return x.reshape(local_shape(spec.atoms, spec.target, spec.mesh, runtime.place))
