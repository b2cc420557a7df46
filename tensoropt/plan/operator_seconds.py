"""Rough durations of single operators of the unsplit model, computed from tensor shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tensoropt.cluster import DeviceKind, reached_by
from tensoropt.costs.compute import peak_flops
from tensoropt.graph.ir import FLOATING, Operator, Tensor
from tensoropt.ops.calls import CostClass
from tensoropt.ops.registry import cost_class_of, launches
from tensoropt.ranks.kernel_settings import KernelSettings


def seconds_of(op: Operator, tensors: Mapping[str, Tensor], device: DeviceKind) -> float:
    """Return an operator's rough duration on a device in seconds; 0 if it launches no kernel (a view)."""
    if not launches(op.target):
        return 0.0
    reads, made = [tensors[name] for name in op.inputs()], [tensors[name] for name in op.outputs]
    written = sum(tensor.bytes for tensor in made)
    cls = cost_class_of(op.target)
    # A lookup reads only the rows that it returns, whatever the size of its table.
    read = written if cls is CostClass.LOOKUP else sum(tensor.bytes for tensor in reads)
    flops = _flops(cls, [t for t in reads if len(t.shape) > 1 and t.dtype in FLOATING], made)
    reached = reached_by(device)
    moved_s = (read + written) / (device.memory_bandwidth * reached.memory)
    if not flops or cls is None:
        return moved_s
    return max(flops / (peak_flops(device, KernelSettings(), made[0].dtype, cls) * reached.of(cls)), moved_s)


def _flops(cls: CostClass | None, reads: list[Tensor], made: list[Tensor]) -> float:
    """Return the FLOP of a matrix product, convolution, attention or recurrent layer (a multiply-add is two);
    0 for other operators.

    Args:
        reads, made: the operator's floating-point inputs with two or more dims, and its outputs.
    """
    if len(reads) < 2 or not made:
        return 0.0
    first, second, out = reads[0], reads[1], made[0]
    if cls is CostClass.MATRIX:
        return 2.0 * out.elements * first.shape[-1]
    if cls is CostClass.CONVOLUTION:
        return 2.0 * out.elements * second.elements / second.shape[0]
    if cls is CostClass.ATTENTION:
        return 4.0 * first.elements * second.shape[-2]
    if cls is CostClass.RECURRENT:
        weights = sum(tensor.elements for tensor in reads if tensor.kind == "parameter")
        return 2.0 * math.prod(first.shape[:-1]) * weights
    return 0.0
