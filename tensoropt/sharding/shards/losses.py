"""Reductions and losses: means divide by global counts, classes may be split."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from tensoropt.graph import FLOATING
from tensoropt.sharding.local import (
    MICRO_AXIS,
    InnerCollective,
    LocalCall,
    Placed,
    localiser,
    resolve_function,
)
from tensoropt.sharding.loss_kernels import MEAN
from tensoropt.sharding.placement import chunk
from tensoropt.sharding.rules.lookup import REDUCTION


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


@localiser(*REDUCTION)
def _elementwise_loss(placed: Placed, call: LocalCall) -> LocalCall:
    position = REDUCTION[placed.op.target]
    if placed.argument(position, "reduction", 1) != 1 or not placed.split(list(placed.space.reads[0].loops)):
        return call
    count = placed.atoms.graph.tensors[placed.op.inputs()[0]].elements
    return _summed(call, position, count)


def _summed(call: LocalCall, position: int, count: int) -> LocalCall:
    """A mean as the sum over ``count`` of all ranks; the reduction is the argument at ``position``."""
    args = [*call.args[:position], *[None] * (position - len(call.args)), 2, *call.args[position + 1 :]]
    function: Any = resolve_function(call.function)
    arguments = function._schema.arguments
    for index in range(len(call.args), position):
        given = arguments[index]
        args[index] = call.kwargs.get(given.name, given.default_value)
    names = {a.name for a in arguments[: position + 1]}
    kwargs = {k: v for k, v in call.kwargs.items() if k not in names}
    return replace(
        call,
        function="kernels.mean_as_sum",
        static=(call.function, count),
        args=tuple(args),
        kwargs=kwargs,
    )


def _mass_collective(placed: Placed, axes: tuple[int, ...]) -> tuple[InnerCollective, ...]:
    """Counting targets, or adding up their weights, for a mean; with micro-batches every rank does that
    beforehand for the whole batch."""
    if placed.argument(3, "reduction", MEAN) != MEAN or not axes or MICRO_AXIS in axes:
        return ()
    weight = placed.argument(2, "weight", None)
    size = 8 if weight is None else placed.atoms.graph.tensors[weight.name].element_bytes
    return (InnerCollective("all_reduce", axes, size, count=True),)


@localiser("aten.cross_entropy_loss.default")
def _cross_entropy(placed: Placed, call: LocalCall) -> LocalCall:
    logits = placed.space.reads[0]
    classes = placed.loop_named("classes")
    class_axes = placed.split(classes)
    row_axes = placed.split([loop for loop in logits.loops if loop not in classes])
    if not class_axes and not row_axes:
        return call
    target = placed.atoms.graph.tensors[placed.space.reads[1].tensor]
    if target.dtype in FLOATING:
        rows = target.elements // target.shape[1]
        return _summed(call, 3, rows) if placed.argument(3, "reduction", MEAN) == MEAN else call
    tensor = placed.atoms.graph.tensors[logits.tensor]
    step = chunk(tensor.shape[1], prod(placed.mesh[a] for a in class_axes), 0)[1]
    collectives: tuple[InnerCollective, ...] = ()
    if class_axes:
        rows = prod(size for dim, size in enumerate(placed.read_shape(0)) if dim != 1)
        row_bytes = rows * tensor.element_bytes
        collectives = (
            InnerCollective("all_reduce", class_axes, row_bytes),
            InnerCollective("all_reduce", class_axes, 2 * row_bytes),
        )
    collectives += _mass_collective(placed, row_axes)
    static = (row_axes, class_axes, step, tensor.shape[1])
    return LocalCall("loss_kernels.cross_entropy", call.args, call.kwargs, call.name, static, collectives)


@localiser("aten.nll_loss_nd.default", "aten.nll_loss.default")
def _nll_loss(placed: Placed, call: LocalCall) -> LocalCall:
    row_axes = placed.split(list(placed.space.reads[1].loops))
    if not row_axes:
        return call
    collectives = _mass_collective(placed, row_axes)
    return LocalCall("loss_kernels.nll_loss", call.args, call.kwargs, call.name, (row_axes,), collectives)
