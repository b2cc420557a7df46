"""The computation of a placed operator: an fx graph of plain calls on tensors of one device.

``split`` operators cut a tensor along an atom, and ``join`` operators join its pieces.

Pieces are copies: a view would keep the whole tensor alive for as long as any piece of it is.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from tensoropt.engine.lower import add_call, add_function, add_results
from tensoropt.engine.runtime import Runtime
from tensoropt.graph import Operator
from tensoropt.ops.layouts import PARTIAL, REPLICATE, Atoms, chunk, local_shape
from tensoropt.ops.localise import localise
from tensoropt.ops.registry import evaluated
from tensoropt.placement.graph import PlacedOperator, Value
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.reshard.redistribute import EdgeSpec, redistribute, take_shard


@dataclass(frozen=True)
class Cut:
    """A way to cut a tensor.

    Attributes:
        atoms: the atom sizes of each dim.
        code: the atom, or ``PARTIAL`` for terms of a sum.
        count: the number of pieces.
    """

    atoms: Atoms
    code: int
    count: int

    @property
    def flat(self) -> tuple[int, ...]:
        """The whole tensor's shape by atoms."""
        return tuple(size for dim in self.atoms for size in dim)

    @property
    def whole(self) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return tuple(prod(dim) for dim in self.atoms)

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of a piece."""
        return local_shape(self.atoms, (self.code,), (self.count,), (index,))

    def piece(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Return a copy of one piece."""
        start, length = chunk(self.flat[self.code], self.count, index)
        # Atoms are factors of dims, so a cut along one is a slice of the tensor reshaped to its atoms.
        part = whole.reshape(self.flat).narrow(self.code, start, length)
        return part.clone(memory_format=torch.contiguous_format).view(self.shape(index))

    def put(self, whole: torch.Tensor, index: int, piece: torch.Tensor) -> None:
        """Overwrite one piece of a contiguous tensor."""
        start, length = chunk(self.flat[self.code], self.count, index)
        part = whole.view(self.flat).narrow(self.code, start, length)
        part.copy_(piece.reshape(part.shape))

    def joined(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole of all pieces, or the sum of all terms."""
        if self.code == PARTIAL:
            # The first addition makes a tensor of its own; later terms are added in place, and no input is
            # changed.
            total = pieces[0] + pieces[1]
            for piece in pieces[2:]:
                total.add_(piece)
            return total
        sizes = list(self.flat)
        shaped = []
        for index, piece in enumerate(pieces):
            sizes[self.code] = chunk(self.flat[self.code], self.count, index)[1]
            shaped.append(piece.reshape(sizes))
        return torch.cat(shaped, self.code).view(self.whole)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, cut: Cut) -> tuple[torch.Tensor, ...]:
        ctx.cut, ctx.dtype, ctx.device = cut, whole.dtype, whole.device
        return tuple(cut.piece(whole, i) for i in range(cut.count))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # type: ignore[override]
        cut: Cut = ctx.cut
        pieces = [
            # A piece that nobody read has no gradient, but the whole needs one everywhere.
            torch.zeros(cut.shape(i), dtype=ctx.dtype, device=ctx.device) if g is None else g
            for i, g in enumerate(gradients)
        ]
        return cut.joined(pieces), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cut: Cut, *pieces: torch.Tensor) -> torch.Tensor:
        ctx.cut = cut
        return cut.joined(pieces)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        cut: Cut = ctx.cut
        if cut.code == PARTIAL:
            # Every term of a sum has the gradient of the sum.
            return None, *(gradient for _ in range(cut.count))
        return None, *(cut.piece(gradient, i) for i in range(cut.count))


def split(cut: Cut, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return all pieces, differentiably."""
    result = _Split.apply(whole, cut)
    assert isinstance(result, tuple)
    return result


def join(cut: Cut, *pieces: torch.Tensor) -> torch.Tensor:
    """Return the whole of all pieces, differentiably."""
    return _Join.apply(cut, *pieces)


class _Piece:
    """The piece of an operator that runs in the running micro-batch; the
    :class:`~tensoropt.ops.kernels.ShardContext` of its kernels. Pieces do not communicate while they run.
    """

    def __init__(self, runtime: Runtime, op: PlacedOperator, device: torch.device):
        self.runtime, self.device = runtime, device
        self.mesh, self.index = op.mesh, op.index

    @property
    def place(self) -> tuple[int, ...]:
        return (self.runtime.micro_batch, self.index)

    @property
    def seed(self) -> int:
        return self.runtime.seed

    @property
    def step(self) -> int:
        return self.runtime.step

    def coordinate(self, axes: tuple[int, ...]) -> int:
        index = 0
        for axis in axes:
            index = index * self.mesh[axis] + self.place[axis]
        return index

    def all_reduce(self, value: torch.Tensor, axes: tuple[int, ...], op: str = "sum") -> torch.Tensor:
        assert self.mesh[1] == 1 or 1 not in axes, "a piece that reduces with others is never made"
        return value

    def total(self, name: str, value: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        """Return a count over the whole batch, taken before the step began."""
        if all(self.mesh[axis] == 1 for axis in axes):
            return value
        # Counted once per process, which may run several devices.
        return self.runtime.counts[name].to(value.device)


@dataclass(frozen=True)
class Body:
    """A placed operator's computation.

    Attributes:
        module: takes the values that it reads, its parameters, then the tensors of ``free`` that it reads;
        returns its values as a tuple. free: the inputs, constants and buffers that it takes whole. counts:
        whether it needs the counts of mean losses beforehand.
    """

    module: fx.GraphModule
    free: tuple[str, ...]
    counts: bool = False


def body_of(
    op: PlacedOperator,
    groups: GroupGraph,
    runtime: Runtime,
    device: torch.device,
    *,
    evaluating: bool = False,
) -> Body:
    """Return the computation of a placed operator on ``device``."""
    building = _Building(op, groups, runtime, device, evaluating)
    if op.kind == "variable":
        return building.variable()
    if op.kind in ("split", "join"):
        return building.copies()
    return building.calls()


class _Building:
    def __init__(
        self, op: PlacedOperator, groups: GroupGraph, runtime: Runtime, device: torch.device, evaluating: bool
    ):
        self.op, self.groups, self.runtime = op, groups, runtime
        self.device, self.evaluating = device, evaluating
        self.tensors = groups.atoms.graph.tensors
        self.atoms = groups.atoms.atoms
        self.context = _Piece(runtime, op, device)
        self.graph = fx.Graph()
        self.known: dict[str, fx.Node] = {}
        self.counts = False

    def _finish(self, results: list[fx.Node], free: tuple[str, ...] = ()) -> Body:
        self.graph.output(tuple(results))
        self.graph.lint()
        return Body(fx.GraphModule(torch.nn.Module(), self.graph, "PlacedBody"), free, self.counts)

    def _cut(self, value: Value, count: int) -> Cut:
        assert value.code is not None
        return Cut(self.atoms[value.tensor], value.code, count)

    # -- cutting, joining, handing out -------------------------------------------------------------

    def copies(self) -> Body:
        """Return the body of a cut or a join."""
        placeholders = [self.graph.placeholder(f"given_{i}") for i in range(len(self.op.reads))]
        if self.op.kind == "join":
            cut = self._cut(self.op.reads[0], self.op.count)
            return self._finish(
                [add_function(self.graph, functools.partial(join, cut), "join", tuple(placeholders))]
            )
        cut = self._cut(self.op.writes[0], self.op.count)
        pieces = add_function(self.graph, functools.partial(split, cut), "split", tuple(placeholders))
        return self._finish(
            [self.graph.call_function(operator.getitem, (pieces, v.index)) for v in self.op.writes]
        )

    def variable(self) -> Body:
        """Return the body of a variable, which hands out a parameter with several readers, whole or in
        pieces.
        """
        (name,) = self.op.parameters
        parameter = self.graph.placeholder("parameter")
        tensor = self.tensors[name]
        if tensor.master_dtype is not None:
            dtype = getattr(torch, tensor.dtype)
            parameter = self.graph.call_method("to", (parameter, dtype))
        pieces: dict[tuple[int, int], fx.Node] = {}
        results = []
        for value in self.op.writes:
            if value.code is None:
                results.append(parameter)
                continue
            key = (value.code, value.count)
            if key not in pieces:
                cut = self._cut(value, value.count)
                pieces[key] = add_function(self.graph, functools.partial(split, cut), "split", (parameter,))
            results.append(self.graph.call_function(operator.getitem, (pieces[key], value.index)))
        return self._finish(results)

    # -- groups and their pieces --------------------------------------------------------------------

    def calls(self) -> Body:
        """Return the body of a group, or of a piece of one."""
        op, group = self.op, self.op.group
        assert group is not None
        for number, value in enumerate(op.reads):
            self.known[value.tensor] = self.graph.placeholder(f"given_{number}")
        # Placeholders come in the order in which OperatorCall gives its arguments: values, parameters, free.
        for name in op.parameters:
            self.known[name] = self.graph.placeholder(name)
        free = {name: self.graph.placeholder(f"free_{i}") for i, name in enumerate(group.free)}
        for name in op.parameters:
            self.known[name] = self._cast(name, self.known[name])
        for name, node in free.items():
            self.known[name] = self._part(name, node)
        # A tensor without a value here is a term of a sum, see placement.graph's _read.
        for name in (*group.reads, *group.parameters, *group.shared):
            if name not in self.known:
                self.known[name] = self._zeros(name)
        for each in group.operators:
            self._call(each)
        return self._finish([self.known[v.tensor] for v in op.writes], tuple(group.free))

    def _cast(self, name: str, parameter: fx.Node) -> fx.Node:
        """Return a parameter as operators read it; backward repeats the cast of a master weight."""
        tensor = self.tensors[name]
        if tensor.master_dtype is None:
            return parameter
        whole = (REPLICATE,)
        dtype = getattr(torch, tensor.dtype)
        # The edge of a sharded plan on a mesh of one device: no collective, but the same cast, which
        # RegatheredParameters makes again in backward instead of keeping it.
        spec = EdgeSpec(name, self.atoms[name], (1,), whole, whole, (), (), parameter=True, dtype=dtype)
        return add_function(
            self.graph, functools.partial(redistribute, self.runtime, spec), "cast", (parameter,)
        )

    def _part(self, name: str, whole: fx.Node) -> fx.Node:
        """Return this piece's part of a tensor that every device has whole; constants are kept at reduced
        shape.
        """
        assert self.op.configuration is not None
        layout = self.op.configuration.layout(name)
        tensor = self.tensors[name]
        if self.op.mesh == (1, 1) and tensor.kind != "constant":
            return whole
        spec = EdgeSpec(name, self.atoms[name], self.op.mesh, layout, layout, (), ())
        return add_function(
            self.graph, functools.partial(take_shard, self.context, spec), "take_shard", (whole,)
        )

    def _zeros(self, name: str) -> fx.Node:
        """Return zeros in place of a term that the first piece adds."""
        tensor = self.tensors[name]
        dtype = getattr(torch, tensor.dtype)
        return self.graph.call_function(torch.zeros, (tensor.shape,), {"dtype": dtype, "device": self.device})

    def _call(self, each: Operator) -> None:
        assert self.op.configuration is not None
        placed = self.op.configuration.placed(each.name, self.groups.atoms, self.op.mesh, self.context.place)
        call = localise(placed)
        # A whole operator sees all targets and counts them itself.
        self.counts |= self.op.count > 1 and any(inner.count for inner in call.collectives)
        if self.evaluating:
            call = evaluated(each, call)
        node = add_call(self.graph, each, call, self.known.__getitem__, self.context, self.device)
        self.known |= add_results(self.graph, each, node)
