"""Rebuild an operator graph as an ``fx.GraphModule`` that computes what the captured model computes.

One call per operator, parameters under the model's own keys (tied ones once, with all their names), and
buffers written at the end of the call, as in a functional graph. NetSplit (section 4) runs models in this
way.

The same graph in double precision, operator for operator, distinguishes rounding from errors.

Capturing a model converted to float64 gives a different graph: ``x.float()`` does nothing in a float32 model
and is a cast (that rounds) in the other. Widening the captured graph keeps its operators and names, so that a
plan for one is a plan for the other. Under mixed precision its casts remain, from double to double.

Registration of a module's parameters and buffers by their state-dict keys.
"""

from __future__ import annotations

import contextlib
import keyword
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import fx

from tensoropt.errors import CaptureError
from tensoropt.graph import Operator, OperatorGraph, TorchLiteral, map_refs
from tensoropt.ops.overloads import returns_one_tensor

_WIDER = dict.fromkeys(("bfloat16", "float16", "float32"), "float64") | {"complex64": "complex128"}


def in_double(graph: OperatorGraph) -> OperatorGraph:
    """The graph with every tensor, constant and dtype argument of a narrower precision widened to double."""
    return replace(
        graph,
        tensors={
            name: replace(
                tensor,
                dtype=_WIDER.get(tensor.dtype, tensor.dtype),
                master_dtype=tensor.master_dtype and _WIDER[tensor.master_dtype],
            )
            for name, tensor in graph.tensors.items()
        },
        operators=tuple(
            replace(op, args=_argument(op.args), kwargs=_argument(op.kwargs)) for op in graph.operators
        ),
        constants={name: doubled(value) for name, value in graph.constants.items()},
    )


def doubled(value: torch.Tensor) -> torch.Tensor:
    """The tensor in double precision if it is narrower, otherwise the tensor itself."""
    wider = {getattr(torch, narrow): getattr(torch, wide) for narrow, wide in _WIDER.items()}
    return value.to(wider.get(value.dtype, value.dtype))


def _argument(value: Any) -> Any:
    if isinstance(value, TorchLiteral):
        return TorchLiteral(_WIDER.get(value.name, value.name))
    if isinstance(value, Mapping):
        return {key: _argument(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_argument(item) for item in value)
    return value


def register(root: torch.nn.Module, key: str, tensor: torch.Tensor) -> None:
    """Make ``tensor`` a parameter (if it is one) or a buffer of ``root`` under a dotted key.

    Missing submodules along the key are created.
    """
    module = root
    *path, last = key.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, torch.nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, torch.nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor)


@contextlib.contextmanager
def any_names() -> Iterator[None]:
    """Allow module names with quotes and newlines, or Python keywords; PyTorch writes them into code
    unchanged."""

    def written(base: str, target: str) -> str:
        for name in target.split("."):
            plain = name.isidentifier() and not keyword.iskeyword(name)
            base = f"{base}.{name}" if plain else f"getattr({base}, {name!r})"
        return base

    with mock.patch.object(torch.fx.graph, "_format_target", written):
        yield


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
