"""Lowering: operator graph + strategy -> an fx GraphModule of plain local calls.

Every operator becomes its rule's ``local`` call; only edges know about devices. A recomputed region becomes a
submodule that is checkpointed. The module takes the model's inputs, then its stored parameters, then its
buffers, all in the form in which this rank holds them.

Every kind of plan puts the same nodes into the fx graph to which it is lowered: local calls, their results,
constants.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from tensoropt.engine.beside_weights import bring, linear_beside
from tensoropt.engine.gathering import begin_block, begin_block_backward
from tensoropt.engine.recompute import REGION, extract_regions, keep_gathered
from tensoropt.engine.runtime import Runtime
from tensoropt.graph import Operator, OperatorGraph, map_refs
from tensoropt.ops.calls import LocalCall, literal
from tensoropt.ops.families.stages import ARRIVE, DEPART
from tensoropt.ops.kernels import ShardContext
from tensoropt.ops.layouts import PARTIAL_GRAD, REPLICATE, Layout
from tensoropt.ops.localise import localise
from tensoropt.ops.overloads import returns_one_tensor
from tensoropt.ops.registry import bind, evaluated, resolve_function
from tensoropt.profiling.workload import memory_orders
from tensoropt.sharding.groups import Group, LinearProduct
from tensoropt.sharding.regions import Region
from tensoropt.sharding.reshard.redistribute import EdgeSpec, redistribute, take_shard
from tensoropt.sharding.strategy import Edge, Strategy, output_layout


@dataclass
class Lowered:
    """A lowered module, and which arguments it takes after the model's inputs.

    Attributes:
        module: takes inputs, parameters and buffers in this order, as this rank has them.
        parameters, buffers: the names of these arguments.
    """

    module: fx.GraphModule
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


def add_function(
    graph: fx.Graph, function: functools.partial[Any], name: str, args: tuple[Any, ...]
) -> fx.Node:
    """Add a call of a bound function; ``name`` says in the printed graph what it does."""
    function.__name__ = name  # type: ignore[attr-defined]  # fx names the node after its target
    return graph.call_function(function, args)


def add_call(
    graph: fx.Graph,
    op: Operator,
    call: LocalCall,
    operand: Callable[[str], fx.Node],
    context: ShardContext,
    device: torch.device,
) -> fx.Node:
    """Add an operator's local call on ``device``.

    Args:
        operand: returns the node of a tensor that the call reads, given its name.
        context: the position of the shard, for kernels that need it.
    """
    args = tuple(literal(map_refs(a, operand)) for a in call.args)
    kwargs = {k: literal(map_refs(v, operand)) for k, v in call.kwargs.items()}
    # Constructors (`zeros`, `arange`) only: all other calls compute where their operands are.
    kwargs |= _device_argument(call, device)
    node = graph.create_node("call_function", bind(call, context), args, kwargs, name=op.name)
    node.meta["operator"] = op.name
    return node


def _device_argument(call: LocalCall, device: torch.device) -> dict[str, Any]:
    """Return the device argument for a call that makes a tensor from nothing; capture leaves devices out."""
    function = resolve_function(call.function)
    if device.type == "cpu" or not isinstance(function, torch._ops.OpOverload):
        return {}
    takes = any(a.name == "device" for a in function._schema.arguments)
    return {"device": device} if takes else {}


def add_results(graph: fx.Graph, op: Operator, node: fx.Node) -> dict[str, fx.Node]:
    """Return the nodes of an operator's outputs by name, given the node of its call."""
    # An operator with one result that is a tuple has a numbered output too ("split.0").
    if len(op.outputs) == 1 and "." not in op.outputs[0].removeprefix(op.name):
        return {op.outputs[0]: node}
    # A call that gives one tensor under a numbered name (`native_dropout` that became `dropout`): nothing to
    # unpack.
    if returns_one_tensor(op.target):
        return dict.fromkeys(op.outputs, node)
    return {name: item(graph, node, int(name.rsplit(".", 1)[1])) for name in op.outputs}


def item(graph: fx.Graph, node: fx.Node, number: int) -> fx.Node:
    """Return one of the results of a call that has several."""
    return graph.call_function(operator.getitem, (node, number))


def add_constant(graph: fx.Graph, root: torch.nn.Module, source: OperatorGraph, name: str) -> fx.Node:
    """Add a constant of the captured graph as a buffer of the lowered module, so that it moves with the
    module."""
    value = _constant_value(source, name)
    # Equal constants share their memory; under two names they would not do so on another device.
    same = (buffer_name for buffer_name, kept in root.named_buffers(recurse=False) if kept is value)
    attribute = next(same, None)
    if attribute is None:
        # A dot would be a path of submodules.
        attribute = f"constant_{name.replace('.', '_')}"
        root.register_buffer(attribute, value, persistent=False)
    return graph.get_attr(attribute)


def _constant_value(source: OperatorGraph, name: str) -> torch.Tensor:
    """Return the folded value of a constant; without data if the graph was captured without (fake ranks)."""
    if name in source.constants:
        value: torch.Tensor = source.constants[name]
        return value
    tensor = source.tensors[name]
    return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")


_WHOLE = (REPLICATE, PARTIAL_GRAD)
"""Placements of an axis along which every rank has the value whole; only their gradients differ."""


@dataclass
class LoweredStrategy(Lowered):
    """A sharded plan as this rank runs it.

    Attributes:
        inputs: the names of the arguments before the parameters.
        outputs: the names of the model outputs among the results, and of what departs for the next stage of a
            pipeline; the mutated buffers follow.
        mutations: the buffers whose new values follow the outputs.
        ahead: for each block, the edges of its parameters that are gathered ahead, in its forward's order,
            and whether their groups are recomputed.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    mutations: tuple[str, ...]
    ahead: dict[int, list[tuple[EdgeSpec, bool]]]


@dataclass
class _Scope:
    """The nodes by (tensor, layout) that one group, or every group, can use."""

    nodes: dict[tuple[str, Layout], fx.Node] = field(default_factory=dict)


class _Lowering:
    """One lowering of a strategy.

    Attributes:
        everywhere: the shards of inputs and the values of hubs, which all groups can read.
        places: the placeholders and constants, as this rank has them.
        made: the values as their operators return them.
        region: the recomputed region of the operator that is being lowered.
    """

    def __init__(self, strategy: Strategy, runtime: Runtime, evaluating: bool = False):
        self.strategy = strategy
        self.runtime = runtime
        self.evaluating = evaluating
        self.source = strategy.graph.atoms.graph
        # The same orders as under measurement: kernels are timed on tensors that lie as they will lie in the
        # step.
        self.orders = memory_orders(strategy.graph)
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.everywhere = _Scope()
        self.places: dict[str, fx.Node] = {}
        self.made: dict[str, fx.Node] = {}
        self.region: Region | None = None
        # The edges of parameters that are gathered ahead: by block, and by reader.
        self.ahead: dict[int, list[tuple[EdgeSpec, bool]]] = {}
        self.ahead_of: dict[tuple[str, str], EdgeSpec] = {}
        # Also those of unsharded copies that are gathered ahead, and of gradients that are scattered behind.
        self.blocks = {edge.block for edge in strategy.unsharded.values()}
        self.begun = -1
        # For activations whose gradients are reduced beside a weight's: the product, by the operator's name;
        # the edge and the node that takes the gradient back, by tensor.
        self.beside = {} if evaluating else dict(strategy.reduced_beside)
        self.products = {product.operator: product for product, _ in self.beside.values()}
        self.links: dict[str, tuple[EdgeSpec, fx.Node]] = {}
        self.left_as_views: dict[str, Mapping[str, Sequence[str]]] = {}

    def lowered(self) -> LoweredStrategy:
        """Return the module and its signature."""
        source = self.source
        buffers = tuple(t.name for t in source.tensors.values() if t.kind == "buffer")
        parameters = tuple(t.name for t in source.parameters)
        # All of them, used or not, as the signature does not depend on the strategy.
        for name in (*source.inputs, *parameters, *buffers):
            self.places[name] = self.graph.placeholder(name)
        scopes: dict[str, _Scope] = {}
        self._gather_ahead()
        for op in source.operators:
            group = self.strategy.graph.group_of[op.name]
            self._begin(self.strategy.blocks.of[group.name])
            self._operator(op, group, scopes.setdefault(group.name, _Scope()))
            self._begin_backward(op, group)
        self.region = None
        departing = tuple(op.outputs[0] for op in source.operators if op.target == DEPART)
        outputs = [self._output(name) for name in source.outputs]
        changed = [self._output(name) for name in source.mutations.values()]
        # Departing tensors keep their layout: the next stage takes them over as they are.
        results = [*outputs, *(self.made[name] for name in departing), *changed]
        self.graph.output(tuple(results))
        graph = extract_regions(self.root, self.graph, self.runtime)
        graph.lint()
        module = fx.GraphModule(self.root, graph, class_name="LoweredModel")
        return LoweredStrategy(
            module,
            parameters,
            buffers,
            source.inputs,
            (*source.outputs, *departing),
            tuple(source.mutations),
            self.ahead,
        )

    def _mark(self, node: fx.Node) -> fx.Node:
        """Record in which recomputed region a node runs; shards of inputs serve many groups and run in
        none."""
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

        if op.target == ARRIVE:
            # It is received in its layout here, whatever the layout of the whole.
            values = {op.outputs[0]: self.places[op.inputs()[0]]}
        elif product := self.products.get(op.name):
            values = {op.outputs[0]: self._linear_beside(op, product, operand)}
        else:
            node = self._mark(add_call(self.graph, op, call, operand, self.runtime, self.runtime.device))
            values = {name: self._mark(value) for name, value in add_results(self.graph, op, node).items()}
        if configuration.resolved is not None and configuration.resolved[0] in op.outputs:
            name, before, after = configuration.resolved
            edge = Edge(name, before, after, group.name, "resolve")
            values[name] = self._redistribute(values[name], edge)
        for name in self._left_as_views(group).get(op.name, ()):
            gathered = scope.nodes[name, configuration.layout(name)]
            if gathered is not self.places[name]:
                keep = functools.partial(keep_gathered, self.runtime)
                self._mark(add_function(self.graph, keep, "keep_gathered", (gathered,)))
        for name, value in values.items():
            self.made[name] = value
            if name in self.strategy.hubs:
                edge = Edge(name, self.strategy.made[name], self.strategy.hubs[name], "", "activation")
                # At once, where it is made: every reader then starts from this one copy, as priced.
                self.everywhere.nodes[name, edge.target] = self._redistribute(value, edge)

    def _left_as_views(self, group: Group) -> Mapping[str, Sequence[str]]:
        """Return, for each operator, the parameters that the group itself has finished reading but whose
        parts (split, transposed) it leaves to other groups."""
        if group.name not in self.left_as_views:
            views: dict[str, list[str]] = {}
            for name in (*group.parameters, *group.shared):
                made, last = {name}, None
                for op in group.operators:
                    if made.intersection(op.inputs()):
                        last = op.name
                        if made.issuperset(op.inputs()):
                            made.update(op.outputs)
                if last is not None and made.intersection(group.writes):
                    views.setdefault(last, []).append(name)
            self.left_as_views[group.name] = views
        return self.left_as_views[group.name]

    def _linear_beside(
        self, op: Operator, product: LinearProduct, operand: Callable[[str], fx.Node]
    ) -> fx.Node:
        """Add a linear operator in whose backward the gradient of its operand is reduced; further readers of
        the operand use it as this operator passes it on."""
        # In the order of the arguments, in which parameters are gathered.
        nodes = {name: operand(name) for name in op.inputs()}
        spec, link = self.links[product.read]
        function = functools.partial(linear_beside, self.runtime, spec, product.transposed)
        operands = [nodes[name] for name in (product.read, product.weight, product.bias) if name]
        node = self._mark(add_function(self.graph, function, op.name, (link, *operands)))
        node.meta["operator"] = op.name
        if product.read in self.strategy.hubs:
            target = self.strategy.hubs[product.read]
            self.everywhere.nodes[product.read, target] = self._mark(item(self.graph, node, 0))
        return self._mark(item(self.graph, node, 1))

    # -- parameters gathered ahead ------------------------------------------------------------------

    def _gather_ahead(self) -> None:
        """Collect the parameters that are gathered ahead: each once for all groups of a block that read it in
        the same way, except for groups of a recomputed region, which read it twice.
        """
        uses: dict[tuple[int, str, Layout, bool, bool], list[Edge]] = {}
        for group in self.strategy.graph.groups:
            recomputed = group.name in self.strategy.region_of
            for name in (*group.parameters, *group.shared):
                edge = self.strategy.use(name, group)
                if edge.block is None:
                    continue
                self.blocks |= {edge.block, edge.behind}
                if edge.back is None:
                    learns = self.strategy.graph.learns(name, group.name)
                    uses.setdefault((edge.block, name, edge.target, recomputed, learns), []).append(edge)
        for (block, name, _, recomputed, _), edges in uses.items():
            spec = replace(self._spec(edges[0]), readers=len(edges))
            self.ahead.setdefault(block, []).append((spec, recomputed))
            self.ahead_of.update(((name, edge.reader), spec) for edge in edges)

    def _begin(self, block: int) -> None:
        """Gather the parameters of a block's successor as the block begins."""
        for number in range(self.begun + 1, block + 1):
            # Nothing precedes the first block, whose own parameters are gathered as it begins.
            own = tuple(spec for spec, _ in self.ahead.get(number, ())) if number == 0 else ()
            following = tuple(spec for spec, _ in self.ahead.get(number + 1, ()))
            if {number, number + 1} & self.blocks:
                shards = tuple(self.places[spec.name] for spec in (*own, *following))
                begin = functools.partial(begin_block, self.runtime, number, own, following)
                # In no recomputed region, as the second forward must not gather ahead.
                add_function(self.graph, begin, "begin_block", shards)
        self.begun = max(self.begun, block)

    def _begin_backward(self, op: Operator, group: Group) -> None:
        """Begin a block's backward when autograd reaches the last operator of the group by which backward
        enters the block."""
        block = self.strategy.blocks.of[group.name]
        if group.name != self.strategy.blocks.last[block] or op is not group.operators[-1]:
            return
        if not {block - 1, block, block + 1, block + 2} & self.blocks:
            return
        begin = functools.partial(begin_block_backward, self.runtime, block)
        for name in op.outputs:
            self._mark(add_function(self.graph, begin, "begin_block_backward", (self.made[name],)))

    # -- operands ---------------------------------------------------------------------------------

    def _operand(self, name: str, layout: Layout, group: Group, scope: _Scope) -> fx.Node:
        tensor = self.source.tensors[name]
        # Made inside the group, which passes it on unchanged.
        if tensor.kind == "activation" and name not in group.reads:
            return self.made[name]
        key = (name, layout)
        # One copy per group: its operators share the values moved for the first of them.
        for nodes in (scope, self.everywhere):
            if key in nodes.nodes:
                return nodes.nodes[key]
        if tensor.kind in ("input", "constant", "buffer"):
            node = self._shard(name, layout)
            # Slicing what every rank has is free, so all groups may share it.
            self.everywhere.nodes[key] = node
            return node
        if tensor.kind == "parameter":
            origin, edge = self.places[name], self.strategy.use(name, group)
            if self.source.training and not self.strategy.graph.learns(name, group.name):
                # It may be trained elsewhere: here autograd would keep tensors for which no gradient comes
                # back.
                origin = self._mark(
                    add_function(
                        self.graph, functools.partial(torch.Tensor.detach), f"{name}_idle", (origin,)
                    )
                )
        else:
            source = self.strategy.source_layout(name)
            origin = self.everywhere.nodes[name, source] if name in self.strategy.hubs else self.made[name]
            edge = Edge(name, source, layout, group.name, "activation")
        scope.nodes[key] = self._redistribute(origin, edge)
        return scope.nodes[key]

    def _shard(self, name: str, layout: Layout) -> fx.Node:
        """Return the shard of something that every rank has whole; constants live on the module."""
        if name not in self.places:
            self.places[name] = add_constant(self.graph, self.root, self.source, name)
        origin = self.places[name]
        # A constant may be kept at a reduced shape and expanded to the graph's; take_shard does both.
        whole = all(self.strategy.mesh[a] == 1 or code in _WHOLE for a, code in enumerate(layout))
        tensor = self.source.tensors[name]
        expanded = (
            tensor.kind == "constant" and tuple(_constant_value(self.source, name).shape) != tensor.shape
        )
        if whole and not expanded:
            return origin
        # No steps: `take_shard` cuts what is there, without any collective.
        spec = EdgeSpec(name, self.strategy.atoms(name), self.strategy.mesh, layout, layout, (), ())
        return add_function(
            self.graph, functools.partial(take_shard, self.runtime, spec), "take_shard", (origin,)
        )

    # -- edges ------------------------------------------------------------------------------------

    def _redistribute(self, value: fx.Node, edge: Edge) -> fx.Node:
        spec = self._spec(edge)
        _, link = self.beside.get(edge.tensor, (None, None))
        if edge == link:
            return self._bring(value, edge, spec)
        # An edge that does nothing is no node: an autograd function costs time even then.
        if spec.dtype is None and edge.back is None and not (spec.forward or spec.backward):
            return value
        if edge.block is not None and edge.back is None:
            spec = self.ahead_of[edge.tensor, edge.reader]
        node = add_function(
            self.graph, functools.partial(redistribute, self.runtime, spec), "redistribute", (value,)
        )
        self._mark(node).meta["edge"] = edge
        return node

    def _bring(self, value: fx.Node, edge: Edge, spec: EdgeSpec) -> fx.Node:
        """Return the value that came along an edge whose gradient is reduced beside a weight's."""
        link = value
        if spec.forward:
            node = add_function(self.graph, functools.partial(bring, self.runtime, spec), "bring", (value,))
            self._mark(node).meta["edge"] = edge
            value, link = (self._mark(item(self.graph, node, number)) for number in (0, 1))
        self.links[edge.tensor] = spec, link
        return value

    def _spec(self, edge: Edge) -> EdgeSpec:
        forward, backward = self.strategy.steps(edge)
        tensor = self.source.tensors[edge.tensor]
        # An unsharded parameter was cast when it was gathered.
        unsharded = edge.kind == "parameter" and edge.tensor in self.strategy.unsharded
        cast = getattr(torch, tensor.dtype) if tensor.master_dtype is not None and not unsharded else None
        return EdgeSpec(
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
            block=edge.block,
            behind=edge.behind,
        )

    def _output(self, name: str) -> fx.Node:
        tensor = self.source.tensors[name]
        if tensor.kind != "activation":
            return self._shard(name, (REPLICATE,) * len(self.strategy.mesh))
        source = self.strategy.source_layout(name)
        origin = self.everywhere.nodes[name, source] if name in self.strategy.hubs else self.made[name]
        return self._redistribute(origin, Edge(name, source, output_layout(source), "", "output"))


def lower(strategy: Strategy, runtime: Runtime, *, evaluating: bool = False) -> LoweredStrategy:
    """Lower a strategy for the rank that ``runtime`` represents.

    Args:
        evaluating: whether to compute as ``model.eval()`` does, though the graph was captured for training.
    """
    return _Lowering(strategy, runtime, evaluating).lowered()
