"""Sizes and offsets that an operator is given as arguments, rewritten from local shapes."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from tensoropt.sharding.local import LocalCall, Placed, localiser


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


@localiser("aten.repeat_interleave.self_int")
def _repeat_interleaved(placed: Placed, call: LocalCall) -> LocalCall:
    """How much comes out follows from what goes in; a size given beside it is the whole tensor's."""
    return replace(call, kwargs={k: v for k, v in call.kwargs.items() if k != "output_size"})


@localiser("aten.group_norm.default")
def _group_norm(placed: Placed, call: LocalCall) -> LocalCall:
    groups = call.args[1] // prod(placed.mesh[a] for a in placed.split(placed.loop_named("groups")))
    return replace(call, args=(call.args[0], groups, *call.args[2:]))


@localiser(*(f"aten.conv{d}d.{overload}" for d in (1, 2, 3) for overload in ("default", "padding")))
def _convolution(placed: Placed, call: LocalCall) -> LocalCall:
    return _fewer_groups(placed, call, 6, ("bias", "stride", "padding", "dilation"))


@localiser("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def _transposed_convolution(placed: Placed, call: LocalCall) -> LocalCall:
    return _fewer_groups(placed, call, 6, ("bias", "stride", "padding", "output_padding"))


def _fewer_groups(placed: Placed, call: LocalCall, position: int, names: tuple[str, ...]) -> LocalCall:
    """The call with its share of the groups; ``names`` are the arguments between weight and groups."""
    axes = placed.split(placed.loop_named("groups"))
    if not axes:
        return call
    groups = placed.argument(position, "groups", 1) // prod(placed.mesh[a] for a in axes)
    space = len(placed.atoms.graph.tensors[placed.op.inputs()[1]].shape) - 2
    defaults: dict[str, Any] = {"bias": None, "stride": [1] * space, "dilation": [1] * space}
    middle = [placed.argument(2 + i, n, defaults.get(n, [0] * space)) for i, n in enumerate(names)]
    return replace(call, args=(*call.args[:2], *middle, groups, *call.args[position + 1 :]), kwargs={})
