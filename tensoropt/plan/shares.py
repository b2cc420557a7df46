"""What operators and parameters weigh in a plan: rough seconds of a step, and bytes, of the unsplit model.

Names of plans leave out what hardly counts (:mod:`tensoropt.plan.plan_names`). Both weights follow from the
operator graph that every exploration keeps, so that a plan has the same name when it was just found and after
it was loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensoropt.cluster import DeviceKind
from tensoropt.graph.ir import OperatorGraph

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
    from tensoropt.plan.operator_seconds import seconds_of  # brings torch, which figures alone do not need

    device = DeviceKind(**cluster["kinds"][0])
    return Weights(
        {op.name: seconds_of(op, graph.tensors, device) for op in graph.operators},
        {tensor.name: float(tensor.elements * tensor.stored_element_bytes) for tensor in graph.parameters},
    )
