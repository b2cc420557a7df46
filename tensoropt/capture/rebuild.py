"""The way back: an operator graph as an ``fx.GraphModule`` that computes what the captured model computes.

One call per operator, parameters under the model's own keys (tied ones once, with all their names), and
buffers written at the end of the call, as in a functional graph. NetSplit (section 4) runs models in this
way.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tensoropt.capture.keys import any_names, register
from tensoropt.errors import CaptureError
from tensoropt.graph import Operator, OperatorGraph, TorchLiteral, map_refs
from tensoropt.ops.overloads import returns_one_tensor


class _Rebuilding:
    """A module under construction: the node that each name of the operator graph has become so far."""

    def __init__(self, graph: OperatorGraph, values: Mapping[str, torch.Tensor]):
        self.source, self.values = graph, values
        self.root = torch.nn.Module()
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.written: dict[str, fx.Node] = {}

    def build(self) -> fx.GraphModule:
        """Return the graph as a module, with its nodes in the graph's order."""
        for name in self.source.inputs:
            self.nodes[name] = self.graph.placeholder(name)
        for tensor in self.source.tensors.values():
            if tensor.kind in ("parameter", "buffer", "constant"):
                self.nodes[tensor.name] = self._stored(tensor.name)
        for op in self.source.operators:
            self._operator(op)
        # Last, when every reader has read the old value.
        for buffer, value in self.source.mutations.items():
            self.graph.call_method("copy_", (self.written[buffer], self.nodes[value]))
        outputs = tuple(self.nodes[name] for name in self.source.outputs)
        self.graph.output(outputs[0] if len(outputs) == 1 else outputs)
        self.graph.lint()
        with any_names():
            module = fx.GraphModule(self.root, self.graph, class_name="RebuiltModel")
        self._tie(module)
        return module

    def _stored(self, name: str) -> fx.Node:
        tensor = self.source.tensors[name]
        if tensor.kind == "constant":
            return self._constant(name)
        key = tensor.key or name
        if key not in self.values:
            raise CaptureError(f"the model has no {tensor.kind} called {key}, which its graph needs")
        value = self.values[key]
        if tensor.kind == "parameter":
            value = value if isinstance(value, torch.nn.Parameter) else torch.nn.Parameter(value)
        register(self.root, key, value)
        node = self.graph.get_attr(key)
        if name not in self.source.mutations:
            return node
        # Read as a copy: backward may need the old value, and the buffer is written before backward runs.
        self.written[name] = node
        return self.graph.call_method("clone", (node,))

    def _constant(self, name: str) -> fx.Node:
        """The node of a constant, which is stored narrowed to one element where it does not change, and
        widened here."""
        tensor = self.source.tensors[name]
        if name not in self.source.constants:
            raise CaptureError(f"the constant {name} has no data: the model was captured on the meta device")
        value = self.source.constants[name]
        key = f"constant_{name.replace('.', '_')}"
        self.root.register_buffer(key, value, persistent=False)
        node = self.graph.get_attr(key)
        if tuple(value.shape) == tensor.shape:
            return node
        return self.graph.call_function(torch.ops.aten.expand.default, (node, list(tensor.shape)))

    def _operator(self, op: Operator) -> None:
        args = tuple(_literal(map_refs(a, self.nodes.__getitem__)) for a in op.args)
        kwargs = {k: _literal(map_refs(v, self.nodes.__getitem__)) for k, v in op.kwargs.items()}
        node = self.graph.create_node("call_function", _target(op), args, kwargs, name=op.name)
        if op.outputs == (op.name,):
            self.nodes[op.name] = node
            return
        for name in op.outputs:
            if returns_one_tensor(op.target):
                self.nodes[name] = node
            else:
                index = int(name.rsplit(".", 1)[1])
                self.nodes[name] = self.graph.call_function(operator.getitem, (node, index))

    def _tie(self, module: fx.GraphModule) -> None:
        for further, key in self.source.aliases.items():
            register(module, further, module.get_parameter(key))


def _literal(value: Any) -> Any:
    if isinstance(value, TorchLiteral):
        return getattr(torch, value.name)
    if isinstance(value, (list, tuple)):
        return type(value)(_literal(item) for item in value)
    return value


_VIEWS = frozenset({"aten.view.default", "aten._unsafe_view.default"})


def _target(op: Operator) -> Any:
    """The call's target. Copies that only made a tensor contiguous are not in the graph: a view may have to
    copy."""
    if op.target in _VIEWS:
        return torch.ops.aten.reshape.default
    namespace, name, overload = op.target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def rebuild(graph: OperatorGraph, model: torch.nn.Module) -> fx.GraphModule:
    """Return the captured graph as a separate module with the model's own parameters and buffers.

    It takes the graph's inputs (the tensors of the flattened call, in order) and returns its outputs, which
    in training is the scalar loss.

    Raises:
        CaptureError: the model lacks a parameter or buffer, or a constant has no data (meta device).
    """
    values: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
    values |= dict(model.named_parameters(remove_duplicate=False))
    return _Rebuilding(graph, values).build()
