"""The activations that get a gradient: those on a path from a parameter to the loss.

A tensor may depend on parameters and still get no gradient: scores that only determine which experts are
chosen, states that nothing reads. Export does not distinguish the two; backward keeps and sends nothing for
the latter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tensoropt.graph import Operator, OperatorGraph, Ref, Tensor, map_refs


def without_idle_gradients(graph: OperatorGraph) -> OperatorGraph:
    """The graph without ``requires_grad`` on tensors that the loss does not depend on smoothly.

    A parameter that is only read without gradient is never trained: PyTorch's optimizers leave it unchanged,
    so it counts as frozen here, which a note reports. A parameter that some of its readers train keeps its
    gradient; :meth:`~tensoropt.sharding.groups.GroupGraph.learns` distinguishes these.

    Operators through which no gradient flows read a detached tensor if others differentiate through it, so
    that each tensor between two operators either has a gradient or has none.
    """
    if not graph.training:
        return graph
    # In training the only output, the loss.
    reached = {graph.outputs[0]}
    for op in reversed(graph.operators):
        if not reached.isdisjoint(op.outputs):
            reached.update(name for name in op.inputs() if graph.tensors[name].requires_grad)
    tensors = {
        name: replace(tensor, requires_grad=False)
        if tensor.kind in ("activation", "parameter") and tensor.requires_grad and name not in reached
        else tensor
        for name, tensor in graph.tensors.items()
    }
    operators = []
    for op in graph.operators:
        if not reached.isdisjoint(op.outputs) or op.target == _DETACH:
            operators.append(op)
            continue
        smooth = [n for n in dict.fromkeys(op.inputs()) if _differentiated(tensors[n])]
        # One detach for all readers that take no gradient.
        operators += [_detached(name, op, tensors) for name in smooth if f"{name}_detached" not in tensors]
        operators.append(_reading(op, {name: f"{name}_detached" for name in smooth}))
    idle = [str(t.key) for t in graph.parameters if t.requires_grad and not tensors[t.name].requires_grad]
    notes = graph.notes
    if idle:
        few = ", ".join(idle[:5]) + (", ..." if len(idle) > 5 else "")
        notes = (*notes, f"{len(idle)} parameters are read without gradient alone and not trained: {few}")
    return replace(graph, tensors=tensors, operators=tuple(operators), notes=notes)


_DETACH = "aten.detach.default"


def _differentiated(tensor: Tensor) -> bool:
    return tensor.kind == "activation" and tensor.requires_grad


def _detached(name: str, reader: Operator, tensors: dict[str, Tensor]) -> Operator:
    result = f"{name}_detached"
    tensors[result] = replace(tensors[name], name=result, requires_grad=False)
    return Operator(result, _DETACH, (Ref(name),), {}, (result,), reader.module, reader.source)


def _reading(op: Operator, names: Mapping[str, str]) -> Operator:
    if not names:
        return op

    def renamed(name: str) -> Ref:
        return Ref(names.get(name, name))

    kwargs = {key: map_refs(value, renamed) for key, value in op.kwargs.items()}
    return replace(op, args=tuple(map_refs(a, renamed) for a in op.args), kwargs=kwargs)
