"""Execution of resharding: the steps of :mod:`tensoropt.sharding.reshard.steps` on local tensors.

One autograd function per resharding (edge) issues the steps of forward and backward. DTensor's
``redistribute`` gives equal results for the 289 of 400 pairs of layouts on a 2x2 mesh that it supports. It
refuses "anything -> Partial", issues one all-reduce per axis, and takes about 100 us per edge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tensoropt.ops.layouts import PARTIAL, Atoms, Layout, chunk, local_atoms, local_shape
from tensoropt.sharding.reshard.steps import (
    ReshardingStep,
    gradient_placements,
    lies_inside,
    permuted_atoms,
    permuted_steps,
)


def as_sent(value: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor for collectives, complex numbers as pairs of real ones."""
    return torch.view_as_real(value.resolve_conj()).flatten() if value.is_complex() else value


def as_received(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of this dtype from flat received data, the inverse of :func:`as_sent`."""
    return torch.view_as_complex(value.view(-1, 2)) if dtype.is_complex else value


@dataclass(frozen=True)
class _AllReduce:
    group: dist.ProcessGroup | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # The reduction is done in place, and the producer of the input may still need it.
        x = x.clone(memory_format=torch.contiguous_format)
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def begin(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start reducing ``x`` in place; return a function that waits for the sum."""
        sent = x.contiguous()
        under_way = dist.all_reduce(sent, group=self.group, async_op=True)

        def wait() -> torch.Tensor:
            under_way.wait()
            return sent

        return wait


@dataclass(frozen=True)
class _ReduceScatter:
    """A reduce-scatter over a group of ranks, of a tensor viewed with every factor of a dim as its own dim.

    Attributes:
        atom: the index, in this view, of the dim that is scattered.
        parts, position: the number of pieces, and the index of this rank's piece.
        zigzag: whether a piece consists of two chunks, in zig-zag order (:mod:`tensoropt.sharding.zigzag`).
    """

    group: dist.ProcessGroup
    atom: int
    parts: int
    position: int
    zigzag: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        pieces = _pieces(x, self.atom, self.parts, zigzag=self.zigzag)
        flat = x.new_empty(pieces[0].numel())
        dist.reduce_scatter_tensor(as_sent(flat), as_sent(pieces.flatten()), group=self.group)
        return self._own(flat, pieces.shape[1:], x.shape[self.atom])

    def begin(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to reduce-scatter ``x``, which may be overwritten; return a function that waits for it."""
        size = x.shape[self.atom]
        # Not all of `x`, because it is not needed while the pieces are being sent.
        pieces = _pieces(x, self.atom, self.parts, zigzag=self.zigzag)
        flat = pieces.new_empty(pieces[0].numel())
        sent = as_sent(pieces.flatten())
        under_way = dist.reduce_scatter_tensor(as_sent(flat), sent, group=self.group, async_op=True)

        def wait() -> torch.Tensor:
            under_way.wait()
            return self._own(flat, pieces.shape[1:], size)

        return wait

    def _own(self, flat: torch.Tensor, shape: Sequence[int], size: int) -> torch.Tensor:
        result = flat.view(shape)
        length = chunk(size, self.parts, self.position)[1]
        return result.narrow(self.atom, 0, length) if length != shape[self.atom] else result


_Sizes = tuple[int, ...]


def _resized(sizes: Sequence[int], atom: int, size: int) -> _Sizes:
    return (*sizes[:atom], size, *sizes[atom + 1 :])


_Move = Callable[[torch.Tensor], torch.Tensor]
"""A function that applies one step of a resharding to this rank's shard, which is given as a view in which
every factor of a dim (atom) is a dim of its own."""


class Ahead:
    """The prefetching of parameters, and scattering of gradients one block later; this class does neither."""

    def take(self, spec: EdgeSpec) -> torch.Tensor | None:
        """Return a gathered parameter at its use; None if it must be gathered now."""
        return None

    def note(self, spec: EdgeSpec) -> None:
        """Record that backward will need a gathered parameter."""

    def take_again(self, spec: EdgeSpec) -> torch.Tensor | None:
        """Return a parameter gathered for backward after :meth:`note`; None if it must be gathered now."""
        return None

    def collect(self, spec: EdgeSpec, gradient: torch.Tensor) -> bool:
        """Take a parameter's gradient to scatter it with others; return False if it must be scattered now."""
        return False


AT_THE_USE = Ahead()


class _Standpoint(Protocol):
    @property
    def place(self) -> tuple[int, ...]: ...


class Rank(_Standpoint, Protocol):
    """The interface of the rank that executes a resharding.

    Attributes:
        micro_batch: the number of the current micro-batch, the rank's coordinate on axis 0.
        unsharded: parameter -> its copy, gathered once per step.
        gathered: a callback (result, source, edge) for gathered tensors that backward makes again.
        ahead: the prefetching of the current call.
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
    """A resharding (edge) as the executor needs it, compared by identity, so that lookups are fast.

    Attributes:
        atoms: global sizes of the atoms (factors) of each dim.
        mesh: axis sizes, micro-batches first.
        source, target: the layouts before and after.
        forward, backward: the steps of each direction; backward is empty without a gradient.
        parameter: whether the source is a stored parameter.
        dtype: the dtype to which the source is cast before it moves, or None; its gradient is cast back.
        back: the layout of the stored shard, to which the gradient is resharded, if ``source`` is the layout
            of a copy that was gathered once per step; None if the gradient is resharded to ``source``.
        order: the order of the dims in memory (:func:`tensoropt.profiling.workload.memory_orders`), which the
            result keeps as kernels were timed with it; None if contiguous.
        block: the block that prefetches the parameter or scatters its gradient, or None.
        behind: the block after whose backward the gradient is scattered with others; None if by itself.
        readers: the number of groups that take a prefetched parameter.
        zigzag: the numbers of the atoms that are cut in zig-zag order: of 2n chunks of equal size, rank r of
            n has the chunks r and 2n - 1 - r.
        gathered_again: whether backward reshards the activation again instead of having it saved.
    """

    name: str
    atoms: Atoms
    mesh: tuple[int, ...]
    source: Layout
    target: Layout
    forward: tuple[ReshardingStep, ...]
    backward: tuple[ReshardingStep, ...]
    parameter: bool = False
    dtype: torch.dtype | None = None
    back: Layout | None = None
    order: tuple[int, ...] | None = None
    block: int | None = None
    behind: int | None = None
    readers: int = 1
    zigzag: frozenset[int] = frozenset()
    gathered_again: bool = False

    def way(self, *, backward: bool) -> tuple[tuple[ReshardingStep, ...], Layout, Layout]:
        """Return the steps of forward or backward, and the layouts before and after, of which only the codes
        of shards are meaningful."""
        if not backward:
            return self.forward, self.source, self.target
        ends = self.target, self.back or self.source
        return self.backward, *map(gradient_placements, ends)  # type: ignore[return-value]

    def as_it_lies(self) -> EdgeSpec:
        """Return the same resharding for the tensor with its dims permuted to their order in memory."""
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
            zigzag=frozenset(places[atom] for atom in self.zigzag),
        )

    @property
    def made_again(self) -> bool:
        """Whether backward reshards the source again instead of having the result saved."""
        gathered = any(step.kind == "all_gather" for step in self.forward)
        return self.gathered_again or (self.parameter and (gathered or self.dtype is not None))


@dataclass(frozen=True)
class Route:
    """One direction of a resharding for one rank and micro-batch, computed once to be run in every step.

    Attributes:
        order, inverse: permutation of dims to memory order, and back; None if dims are in this order.
        sizes: the shape in which every factor (atom) of the incoming shard's dims is a dim of its own; None
            if each dim has exactly one factor.
        shape: the shape of the resulting shard; None if each dim has exactly one factor.
    """

    order: _Sizes | None
    inverse: _Sizes | None
    sizes: _Sizes | None
    moves: tuple[_Move, ...]
    shape: _Sizes | None

    def go(self, value: torch.Tensor) -> torch.Tensor:
        """Return a shard, or a gradient, after all operations of the route."""
        if not self.moves:
            return value
        value = self._entered(value)
        for move in self.moves:
            value = move(value)
        return self._left(value)

    def begin(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to reduce a gradient, which may be overwritten; return a function that waits for it."""
        (move,) = self.moves
        assert isinstance(move, _AllReduce | _ReduceScatter)
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
    """Return a shard after the forward steps of a resharding, or a gradient after the backward steps."""
    return _known_route(runtime, spec, backward=backward).go(value)


def begin_reduction(runtime: Rank, gradient: torch.Tensor, spec: EdgeSpec) -> Callable[[], torch.Tensor]:
    """Start to reduce a gradient, which may be overwritten; return a function that waits for it."""
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
    whole = _sizes(lying.atoms)
    dims_are_atoms = all(len(dim) == 1 for dim in lying.atoms)
    own = local_atoms(lying.atoms, start, spec.mesh, runtime.place)
    current, moves = list(start), []
    for step in steps:
        cut = _sharded_size(step, current, whole, spec.mesh)
        move = _MOVES[step.kind](runtime, step, cut, lying.zigzag)
        if move is not None:
            moves.append(move)
        for axis in step.axes:
            # These three shard along the axis as the end does; all other steps leave it unsharded.
            current[axis] = -1 if step.kind not in ("slice", "reduce_scatter", "all_to_all") else end[axis]
    return Route(
        spec.order,
        None if spec.order is None else tuple(spec.order.index(d) for d in range(len(spec.order))),
        None if dims_are_atoms else _sizes(own),
        tuple(moves),
        None if dims_are_atoms else local_shape(lying.atoms, end, spec.mesh, runtime.place),
    )


def _sharded_size(step: ReshardingStep, current: list[int], global_sizes: _Sizes, mesh: _Sizes) -> int:
    if step.atom < 0:
        return 0
    size = global_sizes[step.atom]
    for axis, code in enumerate(current):
        if code == step.atom and axis not in step.axes:
            # Exact: an atom that several axes cut is divisible by all of them (`fits` in configurations.py).
            size //= mesh[axis]
    return size


def _pieces(x: torch.Tensor, atom: int, parts: int, *, zigzag: bool = False) -> torch.Tensor:
    """Return all ranks' shards along dim ``atom`` as a contiguous tensor (parts, ...), padded to one size."""
    size = x.shape[atom]
    shard = -(-size // parts)
    if zigzag:
        return _zigzag_pieces(x, atom, parts)
    if size == shard * parts:
        return x.unflatten(atom, (parts, shard)).movedim(atom, 0).contiguous()
    pieces = x.new_zeros([parts, *_resized(x.shape, atom, shard)])
    for i, piece in enumerate(pieces):
        start, length = chunk(size, parts, i)
        piece.narrow(atom, 0, length).copy_(x.narrow(atom, start, length))
    return pieces


def _joined(pieces: torch.Tensor, atom: int, size: int, *, zigzag: bool = False) -> torch.Tensor:
    """Return the whole tensor, of ``size`` along dim ``atom``, from its shards: the inverse of
    :func:`_pieces`."""
    parts, shard = pieces.shape[0], pieces.shape[atom + 1]
    if zigzag:
        return _zigzag_joined(pieces, atom)
    if size == shard * parts:
        return pieces.movedim(0, atom).flatten(atom, atom + 1).contiguous()
    return torch.cat(
        [piece.narrow(atom, 0, chunk(size, parts, i)[1]) for i, piece in enumerate(pieces)], atom
    )


def _zigzag_shard(x: torch.Tensor, atom: int, parts: int, position: int) -> torch.Tensor:
    """Return, of ``2 * parts`` chunks along dim ``atom``, those of a rank in zig-zag order: ``position`` and
    ``2 * parts - 1 - position``. Dim ``atom`` becomes two: the chunks, and positions in a chunk."""
    chunks = x.unflatten(atom, (2 * parts, -1))
    pair = slice(position, 2 * parts - position, 2 * parts - 1 - 2 * position)
    return chunks[(slice(None),) * atom + (pair,)]


def _zigzag_pieces(x: torch.Tensor, atom: int, parts: int) -> torch.Tensor:
    pieces = x.new_empty([parts, *_resized(x.shape, atom, x.shape[atom] // parts)])
    for position, piece in enumerate(pieces):
        piece.unflatten(atom, (2, -1)).copy_(_zigzag_shard(x, atom, parts, position))
    return pieces


def _zigzag_joined(shards: torch.Tensor, atom: int) -> torch.Tensor:
    size = shards.shape[atom + 1] // 2
    first = [shard.narrow(atom, 0, size) for shard in shards]
    return torch.cat([*first, *(shard.narrow(atom, size, size) for shard in reversed(shards.unbind()))], atom)


def _slice(runtime: Rank, step: ReshardingStep, whole: int, zigzag: frozenset[int]) -> _Move:
    atom, parts, position = step.atom, runtime.parts(step.axes), runtime.coordinate(step.axes)

    def move(x: torch.Tensor) -> torch.Tensor:
        if atom in zigzag and parts > 1:
            pair = _zigzag_shard(x, atom, parts, position)
            return pair.clone(memory_format=torch.contiguous_format).flatten(atom, atom + 1)
        piece = x.narrow(atom, *chunk(x.shape[atom], parts, position))
        # A view would keep the whole tensor alive as long as the piece is alive.
        return piece.clone(memory_format=torch.contiguous_format) if piece.numel() != x.numel() else piece

    return move


def _all_reduce(runtime: Rank, step: ReshardingStep, whole: int, zigzag: frozenset[int]) -> _Move:
    return _AllReduce(runtime.group(step.axes))


def _all_gather(runtime: Rank, step: ReshardingStep, whole: int, zigzag: frozenset[int]) -> _Move | None:
    group, atom, parts = runtime.group(step.axes), step.atom, runtime.parts(step.axes)
    if group is None:
        return None
    # Collectives need pieces of one size: uneven shards are sent padded to the largest size.
    shard, position = -(-whole // parts), runtime.coordinate(step.axes)

    def move(x: torch.Tensor) -> torch.Tensor:
        shape = _resized(x.shape, atom, shard)
        flat = x.new_empty(parts * math.prod(shape))
        # The pieces arrive one after another, whichever atom they belong to, and are reassembled afterwards.
        gathered = flat.view(parts, *shape)
        if shard * parts == whole:
            own = x.contiguous()
        else:
            own = gathered[position]  # sent from its place in the result, which saves a padded copy
            own.narrow(atom, 0, x.shape[atom]).copy_(x)
            own.narrow(atom, x.shape[atom], shard - x.shape[atom]).zero_()
        dist.all_gather_into_tensor(flat, own.flatten(), group=group)
        del own  # perhaps a copy, which would be kept while the pieces are joined
        return _joined(gathered, atom, whole, zigzag=atom in zigzag)

    return move


def _reduce_scatter(runtime: Rank, step: ReshardingStep, whole: int, zigzag: frozenset[int]) -> _Move | None:
    group, position = runtime.group(step.axes), runtime.coordinate(step.axes)
    if group is None:
        return None
    return _ReduceScatter(group, step.atom, runtime.parts(step.axes), position, step.atom in zigzag)


def _all_to_all(runtime: Rank, step: ReshardingStep, whole: int, zigzag: frozenset[int]) -> _Move | None:
    """Return the all-to-all that gathers the atom (factor of a dim) ``step.atom`` and shards ``step.target``,
    both evenly."""
    group, atom, parts = runtime.group(step.axes), step.atom, runtime.parts(step.axes)
    target = step.target
    if group is None:
        return None

    def move(x: torch.Tensor) -> torch.Tensor:
        pieces = _pieces(x, target, parts, zigzag=target in zigzag)
        received = torch.empty_like(pieces).flatten()
        dist.all_to_all_single(received, pieces.flatten(), group=group)
        return _joined(received.view(pieces.shape), atom, whole, zigzag=atom in zigzag)

    return move


def _mask(runtime: Rank, step: ReshardingStep, whole: int, zigzag: frozenset[int]) -> _Move:
    # The sum over the axes is then the value itself. A copy also at coordinate 0: backward recognises by the
    # storage what it makes again, and all ranks must agree on it.
    return torch.clone if runtime.coordinate(step.axes) == 0 else torch.zeros_like


def _pad(runtime: Rank, step: ReshardingStep, whole: int, zigzag: frozenset[int]) -> _Move:
    atom, parts, position = step.atom, runtime.parts(step.axes), runtime.coordinate(step.axes)
    start = chunk(whole, parts, position)[0]

    def move(x: torch.Tensor) -> torch.Tensor:
        result = x.new_zeros(_resized(x.shape, atom, whole))
        if atom in zigzag and parts > 1:
            _zigzag_shard(result, atom, parts, position).copy_(x.unflatten(atom, (2, -1)))
            return result
        result.narrow(atom, start, x.shape[atom]).copy_(x)
        return result

    return move


_MOVES: dict[str, Callable[[Rank, ReshardingStep, int, frozenset[int]], _Move | None]] = {
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
        # A compiled module gathers at the use: a prefetched tensor belongs to one call, and would make the
        # compiler run again for each.
        ctx.ahead = None if spec.block is None or torch.compiler.is_compiling() else runtime.ahead
        if spec.back is not None:
            # `x` is the shard, which is passed so that autograd returns the gradient to it; the value is that
            # of the copy.
            return travel(runtime, runtime.unsharded[spec.name], spec).detach()
        gathered = ctx.ahead.take(spec) if ctx.ahead is not None else None
        result = travel(runtime, x, spec) if gathered is None else gathered
        # A function that returned its input unchanged would return the input tensor itself.
        return result.view_as(result) if result is x else result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        # A micro-batch's backward may run after the counter has moved on; its slices are those of its
        # forward.
        ctx.runtime.micro_batch = ctx.micro_batch
        if ctx.ahead is not None and ctx.spec.behind is not None and ctx.ahead.collect(ctx.spec, grad):
            return None, None, None
        return run_steps(ctx.runtime, grad, ctx.spec, backward=True).to(ctx.dtype), None, None


def travel(runtime: Rank, x: torch.Tensor, spec: EdgeSpec) -> torch.Tensor:
    """Return ``x`` cast and resharded from ``spec.source`` to ``spec.target``, without autograd."""
    value = x if spec.dtype is None else x.to(spec.dtype)
    return run_steps(runtime, value, spec)


def redistribute(runtime: Rank, spec: EdgeSpec, x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` resharded from ``spec.source`` to ``spec.target``, differentiably."""
    result = _Redistribute.apply(x, runtime, spec)
    if spec.made_again:
        runtime.gathered(result, x, spec)
    return result


def take_shard(runtime: _Standpoint, spec: EdgeSpec, x: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of an input or constant; of a partial sum, zeros except at coordinate 0."""
    sizes = _sizes(spec.atoms)
    # A folded constant is kept at size 1 where it does not change.
    x = x.expand([math.prod(dim) for dim in spec.atoms]).reshape(sizes) if sizes else x
    for axis, code in enumerate(spec.target):
        if code >= 0 and spec.mesh[axis] > 1:
            parts, position = spec.mesh[axis], runtime.place[axis]
            if code in spec.zigzag:
                x = _zigzag_shard(x, code, parts, position).flatten(code, code + 1)
            else:
                x = x.narrow(code, *chunk(x.shape[code], parts, position))
    summed = [a for a, code in enumerate(spec.target) if code == PARTIAL and spec.mesh[a] > 1]
    if any(runtime.place[axis] for axis in summed):
        x = torch.zeros_like(x)
    return x.reshape(local_shape(spec.atoms, spec.target, spec.mesh, runtime.place))


@dataclass(frozen=True)
class Packed:
    """One tensor's part in a collective that sends several tensors as flat data.

    Attributes:
        parts: the number of ranks.
        pack: a function from the shard or gradient to the data to send.
        unpack: a function from the received data to the result.
    """

    group: dist.ProcessGroup | None
    parts: int
    pack: _Move
    unpack: _Move


def packed_gather(runtime: Rank, spec: EdgeSpec) -> Packed:
    """Return a parameter's part in an all-gather of several parameters; small shards are padded."""
    (step,) = spec.forward
    ends = (spec.source, spec.target)
    own, whole = (_sizes(local_atoms(spec.atoms, end, spec.mesh, runtime.place)) for end in ends)
    shape = local_shape(spec.atoms, spec.target, spec.mesh, runtime.place)
    parts, atom = runtime.parts(step.axes), step.atom
    padded = _resized(own, atom, -(-whole[atom] // parts))

    def pack(x: torch.Tensor) -> torch.Tensor:
        x = x if spec.dtype is None else x.to(spec.dtype)
        return _padded(x.reshape(own), atom, padded[atom]).contiguous().flatten()

    def unpack(flat: torch.Tensor) -> torch.Tensor:
        if not lies_inside(padded, atom):
            # The padding comes after all the rest.
            return flat[: math.prod(whole)].view(shape)
        return _joined(flat.view(parts, *padded), atom, whole[atom]).view(shape)

    return Packed(runtime.group(step.axes), parts, pack, unpack)


def packed_scatter(runtime: Rank, spec: EdgeSpec) -> Packed:
    """Return a gradient's part in a reduce-scatter of several gradients; small shards are padded."""
    (step,) = spec.backward
    ends = (spec.target, spec.back or spec.source)
    whole, own = (_sizes(local_atoms(spec.atoms, end, spec.mesh, runtime.place)) for end in ends)
    shape = local_shape(spec.atoms, spec.back or spec.source, spec.mesh, runtime.place)
    parts, atom = runtime.parts(step.axes), step.atom
    padded = _resized(own, atom, -(-whole[atom] // parts))

    def pack(gradient: torch.Tensor) -> torch.Tensor:
        return _pieces(gradient.reshape(whole), atom, parts).flatten()

    def unpack(flat: torch.Tensor) -> torch.Tensor:
        return flat.view(padded).narrow(atom, 0, own[atom]).reshape(shape)

    return Packed(runtime.group(step.axes), parts, pack, unpack)


def _sizes(atoms: Atoms) -> _Sizes:
    return tuple(size for dim in atoms for size in dim)


def _padded(x: torch.Tensor, atom: int, size: int) -> torch.Tensor:
    if x.shape[atom] == size:
        return x
    result = x.new_empty(_resized(x.shape, atom, size))
    result.narrow(atom, 0, x.shape[atom]).copy_(x)
    result.narrow(atom, x.shape[atom], size - x.shape[atom]).zero_()
    return result
