"""Operators of mixtures of experts: products with a matrix per group of rows, and counts of grouped rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import shape_wrapper

from tensoropt.ops.calls import CostClass, LocalCall, OperatorShard, OpSpec, Precision, Samples
from tensoropt.ops.index_space import Builder, Opaque, alike
from tensoropt.ops.kernels import ShardContext
from tensoropt.ops.overloads import resolve_overload

_NATIVE, _FALLBACK = "aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"
GROUPED_PRODUCTS = frozenset((_NATIVE, _FALLBACK))
"""Products of rows sorted by expert; arguments: rows, a matrix per expert, ends of the experts' rows."""
COUNTS = frozenset(("aten.histc.default", "aten.bincount.default"))


def _grouped_mm(b: Builder) -> None:
    """Describe ``y[r, n] = sum_k x[r, k] w[e(r), k, n]``; rows are sorted by expert ``e`` and end at
    ``offs[e]``.

    Rows and output features may be split. Splits of input features or of experts give partial sums.
    """
    x, w, offs = b.arg(0), b.arg(1), b.arg(2, "offs")
    left, right = b.tensor(x).shape, b.tensor(w).shape
    if len(left) != 2 or len(right) != 3 or offs is None or b.arg(3, "bias") is not None:
        raise Opaque(b.op.name)
    r, k = b.loop("rows", left[0], blocks=True), b.loop("in_features", left[1])
    e, n = b.loop("experts", right[0], blocks=True), b.loop("out_features", right[2])
    b.read(x, [r, k])
    b.read(w, [e, k, n])
    # Whole on every rank, because the start of an expert's rows depends on all experts before it.
    b.read(offs, [None])
    b.write([r, n])


@alike("bins minlength")
def _histogram(b: Builder) -> None:
    """Allow splits of the counted values, which give partial counts; the bins stay whole."""
    if len(b.op.inputs()) > 1 or len(b.output().shape) != 1:
        raise Opaque(b.op.name)
    # Equal bounds stand for the least and the largest value, which a part of the values does not know.
    if "histc" in b.op.target and b.arg(2, "min", 0) == b.arg(3, "max", 0):
        raise Opaque(b.op.name)
    b.read(b.arg(0), b.loops(b.tensor(b.arg(0)).shape))
    b.write([None])


def _local_grouped_mm(shard: OperatorShard, call: LocalCall) -> LocalCall:
    rows, experts = shard.split(shard.loop_named("rows")), shard.split(shard.loop_named("experts"))
    if not rows and not experts:
        return call
    offs = shard.argument(2, "offs", None)
    static = (call.function, rows, experts)
    return LocalCall("expert_kernels.grouped_mm", (*call.args[:2], offs), {}, call.name, static)


def _grouped_mm_kernel(
    context: ShardContext,
    name: str,
    target: str,
    row_axes: tuple[int, ...],
    expert_axes: tuple[int, ...],
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
) -> torch.Tensor:
    """Return the grouped matrix product of this rank's rows with this rank's experts.

    No tensor's size depends on values: rows of this rank's experts are rolled to the front, and results back.

    Args:
        target: PyTorch's operator that multiplies.
        row_axes, expert_axes: mesh axes that split the rows, and those that split the experts.
        x: this rank's ``[rows, in]``, globally sorted by expert.
        weight: this rank's ``[experts, in, out]``.
        offs: ``[all experts]``, the global end of each expert's rows.

    Returns:
        ``[rows, out]``, with zeros for rows of other ranks' experts.
    """
    product = resolve_overload(target)
    rows, experts = x.shape[0], weight.shape[0]
    # The start and end of this rank's experts among this rank's rows.
    first = context.coordinate(expert_axes) * experts
    ends = torch.cat([offs.new_zeros(1), offs])[first : first + experts + 1]
    ends = (ends - context.coordinate(row_axes) * rows).clamp(0, rows)
    if not expert_axes:
        return product(x, weight, ends[1:])
    # The product takes its rows from the front: ours are rolled there, and their results are rolled back.
    index = torch.arange(rows, device=x.device)
    front, back = (index + ends[0]) % rows, (index - ends[0]) % rows
    mine = product(x.index_select(0, front), weight, ends[1:] - ends[0])
    inside = (back < ends[-1] - ends[0]).unsqueeze(1)
    return torch.where(inside, mine.index_select(0, back), 0.0)


def _flops(x: Any, w: Any, *_: Any, **__: Any) -> int:
    return 2 * int(x[0]) * int(x[1]) * int(w[-1])


def _backward_flops(x: Any, w: Any, *_: Any, **__: Any) -> int:
    return 2 * _flops(x, w)


_grouped = partial(
    OpSpec,
    rule=_grouped_mm,
    localiser=_local_grouped_mm,
    samples=Samples(row_ends=(2, 0)),
    equal_shards=True,
)

SPECS = (
    _grouped(
        targets=(_NATIVE,),
        kernels={"expert_kernels.grouped_mm": _grouped_mm_kernel},
        cost_class=CostClass.MATRIX,
        precision=Precision.NARROW,
        flops={"aten::_grouped_mm": shape_wrapper(_flops)},
    ),
    _grouped(
        targets=(_FALLBACK,),
        flops={
            "transformers::grouped_mm_fallback": shape_wrapper(_flops),
            "transformers::grouped_mm_fallback_backward": shape_wrapper(_backward_flops),
        },
    ),
    OpSpec(targets=tuple(sorted(COUNTS)), rule=_histogram),
)
