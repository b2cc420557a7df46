"""Lowering of a strategy's program to an fx GraphModule of local operator calls and collectives."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tensoropt.engine.batch_share import BatchShare
from tensoropt.engine.beside_weights import bring, linear_beside
from tensoropt.engine.gathering import begin_block, begin_block_backward, edge_spec
from tensoropt.engine.partly_recomputed import NodeRuns
from tensoropt.engine.recompute import extract_regions, gather_again, keep_gathered
from tensoropt.engine.runtime import Runtime
from tensoropt.ops.calls import LocalCall
from tensoropt.ops.kernels import ShardContext
from tensoropt.ops.overloads import returns_one_tensor
from tensoropt.ops.registry import KERNELS, bind, resolve_function
from tensoropt.profiling.workload import memory_orders
from tensoropt.sharding.program import (
    Argument,
    BeginBlock,
    BeginBlockBackward,
    Compute,
    Detach,
    EdgeSteps,
    ForwardProgram,
    GatherAgain,
    KeepViews,
    Move,
    Node,
    Slice,
    lower_program,
)
from tensoropt.sharding.reshard.redistribute import EdgeSpec, redistribute, take_shard
from tensoropt.sharding.strategy import Strategy


@dataclass
class Lowered:
    """A plan lowered for this rank.

    Attributes:
        module: the module; its arguments are this rank's inputs, parameters and buffers, in this order.
        program: the operator calls and reshardings that ``module`` runs.
        ahead: block -> reshardings of the parameters that backward prefetches for recomputed operators.
        gathers: whether backward gathers or casts parameters again.
    """

    module: fx.GraphModule
    program: ForwardProgram
    ahead: dict[int, list[EdgeSpec]]
    gathers: bool


def _device_argument(call: LocalCall, device: torch.device) -> dict[str, Any]:
    function = resolve_function(call.function)
    if device.type == "cpu" or not isinstance(function, torch._ops.OpOverload):
        return {}
    takes = any(a.name == "device" for a in function._schema.arguments)
    return {"device": device} if takes else {}


def _runs(node: Node, call: fx.Node) -> NodeRuns:
    # A hub is made again with its tensor.
    moves = isinstance(node, Move) and node.edge.kind == "activation" and bool(node.edge.reader)
    return NodeRuns(node.again, moves and call.target is not operator.getitem)


class Interpretation:
    """Translates one rank's program (operator calls and reshardings) into an fx graph.

    Subclasses handle further kinds of program nodes.

    Attributes:
        context: the rank or shard whose operator calls are being added.
        values: program node -> fx node of its result; for an operator call, a dict of fx nodes by result
            name.
        links: resharding -> fx node of the tensor that receives the gradient which a linear operator has
            reduced (:mod:`tensoropt.engine.beside_weights`).
    """

    def __init__(self, strategy: Strategy, runtime: Runtime, share: BatchShare | None = None):
        self.strategy = strategy
        self.runtime = runtime
        self.share = share
        self.context: ShardContext = runtime
        self.source = strategy.graph.atoms.graph
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.values: dict[Node, Any] = {}
        self.links: dict[Node, fx.Node] = {}
        self._specs: dict[EdgeSteps, EdgeSpec] = {}

    def lowered(self, program: ForwardProgram) -> Lowered:
        added: dict[Node, slice] = {}
        for node in program.nodes:
            begin = len(self.graph.nodes)
            reads = {name: self._value(name, provider) for name, provider in node.reads.items()}
            self.values[node] = self.node(node, reads)
            added[node] = slice(begin, len(self.graph.nodes))
        output = self.graph.output(tuple(self._value(name, node) for name, node in program.results))
        graph = self.graph
        if self.strategy.recomputed:
            nodes = list(graph.nodes)
            units = [
                (unit[0].region, [n for node in unit for n in nodes[added[node]]]) for unit in program.units()
            ]
            runs = {n: _runs(node, n) for node, at in added.items() for n in nodes[at]}
            graph = extract_regions(self.root, [*units, (None, [output])], self.runtime, runs)
        graph.lint()
        return Lowered(
            fx.GraphModule(self.root, graph, class_name="LoweredModel"),
            program,
            {
                block: [self._spec(steps) for steps in ahead if steps.recomputed]
                for block, ahead in program.ahead.items()
            },
            program.gathers,
        )

    def _value(self, name: str, provider: Node) -> fx.Node:
        value = self.values[provider]
        return value[name] if isinstance(value, dict) else value

    def node(self, node: Node, reads: Mapping[str, fx.Node]) -> Any:
        """Add a program node's calls; return its result's fx node, or a dict of them by result name."""
        match node:
            case Argument():
                if self.source.tensors[node.name].kind == "constant":
                    return self._constant(node.name)
                return self.graph.placeholder(node.name)
            case Slice():
                (name,) = reads
                atoms, layout = self.strategy.atoms(name), node.layout
                if self.share is not None:
                    atoms, layout = self.share.as_passed(name, atoms, layout)
                # No steps: `take_shard` cuts what is there, without any collective.
                spec = EdgeSpec(name, atoms, node.mesh, layout, layout, (), (), zigzag=node.zigzag)
                return self.function(take_shard, "take_shard", reads.values(), self.context, spec)
            case Detach():
                (name,) = reads
                return self.function(torch.Tensor.detach, f"{name}_idle", reads.values())
            case Move(product=False):
                spec = self._spec(node.steps)
                return self.function(redistribute, "redistribute", reads.values(), self.runtime, spec)
            case Move():
                return self._bring(node, reads)
            case Compute(product=None):
                return self._compute(node, reads)
            case Compute():
                return self._linear_beside(node, reads)
            case GatherAgain():
                return self.function(gather_again, "gather_again", reads.values(), self.runtime)
            case KeepViews():
                return self.function(keep_gathered, "keep_gathered", reads.values(), self.runtime)
            case BeginBlock():
                own, following = (tuple(map(self._spec, steps)) for steps in (node.own, node.following))
                shards = (reads[spec.name] for spec in (*own, *following))
                return self.function(
                    begin_block, "begin_block", shards, self.runtime, node.block, own, following
                )
            case BeginBlockBackward():
                name, bound = "begin_block_backward", (self.runtime, node.block)
                return [self.function(begin_block_backward, name, (v,), *bound) for v in reads.values()]
        raise AssertionError(f"no case translates {node}")

    def function(
        self, function: Callable[..., Any], name: str, args: Iterable[fx.Node], *bound: Any
    ) -> fx.Node:
        """Add a call of a function, with ``bound`` before ``args``; ``name`` labels it in printed graphs."""
        call = functools.partial(function, *bound)
        call.__name__ = name  # type: ignore[attr-defined]  # fx names the node after its target
        return self.graph.call_function(call, tuple(args))

    def item(self, node: fx.Node, number: int) -> fx.Node:
        return self.graph.call_function(operator.getitem, (node, number))

    def _constant(self, name: str) -> fx.Node:
        """Add a constant of the captured graph as a buffer of the lowered module."""
        value = self.source.constants.get(name)
        if value is None:
            tensor = self.source.tensors[name]
            value = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
        # Equal constants share their memory; under two names they would not do so on another device.
        buffers = self.root.named_buffers(recurse=False)
        attribute = next((buffer_name for buffer_name, kept in buffers if kept is value), None)
        if attribute is None:
            # A dot would be a path of submodules.
            attribute = f"constant_{name.replace('.', '_')}"
            self.root.register_buffer(attribute, value, persistent=False)
        return self.graph.get_attr(attribute)

    def _compute(self, node: Compute, reads: Mapping[str, fx.Node]) -> dict[str, fx.Node]:
        op, call = node.op, node.call
        args, kwargs = call.arguments(reads.__getitem__)
        # Constructors (`zeros`, `arange`) only: all other calls compute where their operands are.
        kwargs |= _device_argument(call, self.context.device)
        made = self.graph.create_node("call_function", bind(call, self.context), args, kwargs, name=op.name)
        made.meta["operator"] = op.name
        # An operator with one result that is a tuple has a numbered output too ("split.0"). A call that gives
        # one tensor under a numbered name (`native_dropout` that became `dropout`): nothing to unpack.
        single = len(op.outputs) == 1 and "." not in op.outputs[0].removeprefix(op.name)
        if op.target in KERNELS and len(op.outputs) > 1:
            # An operator that is a kernel of ours returns its results, whatever their names.
            return {name: self.item(made, number) for number, name in enumerate(op.outputs)}
        if single or op.target in KERNELS or returns_one_tensor(op.target):
            return dict.fromkeys(op.outputs, made)
        return {name: self.item(made, int(name.rsplit(".", 1)[1])) for name in op.outputs}

    # -- edges ------------------------------------------------------------------------------------

    @functools.cached_property
    def _orders(self) -> Mapping[str, tuple[int, ...]]:
        # The same orders as under measurement: kernels are timed on tensors that lie as they will lie in the
        # step.
        return memory_orders(self.strategy.graph)

    def _bring(self, node: Move, reads: Mapping[str, fx.Node]) -> fx.Node:
        (value,) = reads.values()
        spec, link = self._spec(node.steps), value
        if spec.forward:
            pair = self.function(bring, "bring", reads.values(), self.runtime, spec)
            value, link = (self.item(pair, number) for number in (0, 1))
        self.links[node] = link
        return value

    def _linear_beside(self, node: Compute, reads: Mapping[str, fx.Node]) -> dict[str, fx.Node]:
        product = node.product
        assert product is not None
        provider = node.reads[product.read]
        assert isinstance(provider, Move)
        spec = self._spec(provider.steps)
        operands = (reads[name] for name in (product.read, product.weight, product.bias) if name)
        args, bound = (self.links[provider], *operands), (self.runtime, spec, product.transposed)
        pair = self.function(linear_beside, node.op.name, args, *bound)
        pair.meta["operator"] = node.op.name
        passed_on = {node.passes_on: self.item(pair, 0)} if node.passes_on else {}
        return passed_on | {node.op.outputs[0]: self.item(pair, 1)}

    def _spec(self, steps: EdgeSteps) -> EdgeSpec:
        if steps not in self._specs:
            order = self._orders.get(steps.edge.tensor) if steps.edge.kind == "activation" else None
            self._specs[steps] = edge_spec(self.strategy, steps, order)
        return self._specs[steps]


def lower(
    strategy: Strategy, runtime: Runtime, *, evaluating: bool = False, share: BatchShare | None = None
) -> Lowered:
    """Lower a strategy to the fx graph of the rank of ``runtime``.

    Args:
        evaluating: whether to lower a training graph as in eval mode.
        share: the division of the batch among ranks; by default every rank has all rows.
    """
    program = lower_program(strategy, runtime.place, evaluating=evaluating)
    return Interpretation(strategy, runtime, share).lowered(program)
