"""Operator + choice per mesh axis -> the call that computes one shard.

Most operators run the same ATen call on smaller tensors. The others are here: sizes and offsets are
rewritten from local shapes, means divide by global counts, and what needs its neighbours or its
coordinate goes through :mod:`tensoropt.sharding.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import torch

from tensoropt.graph import DTYPE_BYTES, Operator, Ref, TorchLiteral, map_refs
from tensoropt.sharding import kernels
from tensoropt.sharding.atoms import AtomGraph
from tensoropt.sharding.groups import canonical
from tensoropt.sharding.index_space import IndexSpace, Operand, operand_placement
from tensoropt.sharding.placement import Layout, chunk, local_shape

MICRO_AXIS = 0
"""Axis 0 of every mesh here is the micro-batch loop: a split in time, without communication."""


@dataclass(frozen=True, slots=True)
class InnerCollective:
    """A collective issued inside a kernel."""

    kind: str
    axes: tuple[int, ...]
    bytes: int
    backward: bool = False


@dataclass(frozen=True)
class LocalCall:
    """One rank's call, as plain data: it can be hashed, sent to another process and run there.

    ``function`` names an ATen overload (``aten.linear.default``) or a kernel (``kernels.dropout``); a
    kernel is called as ``kernel(context, name, *static, *args, **kwargs)``. ``args``/``kwargs`` hold
    :class:`Ref` where local tensors go.
    """

    function: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str = ""
    static: tuple[Any, ...] = ()
    collectives: tuple[InnerCollective, ...] = field(default=())

    @property
    def is_kernel(self) -> bool:
        return self.function.startswith("kernels.")

    def bind(self, context: kernels.ShardContext) -> Callable[..., Any]:
        """The callable of ``(*args, **kwargs)`` alone."""
        function = resolve_function(self.function)
        if not self.is_kernel:
            return function
        head = (context, self.name, *self.static)

        def bound(*args: Any, **kwargs: Any) -> Any:
            return function(*head, *args, **kwargs)

        bound.__name__ = function.__name__
        return bound

    def arguments(self, tensors: Callable[[str], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with every :class:`Ref` replaced by ``tensors(name)`` and literals resolved."""
        args = tuple(literal(map_refs(a, tensors)) for a in self.args)
        return args, {k: literal(map_refs(v, tensors)) for k, v in self.kwargs.items()}


@cache
def resolve_function(name: str) -> Callable[..., Any]:
    """The ATen overload or kernel of this name."""
    if name.startswith("kernels."):
        return getattr(kernels, name.removeprefix("kernels."))
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def literal(value: Any) -> Any:
    """``value`` with torch literals resolved."""
    if isinstance(value, TorchLiteral):
        return getattr(torch, value.name)
    if isinstance(value, (list, tuple)):
        return type(value)(literal(item) for item in value)
    return value


@dataclass(frozen=True)
class Placed:
    """An operator with its choices, on a mesh, at a rank's coordinate (or the largest shard).

    Attributes:
        choices: per mesh axis (the micro-batch axis first) a loop dim or a negative code.
        mesh: sizes of all axes, the micro-batch count first.
    """

    op: Operator
    atoms: AtomGraph
    choices: tuple[int, ...]
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...] | None = None

    @property
    def space(self) -> IndexSpace:
        return self.atoms.spaces[self.op.name]

    def axes_of(self, loop: int) -> tuple[int, ...]:
        return tuple(a for a, c in enumerate(self.choices) if c == loop and self.mesh[a] > 1)

    def split(self, loops: Sequence[int]) -> tuple[int, ...]:
        """Axes that split any of these loops."""
        return tuple(sorted({a for loop in loops for a in self.axes_of(loop)}))

    def layout(self, operand: Operand, *, written: bool) -> Layout:
        tensor = self.atoms.graph.tensors[operand.tensor]
        return tuple(
            canonical(tensor, operand_placement(self.space, operand, choice, written=written))
            for choice in self.choices
        )

    def shape(self, operand: Operand, *, written: bool) -> tuple[int, ...]:
        layout = self.layout(operand, written=written)
        return local_shape(self.atoms.atoms[operand.tensor], layout, self.mesh, self.coordinate)

    def read_shape(self, index: int) -> tuple[int, ...]:
        return self.shape(self.space.reads[index], written=False)

    def write_shape(self, index: int = 0) -> tuple[int, ...]:
        return self.shape(self.space.writes[index], written=True)

    def loop_named(self, prefix: str) -> list[int]:
        return [
            i for i, d in enumerate(self.space.dims) if d.name == prefix or d.name.startswith(prefix + ".")
        ]

    def argument(self, index: int, name: str, default: Any) -> Any:
        if index < len(self.op.args):
            return self.op.args[index]
        return self.op.kwargs.get(name, default)


Localiser = Callable[[Placed, LocalCall], LocalCall]
_LOCALISERS: dict[str, Localiser] = {}


def localiser(*targets: str) -> Callable[[Localiser], Localiser]:
    def register(function: Localiser) -> Localiser:
        for target in targets:
            _LOCALISERS[target] = function
        return function

    return register


def localise(placed: Placed) -> LocalCall:
    """The call that computes this rank's shard of the operator."""
    op = placed.op
    base = LocalCall(op.target, op.args, op.kwargs, op.name)
    special = _LOCALISERS.get(op.target)
    return special(placed, base) if special is not None else base


# -- sizes ----------------------------------------------------------------------------------------


@localiser(
    "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.flatten.using_ints",
    "aten.unflatten.int", "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
    "aten.unsqueeze.default",
)  # fmt: skip
def _reshape(placed: Placed, call: LocalCall) -> LocalCall:
    shape = list(placed.write_shape())
    return LocalCall("aten.reshape.default", (call.args[0], shape), {}, call.name)


@localiser("aten.expand.default")
def _expand(placed: Placed, call: LocalCall) -> LocalCall:
    return replace(call, args=(call.args[0], list(placed.write_shape())), kwargs={})


@localiser("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default", "aten.split.sizes")
def _split(placed: Placed, call: LocalCall) -> LocalCall:
    shape = placed.read_shape(0)
    dim = placed.argument(2, "dim", 0) % len(shape)
    sizes = [placed.write_shape(i)[dim] for i in range(len(placed.op.outputs))]
    return LocalCall("aten.split_with_sizes.default", (call.args[0], sizes, dim), {}, call.name)


@localiser("aten.slice.Tensor")
def _slice(placed: Placed, call: LocalCall) -> LocalCall:
    whole = placed.atoms.graph.tensors[placed.op.inputs()[0]].shape
    dim = placed.argument(1, "dim", 0) % len(whole)
    local = placed.read_shape(0)[dim]
    if local == whole[dim]:
        return call
    start = placed.argument(2, "start", 0) or 0
    start = start + whole[dim] if start < 0 else start
    start = start * local // whole[dim]
    end = start + placed.write_shape()[dim]
    return replace(call, args=(call.args[0], dim, start, end, 1), kwargs={})


@localiser("aten.group_norm.default")
def _group_norm(placed: Placed, call: LocalCall) -> LocalCall:
    groups = call.args[1] // prod(placed.mesh[a] for a in placed.split(placed.loop_named("groups")))
    return replace(call, args=(call.args[0], groups, *call.args[2:]))


@localiser("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default")
def _convolution(placed: Placed, call: LocalCall) -> LocalCall:
    axes = placed.split(placed.loop_named("groups"))
    if not axes:
        return call
    groups = placed.argument(6, "groups", 1) // prod(placed.mesh[a] for a in axes)
    space = len(placed.atoms.graph.tensors[placed.op.inputs()[1]].shape) - 2
    defaults = [None, [1] * space, [0] * space, [1] * space]
    names = ("bias", "stride", "padding", "dilation")
    middle = [placed.argument(2 + i, name, defaults[i]) for i, name in enumerate(names)]
    return replace(call, args=(*call.args[:2], *middle, groups), kwargs={})


# -- reductions and losses ------------------------------------------------------------------------


def _reduced_loops(placed: Placed) -> list[int]:
    written = placed.space.writes[0].loops
    return [loop for loop in placed.space.reads[0].loops if loop not in written]


@localiser("aten.mean.default", "aten.mean.dim")
def _mean(placed: Placed, call: LocalCall) -> LocalCall:
    if not placed.split(_reduced_loops(placed)):
        return call
    graph = placed.atoms.graph
    count = graph.tensors[placed.op.inputs()[0]].elements // max(
        graph.tensors[placed.op.outputs[0]].elements, 1
    )
    total = "aten.sum.default" if placed.op.target == "aten.mean.default" else "aten.sum.dim_IntList"
    return replace(call, function="kernels.mean_as_sum", static=(total, count))


@localiser(
    "aten.mse_loss.default", "aten.l1_loss.default", "aten.smooth_l1_loss.default", "aten.huber_loss.default",
    "aten.binary_cross_entropy.default", "aten.binary_cross_entropy_with_logits.default",
)  # fmt: skip
def _elementwise_loss(placed: Placed, call: LocalCall) -> LocalCall:
    index = {"aten.binary_cross_entropy.default": 3, "aten.binary_cross_entropy_with_logits.default": 4}
    position = index.get(placed.op.target, 2)
    reduction = placed.argument(position, "reduction", 1)
    if reduction != 1 or not placed.split(list(placed.space.reads[0].loops)):
        return call
    count = placed.atoms.graph.tensors[placed.op.inputs()[0]].elements
    args = [*call.args[:position], *[None] * (position - len(call.args)), 2, *call.args[position + 1 :]]
    return replace(call, function="kernels.mean_as_sum", static=(call.function, count), args=tuple(args))


def _count_collective(placed: Placed, axes: tuple[int, ...]) -> tuple[InnerCollective, ...]:
    """Counting targets; with micro-batches the whole batch is counted beforehand, by every rank itself."""
    return (InnerCollective("all_reduce", axes, 8),) if axes and MICRO_AXIS not in axes else ()


@localiser("aten.cross_entropy_loss.default")
def _cross_entropy(placed: Placed, call: LocalCall) -> LocalCall:
    logits = placed.space.reads[0]
    classes = placed.loop_named("classes")
    class_axes = placed.split(classes)
    row_axes = placed.split([loop for loop in logits.loops if loop not in classes])
    if not class_axes and not row_axes:
        return call
    tensor = placed.atoms.graph.tensors[logits.tensor]
    step = chunk(tensor.shape[1], prod(placed.mesh[a] for a in class_axes), 0)[1]
    collectives: tuple[InnerCollective, ...] = ()
    if class_axes:
        row_bytes = placed.read_shape(0)[0] * tensor.element_bytes
        collectives = (
            InnerCollective("all_reduce", class_axes, row_bytes),
            InnerCollective("all_reduce", class_axes, 2 * row_bytes),
        )
    if placed.argument(3, "reduction", 1) == 1:
        collectives += _count_collective(placed, row_axes)
    static = (row_axes, class_axes, step)
    return LocalCall("kernels.cross_entropy", call.args, call.kwargs, call.name, static, collectives)


@localiser("aten.nll_loss_nd.default", "aten.nll_loss.default")
def _nll_loss(placed: Placed, call: LocalCall) -> LocalCall:
    row_axes = placed.split(list(placed.space.reads[1].loops))
    if not row_axes:
        return call
    counted = placed.argument(3, "reduction", 1) == 1
    collectives = _count_collective(placed, row_axes) if counted else ()
    return LocalCall("kernels.nll_loss", call.args, call.kwargs, call.name, (row_axes,), collectives)


@localiser("aten.embedding.default")
def _embedding(placed: Placed, call: LocalCall) -> LocalCall:
    axes = placed.split(placed.loop_named("vocabulary"))
    if not axes:
        return call
    vocabulary = placed.atoms.graph.tensors[placed.op.inputs()[0]].shape[0]
    step = chunk(vocabulary, prod(placed.mesh[a] for a in axes), 0)[1]
    return LocalCall("kernels.vocabulary_embedding", call.args[:3], {}, call.name, (axes, step))


@localiser("aten.index.Tensor")
def _index(placed: Placed, call: LocalCall) -> LocalCall:
    """Indices that count along a split loop are made relative to the shard."""
    source = placed.space.reads[0]
    refs = {p: value.name for p, value in enumerate(placed.op.args[1]) if isinstance(value, Ref)}
    counting = tuple(p for p in refs if placed.split(source.dims[p]))
    if not counting:
        return call
    return LocalCall("kernels.index_relative", call.args, {}, call.name, (counting,))


# -- dropout --------------------------------------------------------------------------------------


def _pieces(placed: Placed, operand: Operand, extra: Sequence[int] = ()) -> tuple[Any, ...]:
    """Per atom of an output (and of whole trailing dims): local size, global stride, step, axes."""
    atoms = [size for dim in placed.atoms.atoms[operand.tensor] for size in dim]
    layout = placed.layout(operand, written=True)
    sizes = [*atoms, *extra]
    pieces = []
    for position, size in enumerate(sizes):
        axes = tuple(a for a, c in enumerate(layout) if c == position and placed.mesh[a] > 1)
        parts = prod(placed.mesh[a] for a in axes)
        step = -(-size // parts)
        local = step
        if axes and placed.coordinate is not None:
            index = 0
            for a in axes:
                index = index * placed.mesh[a] + placed.coordinate[a]
            local = chunk(size, parts, index)[1]
        pieces.append((local, prod(sizes[position + 1 :]), step, axes))
    return tuple(pieces)


@localiser("aten.dropout.default")
def _dropout(placed: Placed, call: LocalCall) -> LocalCall:
    pieces = _pieces(placed, placed.space.writes[0])
    return LocalCall("kernels.dropout", call.args[:2], {}, call.name, (pieces,))


@localiser("aten.rand.default", "aten.randn.default", "aten.rand_like.default", "aten.randn_like.default")
def _random(placed: Placed, call: LocalCall) -> LocalCall:
    kind = "randn" if "randn" in placed.op.target else "rand"
    output = placed.space.writes[0]
    dtype = TorchLiteral(placed.atoms.graph.tensors[output.tensor].dtype)
    args = (kind, placed.write_shape(), dtype)
    return LocalCall("kernels.random", args, {}, call.name, (_pieces(placed, output),))


@localiser("aten.bernoulli.p", "aten.bernoulli.default")
def _bernoulli(placed: Placed, call: LocalCall) -> LocalCall:
    pieces = _pieces(placed, placed.space.writes[0])
    return LocalCall("kernels.bernoulli", call.args, {}, call.name, (pieces,))


@localiser("aten.scaled_dot_product_attention.default")
def _attention(placed: Placed, call: LocalCall) -> LocalCall:
    """Attention's own kernel, except with dropout: then the math form with a counter-based mask."""
    p = placed.argument(4, "dropout_p", 0.0)
    if p == 0.0:
        return call
    tensors = placed.atoms.graph.tensors
    keys = tensors[placed.op.inputs()[1]].shape[-2]
    output = placed.space.writes[0]
    # Weights are [..., heads, queries, keys]: the output's atoms without its last dim, then the keys.
    last = placed.atoms.atoms[output.tensor][-1]
    pieces = _pieces(placed, output)
    kept = pieces[: len(pieces) - len(last)]
    stride = prod(size for dim in placed.atoms.atoms[output.tensor][-1:] for size in dim)
    weights = (*((n, s // stride * keys, step, axes) for n, s, step, axes in kept), (keys, 1, keys, ()))
    mask = placed.argument(3, "attn_mask", None)
    args = (*call.args[:3], mask, p, placed.argument(5, "is_causal", False), placed.op.kwargs.get("scale"))
    return LocalCall("kernels.attention_with_dropout", args, {}, call.name, (weights,))


# -- batch norm -----------------------------------------------------------------------------------


@localiser("aten._native_batch_norm_legit_functional.default")
def _batch_norm(placed: Placed, call: LocalCall) -> LocalCall:
    axes = tuple(a for a in placed.split(placed.loop_named("batch")) if a != MICRO_AXIS)
    if not axes:
        return call
    x = placed.atoms.graph.tensors[placed.op.inputs()[0]]
    count = x.elements // x.shape[1]
    channels = placed.read_shape(0)[1] * max(x.element_bytes, DTYPE_BYTES["float32"])
    collectives = (
        InnerCollective("all_reduce", axes, channels),
        InnerCollective("all_reduce", axes, channels),
        InnerCollective("all_reduce", axes, 2 * channels, backward=True),
    )
    return LocalCall("kernels.sync_batch_norm", call.args, call.kwargs, call.name, (axes, count), collectives)
