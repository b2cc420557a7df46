"""Lowering: operator graph + strategy -> an fx GraphModule of plain local calls.

Every operator becomes its rule's ``local`` call; only edges know about devices. A recomputed region
becomes a submodule that is checkpointed. The module takes the model's inputs, then its stored
parameters, then its buffers, all as this rank holds them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tensoropt.engine.recompute import REGION, extract_regions
from tensoropt.engine.runtime import Runtime
from tensoropt.graph import Operator, map_refs
from tensoropt.ops.calls import LocalCall, literal
from tensoropt.ops.layouts import PARTIAL_GRAD, REPLICATE, Layout
from tensoropt.ops.localise import localise
from tensoropt.ops.overloads import returns_one_tensor
from tensoropt.ops.registry import bind, evaluated, resolve_function
from tensoropt.profiling.workload import memory_orders
from tensoropt.sharding.groups import Group
from tensoropt.sharding.regions import Region
from tensoropt.sharding.reshard.redistribute import EdgeSpec, redistribute, take_shard
from tensoropt.sharding.strategy import Edge, Strategy, output_layout

WHOLE = (REPLICATE, PARTIAL_GRAD)


@dataclass
class Lowered:
    """The lowered module and what its arguments and results are.

    Attributes:
        module: called with inputs, parameters, buffers in this order.
        inputs, parameters, buffers: names of the arguments.
        outputs: names of the model outputs among the results; the mutated buffers follow.
        mutations: buffers whose new values follow the outputs.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    outputs: tuple[str, ...]
    mutations: tuple[str, ...]


@dataclass
class _Scope:
    """Nodes by (tensor, layout) that one group, or everybody, can use."""

    nodes: dict[tuple[str, Layout], fx.Node] = field(default_factory=dict)


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    function.__name__ = name  # fx names the node after its target
    return function


class _Lowering:
    def __init__(self, strategy: Strategy, runtime: Runtime, evaluating: bool = False):
        self.strategy = strategy
        self.runtime = runtime
        self.evaluating = evaluating
        self.source = strategy.graph.atoms.graph
        self.orders = memory_orders(strategy.graph)
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.everywhere = _Scope()
        self.places: dict[str, fx.Node] = {}
        self.made: dict[str, fx.Node] = {}
        self.region: Region | None = None

    def run(self) -> Lowered:
        source = self.source
        buffers = tuple(t.name for t in source.tensors.values() if t.kind == "buffer")
        parameters = tuple(t.name for t in source.parameters)
        for name in (*source.inputs, *parameters, *buffers):
            self.places[name] = self.graph.placeholder(name)
        scopes: dict[str, _Scope] = {}
        for op in source.operators:
            group = self.strategy.graph.group_of[op.name]
            self._operator(op, group, scopes.setdefault(group.name, _Scope()))
        self.region = None
        results = [self._output(name) for name in (*source.outputs, *source.mutations.values())]
        self.graph.output(tuple(results))
        graph = extract_regions(self.root, self.graph, self.runtime)
        graph.lint()
        module = fx.GraphModule(self.root, graph, class_name="LoweredModel")
        return Lowered(module, source.inputs, parameters, buffers, source.outputs, tuple(source.mutations))

    def _mark(self, node: fx.Node) -> fx.Node:
        """Say in which recomputed region a node runs; shards of inputs serve many groups and run in none."""
        if self.region is not None:
            node.meta[REGION] = self.region.name
        return node

    # -- operators --------------------------------------------------------------------------------

    def _operator(self, op: Operator, group: Group, scope: _Scope) -> None:
        self.region = self.strategy.region_of.get(group.name)
        configuration = self.strategy.configurations[group.name]
        placed = configuration.placed(
            op.name, self.strategy.graph.atoms, self.strategy.mesh, self.runtime.place
        )
        call = evaluated(op, localise(placed)) if self.evaluating else localise(placed)

        def operand(name: str) -> fx.Node:
            return self._operand(name, configuration.layout(name), group, scope)

        args = tuple(literal(map_refs(a, operand)) for a in call.args)
        kwargs = {k: literal(map_refs(v, operand)) for k, v in call.kwargs.items()}
        kwargs |= self._device(call)
        node = self.graph.create_node("call_function", bind(call, self.runtime), args, kwargs, name=op.name)
        self._mark(node).meta["operator"] = op.name
        values = self._results(op, node)
        if configuration.resolved is not None and configuration.resolved[0] in op.outputs:
            name, before, after = configuration.resolved
            edge = Edge(name, before, after, group.name, "resolve")
            values[name] = self._redistribute(values[name], edge)
        for name, value in values.items():
            self.made[name] = value
            if name in self.strategy.hubs:
                edge = Edge(name, self.strategy.made[name], self.strategy.hubs[name], "", "activation")
                self.everywhere.nodes[name, edge.target] = self._redistribute(value, edge)

    def _device(self, call: LocalCall) -> dict[str, Any]:
        """Where a call that makes a tensor from nothing puts it; capture leaves devices out."""
        function = resolve_function(call.function)
        if self.runtime.device.type == "cpu" or not isinstance(function, torch._ops.OpOverload):
            return {}
        takes = any(a.name == "device" for a in function._schema.arguments)
        return {"device": self.runtime.device} if takes else {}

    def _results(self, op: Operator, node: fx.Node) -> dict[str, fx.Node]:
        if len(op.outputs) == 1 and "." not in op.outputs[0].removeprefix(op.name):
            return {op.outputs[0]: node}
        values = {}
        for name in op.outputs:
            index = int(name.rsplit(".", 1)[1])
            if returns_one_tensor(op.target):
                values[name] = node
            else:
                values[name] = self._mark(self.graph.call_function(operator.getitem, (node, index)))
        return values

    # -- operands ---------------------------------------------------------------------------------

    def _operand(self, name: str, layout: Layout, group: Group, scope: _Scope) -> fx.Node:
        tensor = self.source.tensors[name]
        if tensor.kind == "activation" and name not in group.reads:
            return self.made[name]
        key = (name, layout)
        for known in (scope, self.everywhere):
            if key in known.nodes:
                return known.nodes[key]
        if tensor.kind in ("input", "constant", "buffer"):
            node = self._shard(name, layout)
            self.everywhere.nodes[key] = node
            return node
        if tensor.kind == "parameter":
            origin, edge = self.places[name], self.strategy.use(name, group)
        else:
            source = self.strategy.source_layout(name)
            origin = self.everywhere.nodes[name, source] if name in self.strategy.hubs else self.made[name]
            edge = Edge(name, source, layout, group.name, "activation")
        scope.nodes[key] = self._redistribute(origin, edge)
        return scope.nodes[key]

    def _shard(self, name: str, layout: Layout) -> fx.Node:
        """The shard of something every rank has whole; constants live on the module."""
        if name in self.places:
            origin = self.places[name]
        else:
            attribute = f"constant_{name.replace('.', '_')}"
            self.root.register_buffer(attribute, self._constant(name), persistent=False)
            origin = self.graph.get_attr(attribute)
            self.places[name] = origin
        whole = all(self.strategy.mesh[a] == 1 or code in WHOLE for a, code in enumerate(layout))
        tensor = self.source.tensors[name]
        expanded = tensor.kind == "constant" and tuple(self._constant(name).shape) != tensor.shape
        if whole and not expanded:
            return origin
        spec = EdgeSpec(name, self.strategy.atoms(name), self.strategy.mesh, layout, layout, (), ())
        return self.graph.call_function(
            _named(functools.partial(take_shard, self.runtime, spec), "take_shard"), (origin,)
        )

    def _constant(self, name: str) -> torch.Tensor:
        """The folded value; a graph captured without data (fake ranks) may lack it."""
        if name in self.source.constants:
            return self.source.constants[name]
        tensor = self.source.tensors[name]
        return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")

    # -- edges ------------------------------------------------------------------------------------

    def _redistribute(self, value: fx.Node, edge: Edge) -> fx.Node:
        forward, backward = self.strategy.steps(edge)
        tensor = self.source.tensors[edge.tensor]
        held = (
            edge.kind == "parameter" and edge.tensor in self.strategy.unsharded
        )  # was cast when it was made
        cast = getattr(torch, tensor.dtype) if tensor.master_dtype is not None and not held else None
        if cast is None and edge.back is None and not (forward or backward):
            return value
        spec = EdgeSpec(
            edge.tensor,
            self.strategy.atoms(edge.tensor),
            self.strategy.mesh,
            edge.source,
            edge.target,
            forward,
            backward,
            parameter=edge.kind == "parameter",
            dtype=cast,
            back=edge.back,
            order=self.orders.get(edge.tensor) if edge.kind == "activation" else None,
        )
        node = self.graph.call_function(
            _named(functools.partial(redistribute, self.runtime, spec), "redistribute"), (value,)
        )
        self._mark(node).meta["edge"] = edge
        return node

    def _output(self, name: str) -> fx.Node:
        tensor = self.source.tensors[name]
        if tensor.kind != "activation":
            return self._shard(name, tuple(-1 for _ in self.strategy.mesh))
        source = self.strategy.source_layout(name)
        origin = self.everywhere.nodes[name, source] if name in self.strategy.hubs else self.made[name]
        return self._redistribute(origin, Edge(name, source, output_layout(source), "", "output"))


def lower(strategy: Strategy, runtime: Runtime, *, evaluating: bool = False) -> Lowered:
    """Lower a strategy for the rank that ``runtime`` stands for.

    Args:
        evaluating: as ``model.eval()`` computes, though the graph was captured for training.
    """
    return _Lowering(strategy, runtime, evaluating).run()
