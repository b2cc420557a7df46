"""Operator graphs as plain data, ready for JSON. The values of constants are left out, because nothing that
prices or shards a graph needs them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tensoropt.graph.ir import Operator, OperatorGraph, Ref, Tensor, TorchLiteral


def graph_to_dict(graph: OperatorGraph) -> dict[str, Any]:
    """Return the graph as plain data, without its constants' values.

    Raises:
        TypeError: an operator has an argument that is not plain data; the message names the operator.
    """
    return {
        "tensors": [
            [t.name, list(t.shape), t.dtype, t.kind, t.requires_grad, t.key, t.master_dtype]
            for t in graph.tensors.values()
        ],
        "operators": [_operator_to_dict(op) for op in graph.operators],
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "mutations": dict(graph.mutations),
        "kept_constants": {name: list(kept) for name, kept in graph.kept_constants.items()},
        "aliases": dict(graph.aliases),
        "training": graph.training,
        "notes": list(graph.notes),
        "compute_dtype": graph.compute_dtype,
    }


def graph_from_dict(data: Mapping[str, Any]) -> OperatorGraph:
    """Inverse of :func:`graph_to_dict`; the fingerprint is preserved."""
    tensors = [Tensor(name, tuple(shape), *rest) for name, shape, *rest in data["tensors"]]
    return OperatorGraph(
        tensors={t.name: t for t in tensors},
        operators=tuple(_operator_from_dict(op) for op in data["operators"]),
        inputs=tuple(data["inputs"]),
        outputs=tuple(data["outputs"]),
        mutations=dict(data["mutations"]),
        # Files of earlier versions lack this field.
        kept_constants={
            name: (first, size) for name, (first, size) in data.get("kept_constants", {}).items()
        },
        aliases=dict(data["aliases"]),
        training=data["training"],
        notes=tuple(data["notes"]),
        compute_dtype=data["compute_dtype"],
    )


def _operator_to_dict(op: Operator) -> dict[str, Any]:
    try:
        args, kwargs = _plain(op.args), {k: _plain(v) for k, v in op.kwargs.items()}
    except TypeError as error:
        raise TypeError(f"{op.name} ({op.target}) has an argument that cannot be saved: {error}") from None
    return {
        "name": op.name,
        "target": op.target,
        "args": args,
        "kwargs": kwargs,
        "outputs": list(op.outputs),
        "module": op.module,
        "source": op.source,
    }


def _operator_from_dict(data: Mapping[str, Any]) -> Operator:
    return Operator(
        data["name"],
        data["target"],
        _value(data["args"]),
        {k: _value(v) for k, v in data["kwargs"].items()},
        tuple(data["outputs"]),
        data["module"],
        data["source"],
    )


def _plain(value: Any) -> Any:
    match value:
        case Ref(name):
            return {"ref": name}
        case TorchLiteral(name):
            return {"torch": name}
        case tuple():
            return {"tuple": [_plain(v) for v in value]}
        case list():
            return [_plain(v) for v in value]
        case float() if not math.isfinite(value):
            return {"float": repr(value)}
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def _value(data: Any) -> Any:
    match data:
        case {"ref": name}:
            return Ref(name)
        case {"torch": name}:
            return TorchLiteral(name)
        case {"tuple": items}:
            return tuple(_value(v) for v in items)
        case {"float": text}:
            return float(text)
        case list():
            return [_value(v) for v in data]
    return data
