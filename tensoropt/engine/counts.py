"""Counts of mean losses, taken before the first micro-batch runs.

A mean loss divides by the number of targets of the *whole* batch that are not ignored (or by the sum of their
weights), which no single micro-batch knows. Every rank has the whole inputs, so the part of the graph that
makes the targets is run unsplit, without communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tensoropt.engine.lower import lower
from tensoropt.engine.runtime import Runtime
from tensoropt.errors import PlanError
from tensoropt.graph import Operator
from tensoropt.ops.families.losses import is_mean, target_mass
from tensoropt.ops.layouts import REPLICATE
from tensoropt.ops.registry import spec_of
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.strategy import Strategy


def unsplit_strategy(graph: GroupGraph) -> Strategy:
    """Return the strategy of the unsplit model: everything whole, on no mesh at all."""
    return Strategy(
        graph=graph,
        mesh=(1,),
        configurations={g.name: Configuration(g, (g.unsplit,)) for g in graph.groups},
        hubs=dict.fromkeys(graph.hubs, (REPLICATE,)),
        stored={t.name: (REPLICATE,) for t in graph.atoms.graph.parameters},
    )


class TargetCounts:
    """Counts the targets of every mean loss of a graph, on the device of its inputs.

    Args:
        device: the device of the inputs and buffers.

    Raises:
        PlanError: targets depend on parameters, so that they are not known beforehand.
    """

    def __init__(self, graph: GroupGraph, device: torch.device):
        source = graph.atoms.graph
        self.losses = [op for op in source.operators if spec_of(op.target).counted_targets and is_mean(op)]
        self.module = self._targets(graph, device) if self.losses else None

    def _targets(self, graph: GroupGraph, device: torch.device) -> torch.fx.GraphModule:
        # Lowered whole and then reduced to the targets, which are thus made by the very calls of the model.
        lowered = lower(unsplit_strategy(graph), Runtime((1,), device=device))
        module = lowered.module
        wanted = {op.name for op in self.losses}
        losses = {n.meta["operator"]: n for n in module.graph.nodes if n.meta.get("operator") in wanted}
        kept = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        # All placeholders are kept, read or not, so that the module takes its arguments in the usual order.
        for node in module.graph.nodes:
            if node.op == "placeholder":
                copies[node] = kept.placeholder(node.name)

        def copy(node: torch.fx.Node) -> torch.fx.Node:
            if node.name in lowered.parameters:
                raise PlanError(
                    "the targets of the loss depend on parameters, so they cannot be counted before the "
                    "micro-batches run; use a plan with 1 micro-batch that does not cut the loss"
                )
            if node not in copies:
                for needed in node.all_input_nodes:
                    copy(needed)
                copies[node] = kept.node_copy(node, lambda n: copies[n])
            return copies[node]

        given = [(losses[op.name].args[1], weight_of(losses[op.name])) for op in self.losses]
        kept.output(tuple((copy(t), copy(w) if w is not None else None) for t, w in given))
        self.parameters = len(lowered.parameters)
        # Constants among the targets (a mask, a shift) are on the CPU as captured.
        return torch.fx.GraphModule(module, kept).to(device)

    @torch.no_grad()
    def count(
        self, inputs: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return, for each loss, how many targets of the batch count, or their total weight."""
        if self.module is None:
            return {}
        # The kept part reads no parameter (_targets refuses it), but keeps their places among the arguments.
        found = self.module(*inputs, *(None for _ in range(self.parameters)), *buffers.values())
        return {
            op.name: target_mass(target, weight, ignore_index(op))
            for op, (target, weight) in zip(self.losses, found, strict=True)
        }


def weight_of(call: torch.fx.Node) -> Any:
    """Return the classes' weights of a cross entropy or negative log likelihood; None without."""
    return call.args[2] if len(call.args) > 2 else call.kwargs.get("weight")


def ignore_index(op: Operator) -> Any:
    """Return the target value that a cross entropy or negative log likelihood leaves out."""
    return op.args[4] if len(op.args) > 4 else op.kwargs.get("ignore_index", -100)
