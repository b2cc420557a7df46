"""A small summary of an operator graph, saved with an exploration, from which plan names and rates are made.

With the summary, a saved exploration can be shown without its graph and without PyTorch. Plan names leave out
uses of a mesh axis with a small share of the time (:mod:`tensoropt.plan.plan_names`), so the summary has a
rough duration of each operator in the unsplit model.
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
    """The weights of operators and parameters when a plan is named; without a graph, all weigh the same.

    Attributes:
        seconds: rough duration of each operator in seconds: that of its FLOP or of its memory traffic, if
            longer, at the shares of the device's peaks that kernels usually reach.
        sizes: size of each parameter in bytes.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)

    def of_operators(self, names: Iterable[str]) -> float:
        """Return the total duration of the operators of one group; 1 if durations are unknown."""
        return sum(self.seconds.get(name, 0.0) for name in names) if self.seconds else 1.0

    def of_parameter(self, name: str) -> float:
        return self.sizes.get(name, 0.0) if self.sizes else 1.0


@dataclass(frozen=True)
class GraphFacts:
    """A summary of an operator graph on a cluster.

    Attributes:
        weights: durations of operators on the cluster's first device kind, and sizes of parameters.
        inputs: (name, shape, dtype) of each input.
        looked_up: the names of the inputs of embedding operators.
        dense_transformer: whether the model is a transformer without experts.
    """

    weights: Weights = Weights()
    inputs: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    looked_up: frozenset[str] = frozenset()
    dense_transformer: bool = False

    @classmethod
    def of(cls, graph: OperatorGraph, cluster: Mapping[str, Any]) -> GraphFacts:
        """Return the summary of a graph on a cluster, given as :meth:`Cluster.to_dict` writes it."""
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
