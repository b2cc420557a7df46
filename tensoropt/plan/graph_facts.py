"""A summary of an operator graph for plan names and rates, which is small and saved with an exploration.

Names leave out small shares (:mod:`tensoropt.plan.plan_names`), so operators are weighted by their rough
duration in the unsplit model. With this summary, a saved exploration can be opened for its points without the
graph and PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensoropt.cluster import DeviceKind
from tensoropt.graph.ir import OperatorGraph

LEAST_SHARE = 0.02
"""The least share of a step's duration, or of the parameters' size, that a name mentions."""
_LOOKUP = "aten.embedding"


@dataclass(frozen=True)
class Weights:
    """The weights of operators and parameters in plan names; without a graph, all 1.

    Attributes:
        seconds: rough duration of each operator in seconds: the larger of those for its FLOP and for its
            memory traffic, at the shares of the device's peaks that kernels reach.
        sizes: size of each parameter in bytes.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)

    def of_operators(self, names: Iterable[str]) -> float:
        """Return the total weight of the named operators, which are those of one group."""
        return sum(self.seconds.get(name, 0.0) for name in names) if self.seconds else 1.0

    def of_parameter(self, name: str) -> float:
        return self.sizes.get(name, 0.0) if self.sizes else 1.0


@dataclass(frozen=True)
class GraphFacts:
    """A summary of an operator graph on a cluster.

    Attributes:
        weights: the weights of operators and parameters, for the cluster's first device kind.
        inputs: (name, shape, dtype) of each input.
        looked_up: the names of the tensors that embeddings read.
        dense_transformer: whether the model is a transformer without experts.
    """

    weights: Weights = Weights()
    inputs: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    looked_up: frozenset[str] = frozenset()
    dense_transformer: bool = False

    @classmethod
    def of(cls, graph: OperatorGraph, cluster: Mapping[str, Any]) -> GraphFacts:
        """Return the summary of a graph on a cluster, given as the data of :meth:`Cluster.to_dict`."""
        # These import PyTorch.
        from tensoropt.ops.registry import is_dense_transformer
        from tensoropt.plan.operator_seconds import seconds_of

        weights, tensors = Weights(), graph.tensors
        if cluster.get("kinds"):
            device = DeviceKind(**cluster["kinds"][0])
            weights = Weights(
                {op.name: seconds_of(op, tensors, device) for op in graph.operators},
                {t.name: float(t.elements * t.stored_element_bytes) for t in graph.parameters},
            )
        lookups = [op for op in graph.operators if op.target.startswith(_LOOKUP)]
        return cls(
            weights,
            tuple((name, tuple(tensors[name].shape), tensors[name].dtype) for name in graph.inputs),
            frozenset(name for op in lookups for name in op.inputs()),
            is_dense_transformer(op.target for op in graph.operators),
        )
