"""What operators and parameters weigh in a plan: rough seconds of a step, and bytes, of the unsplit model.

Names of plans leave out what hardly counts (:mod:`tensoropt.plan.plan_names`). Both weights follow from the
operator graph that every exploration keeps, so that a plan has the same name when it was just found and after
it was loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensoropt.cluster import DeviceKind, reached_by
from tensoropt.costs.compute import peak_flops
from tensoropt.graph.ir import FLOATING, Operator, OperatorGraph, Tensor
from tensoropt.ops.calls import CostClass
from tensoropt.ops.registry import cost_class_of, launches
from tensoropt.ranks.kernel_settings import KernelSettings

LEAST_SHARE = 0.02
"""The share of a step's seconds, or of the parameters' bytes, from which names say what goes another way."""


@dataclass(frozen=True)
class Weights:
    """The weights of operators and parameters; without a graph, everything weighs 1.

    Attributes:
        seconds: operator -> the larger of the seconds of its FLOP and of its bytes, at the shares of the
            device's peaks that kernels reach.
        sizes: parameter -> its bytes.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)

    def of_operators(self, names: Iterable[str]) -> float:
        """Return what operators of one group weigh together."""
        return sum(self.seconds.get(name, 0.0) for name in names) if self.seconds else 1.0

    def of_parameter(self, name: str) -> float:
        """Return what a parameter weighs."""
        return self.sizes.get(name, 0.0) if self.sizes else 1.0


def weights_of(graph: OperatorGraph | None, cluster: Mapping[str, Any]) -> Weights:
    """Return the weights of a graph on the first kind of a cluster's devices; those without a graph for
    None."""
    if graph is None or not cluster.get("kinds"):
        return Weights()
    device = DeviceKind(**cluster["kinds"][0])
    return Weights(
        {op.name: _seconds(op, graph.tensors, device) for op in graph.operators},
        {tensor.name: float(tensor.elements * tensor.stored_element_bytes) for tensor in graph.parameters},
    )


def _seconds(op: Operator, tensors: Mapping[str, Tensor], device: DeviceKind) -> float:
    if not launches(op.target):
        return 0.0
    reads, made = [tensors[name] for name in op.inputs()], [tensors[name] for name in op.outputs]
    written = sum(tensor.bytes for tensor in made)
    cls = cost_class_of(op.target)
    # A lookup reads the rows that it returns, whatever the size of its table.
    read = written if cls is CostClass.LOOKUP else sum(tensor.bytes for tensor in reads)
    flops = _flops(cls, [t for t in reads if len(t.shape) > 1 and t.dtype in FLOATING], made)
    reached = reached_by(device)
    moved_s = (read + written) / (device.memory_bandwidth * reached.memory)
    if not flops or cls is None:
        return moved_s
    return max(flops / (peak_flops(device, KernelSettings(), made[0].dtype, cls) * reached.of(cls)), moved_s)


def _flops(cls: CostClass | None, reads: list[Tensor], made: list[Tensor]) -> float:
    """Return the FLOP of a product, multiply-adds counted as two; 0 for other operators.

    Args:
        reads: its operands of two or more dims.
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
