"""The nodes that every kind of plan puts into the fx graph to which it is lowered: local calls, their
results, constants."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tensoropt.graph import Operator, OperatorGraph, map_refs
from tensoropt.ops.calls import LocalCall, literal
from tensoropt.ops.context import ShardContext
from tensoropt.ops.overloads import returns_one_tensor
from tensoropt.ops.registry import bind, resolve_function


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
    value = constant_value(source, name)
    # Equal constants share their memory; under two names they would not do so on another device.
    same = (known for known, kept in root.named_buffers(recurse=False) if kept is value)
    attribute = next(same, None)
    if attribute is None:
        # A dot would be a path of submodules.
        attribute = f"constant_{name.replace('.', '_')}"
        root.register_buffer(attribute, value, persistent=False)
    return graph.get_attr(attribute)


def constant_value(source: OperatorGraph, name: str) -> torch.Tensor:
    """Return the folded value of a constant; without data if the graph was captured without (fake ranks)."""
    if name in source.constants:
        value: torch.Tensor = source.constants[name]
        return value
    tensor = source.tensors[name]
    return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
