"""Convolutions and transposed convolutions: batch, groups and channels may be split."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tensoropt.graph import Operator
from tensoropt.ops.calls import CostClass, LocalCall, OperatorShard, Precision, aten
from tensoropt.ops.index_space import Builder, Loops, Opaque, alike


def _is_transposed(op: Operator) -> bool:
    """Return whether weights are ``[in, out / groups, window...]``, not ``[out, in / groups, window...]``."""
    return "transpose" in op.target


@alike("stride padding output_padding dilation")
def _convolution(b: Builder) -> None:
    """Allow splits of the batch and of groups; with one group, of input and output channels instead."""
    transposed = _is_transposed(b.op)
    x, w, bias, groups = b.arg(0), b.arg(1), b.arg(2, "bias"), b.arg(6, "groups", 1)
    shape, weight = b.tensor(x).shape, b.tensor(w).shape
    if len(shape) != len(weight):
        raise Opaque(b.op.name)
    n, whole = b.loop("batch", shape[0]), groups == 1
    g = () if whole else (b.loop("groups", groups),)
    names = ("in_channels", "out_channels") if transposed else ("out_channels", "in_channels")
    first = b.loop(names[0], weight[0] // groups, splittable=whole)
    second = b.loop(names[1], weight[1], splittable=whole)
    i, o = (first, second) if transposed else (second, first)
    window: list[Loops] = [None] * (len(weight) - 2)
    b.read(x, [n, (*g, i), *window])
    b.read(w, [(*g, first), second, *window])
    b.read(bias, [(*g, o)], added=True)
    b.write([n, (*g, o), *window])


def _local_convolution(shard: OperatorShard, call: LocalCall) -> LocalCall:
    """Return the call of one shard, with the number of groups that the shard has."""
    if not shard.split(shard.loop_named("groups")):
        return call
    channels = shard.atoms.graph.tensors[shard.op.inputs()[0]].shape[1]
    groups = shard.argument(6, "groups", 1) * shard.read_shape(0)[1] // channels
    space = len(shard.atoms.graph.tensors[shard.op.inputs()[1]].shape) - 2
    defaults: dict[str, Any] = {"bias": None, "stride": [1] * space, "dilation": [1] * space}
    # All by position: some were given by keyword, some left at their default, and `groups` comes after them.
    names = ("bias", "stride", "padding", "output_padding" if _is_transposed(shard.op) else "dilation")
    middle = [shard.argument(2 + i, n, defaults.get(n, [0] * space)) for i, n in enumerate(names)]
    return replace(call, args=(*call.args[:2], *middle, groups, *call.args[7:]), kwargs={})


_convolutions = partial(aten, rule=_convolution, localiser=_local_convolution, precision=Precision.NARROW)

SPECS = (
    _convolutions(
        "conv1d.default conv1d.padding conv2d.default conv2d.padding conv3d.default conv3d.padding",
        without_rule=("convolution",),
        cost_class=CostClass.CONVOLUTION,
    ),
    _convolutions("conv_transpose2d.input", cost_class=CostClass.CONVOLUTION),
    _convolutions("conv_transpose1d.default conv_transpose3d.input"),
)
