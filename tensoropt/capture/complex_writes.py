"""Writes into a part of a complex tensor, rewritten as writes into its real and imaginary parts.

``out[..., :modes] = spectrum`` (as in the layers of Fourier neural operators) is exported as a
``slice_scatter``, which PyTorch cannot differentiate for complex numbers. The real and imaginary parts form a
last dim of size two, which such a write never touches: the same write on ``view_as_real`` is equivalent,
forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch

_WRITES = {
    "aten.slice_scatter.default": "src",
    "aten.select_scatter.default": "src",
    "aten.diagonal_scatter.default": "src",
    "aten.index_put.default": "values",
}
"""Writes, mapped to the argument that is written."""
_DIMS = ("dim", "dim1", "dim2")


def write_complex_as_real(graph: torch.fx.Graph) -> None:
    """Rewrite such writes in place."""
    # A conjugate is only a flag on a tensor, and has no parts to view before it is resolved.
    conjugated = any(str(node.target) == "aten._conj.default" for node in graph.nodes)
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if str(node.target) not in _WRITES or not isinstance(value, torch.Tensor) or not value.is_complex():
            continue
        arguments = _arguments(node)
        # The new dim is last, so dims counted from the end would shift.
        arguments |= {name: arguments[name] % value.dim() for name in _DIMS if name in arguments}
        with graph.inserting_before(node):
            for name in ("self", _WRITES[str(node.target)]):
                if conjugated:
                    resolve = torch.ops.aten.resolve_conj.default
                    arguments[name] = _called(graph, node, resolve, arguments[name])
                view = torch.ops.aten.view_as_real.default
                arguments[name] = _called(graph, node, view, arguments[name])
            if "dim1" in arguments:
                # A diagonal is the last dim of the value written to it, behind that of the parts.
                turn = torch.ops.aten.transpose.int
                arguments["src"] = _called(graph, node, turn, arguments["src"], -2, -1)
            real = _called(graph, node, node.target, *arguments.values())
            whole = _called(graph, node, torch.ops.aten.view_as_complex.default, real)
        node.replace_all_uses_with(whole)
        graph.erase_node(node)


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """All arguments of a call by name, in order, including those left out."""
    assert isinstance(node.target, torch._ops.OpOverload)
    known = node.target._schema.arguments
    given = dict(zip((argument.name for argument in known), node.args, strict=False)) | dict(node.kwargs)
    return {argument.name: given.get(argument.name, argument.default_value) for argument in known}


def _called(graph: torch.fx.Graph, like: torch.fx.Node, target: Any, *args: Any) -> torch.fx.Node:
    """A call with the same position in the model as another one."""
    node = graph.call_function(target, args)
    node.meta = {key: like.meta[key] for key in ("stack_trace", "nn_module_stack") if key in like.meta}
    node.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]))
    return node
