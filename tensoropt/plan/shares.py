"""Weights of operators and parameters in plan names: rough seconds and bytes of the unsplit model.

Names leave out small shares (:mod:`tensoropt.plan.plan_names`). Weights follow from the saved operator graph,
so a plan has the same name before and after loading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensoropt.cluster import DeviceKind
from tensoropt.graph.ir import OperatorGraph

LEAST_SHARE = 0.02
"""Names mention a deviation from this share of a step's seconds, or of the parameters' bytes, on."""


@dataclass(frozen=True)
class Weights:
    """Weights of operators and parameters; without a graph, all 1.

    Attributes:
        seconds: by operator, the larger of the times for its FLOP and its bytes, at the shares of the
            device's peaks that kernels reach.
        sizes: bytes by parameter.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)

    def of_operators(self, names: Iterable[str]) -> float:
        """Return the total weight of the operators of one group."""
        return sum(self.seconds.get(name, 0.0) for name in names) if self.seconds else 1.0

    def of_parameter(self, name: str) -> float:
        """Return a parameter's weight."""
        return self.sizes.get(name, 0.0) if self.sizes else 1.0


def weights_of(graph: OperatorGraph | None, cluster: Mapping[str, Any]) -> Weights:
    """Return the weights of a graph on a cluster's first device kind; all 1 without a graph."""
    if graph is None or not cluster.get("kinds"):
        return Weights()
    from tensoropt.plan.operator_seconds import seconds_of  # imports torch, which figures alone do not need

    device = DeviceKind(**cluster["kinds"][0])
    return Weights(
        {op.name: seconds_of(op, graph.tensors, device) for op in graph.operators},
        {tensor.name: float(tensor.elements * tensor.stored_element_bytes) for tensor in graph.parameters},
    )
