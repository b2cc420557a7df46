"""The operator graph: the computation of one training step as plain data, without PyTorch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

_TensorKind = Literal["input", "parameter", "buffer", "constant", "activation"]

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex64": 8,
    "complex128": 16,
}
FLOATING = frozenset({"float64", "float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class Ref:
    name: str


@dataclass(frozen=True, slots=True)
class TorchLiteral:
    """A dtype or memory format as an operator's argument; ``name``: the attribute of ``torch``."""

    name: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the graph at its global shape.

    ``key``: a parameter's or buffer's ``state_dict`` key, or an input's position in the flattened call.
    ``dtype``: the dtype in which operators read the tensor. ``master_dtype``: a wider dtype in which a
    parameter is stored, and from which it is cast at every use.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: _TensorKind
    requires_grad: bool = False
    key: str | None = None
    master_dtype: str | None = None

    @property
    def stored_dtype(self) -> str:
        """The dtype of a parameter between steps, of its gradient and of its optimizer state."""
        return self.master_dtype or self.dtype

    @property
    def stored_element_bytes(self) -> int:
        return DTYPE_BYTES[self.stored_dtype]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        return self.elements * self.element_bytes


@dataclass(frozen=True)
class Operator:
    """One ATen-level call; ``args``/``kwargs`` hold a :class:`Ref` in place of each tensor.

    ``module`` is the dotted path of the submodule that made the call; ``source`` is the line of its code.
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[str, ...]
    module: str = ""
    source: str = ""

    def inputs(self) -> tuple[str, ...]:
        """Return the names of the tensors that the operator reads, in argument order, with repetitions."""
        return self._inputs

    @cached_property
    def _inputs(self) -> tuple[str, ...]:
        return tuple(iter_refs((self.args, tuple(self.kwargs.values()))))


def iter_refs(value: Any) -> Iterator[str]:
    """Yield the names of the tensors in an argument, or in nested lists and tuples of them, in order."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from iter_refs(item)


def map_refs(value: Any, function: Callable[[str], Any]) -> Any:
    """Return ``value`` with every :class:`Ref`, also in lists and tuples, replaced by ``function(name)``."""
    if isinstance(value, Ref):
        return function(value.name)
    if isinstance(value, tuple):
        return tuple(map_refs(item, function) for item in value)
    if isinstance(value, list):
        return [map_refs(item, function) for item in value]
    return value


@dataclass(frozen=True)
class OperatorGraph:
    """A functional, topologically ordered operator graph.

    Attributes:
        tensors: all tensors, by name.
        operators: operators in execution order.
        inputs: names of the tensors that a caller passes, in the order of the flattened call.
        outputs: names of the returned tensors; in training the first is the scalar loss.
        mutations: name of the tensor with a buffer's value after the step, by the buffer's name.
        constants: values of constants by name, with size 1 along dims where they do not change; meta tensors
            if the model is on the meta device.
        kept_constants: constant -> (first constant that shares its memory, size of this memory in bytes).
        aliases: ``state_dict`` key in ``tensors``, by further key of the same (tied) parameter.
        training: whether a backward pass follows.
        notes: notes for the user on decisions of the capture.
        compute_dtype: ``float32`` for the model's own dtypes; ``bfloat16`` with inserted casts
            (:mod:`tensoropt.capture.precision`).
        expert_imbalance: predicted tokens of the busiest rank in expert parallelism, over the ranks' mean.
    """

    tensors: Mapping[str, Tensor]
    operators: tuple[Operator, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    mutations: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    kept_constants: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    training: bool = True
    notes: tuple[str, ...] = ()
    compute_dtype: str = "float32"
    expert_imbalance: float = 1.0

    def __post_init__(self) -> None:
        validate(self)

    @property
    def constant_bytes(self) -> int:
        """The size in bytes of the constants, all of which every rank stores; shared memory counts once."""
        kept = (self.kept_constants[name] for name in self.tensors if name in self.kept_constants)
        return sum(dict(kept).values())

    @cached_property
    def producer(self) -> dict[str, Operator]:
        return {output: op for op in self.operators for output in op.outputs}

    @cached_property
    def consumers(self) -> dict[str, tuple[Operator, ...]]:
        """The operators that read each tensor, each once and in execution order, by the tensor's name."""
        readers: dict[str, dict[str, Operator]] = {}
        for op in self.operators:
            for name in op.inputs():
                readers.setdefault(name, {})[op.name] = op
        return {name: tuple(ops.values()) for name, ops in readers.items()}

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors.values() if t.kind == "parameter")

    @cached_property
    def largest_trained(self) -> tuple[int, int]:
        """(Elements of the largest trained parameter, how many parameters have that size); (0, 0) if none."""
        sizes = [tensor.elements for tensor in self.parameters if tensor.requires_grad]
        return max(sizes, default=0), sizes.count(max(sizes, default=0))

    @cached_property
    def by_name(self) -> dict[str, Operator]:
        return {op.name: op for op in self.operators}

    @cached_property
    def places(self) -> dict[str, int]:
        return {op.name: place for place, op in enumerate(self.operators)}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that determines the computation: structure, shapes and dtypes."""
        tensors = [
            # Only if it differs, so that the fingerprints of older plans stay.
            (t.name, t.shape, t.dtype, t.kind, t.requires_grad, t.key, *filter(None, [t.master_dtype]))
            for t in self.tensors.values()
        ]
        operators = [
            (o.name, o.target, repr(o.args), repr(dict(o.kwargs)), o.outputs) for o in self.operators
        ]
        payload = json.dumps([tensors, operators, self.inputs, self.outputs, self.training])
        return hashlib.sha256(payload.encode()).hexdigest()


def validate(graph: OperatorGraph) -> None:
    """Check that names are unique and that each tensor is made once, before it is read.

    Raises:
        AssertionError: an operator or a tensor violates this; the message has its name.
    """
    defined = {name for name, t in graph.tensors.items() if t.kind != "activation"}
    names: set[str] = set()
    for op in graph.operators:
        assert op.name not in names, f"two operators are called {op.name}"
        names.add(op.name)
        for name in op.inputs():
            assert name in defined, f"{op.name} reads {name} before it is made"
        for name in op.outputs:
            assert name in graph.tensors, f"{op.name} makes the unknown tensor {name}"
            assert name not in defined, f"{name} is made twice"
            defined.add(name)
    for name in (*graph.inputs, *graph.outputs, *graph.mutations, *graph.mutations.values()):
        assert name in defined, f"{name} is listed but never made"


def graph_to_dict(graph: OperatorGraph) -> dict[str, Any]:
    """Return the graph as plain data, without its constants' values.

    Raises:
        TypeError: an operator has an argument that is not plain data; the message names the operator.
    """
    data = {part.name: getattr(graph, part.name) for part in fields(graph) if part.name != "constants"}
    if graph.expert_imbalance == 1.0:  # as in files of earlier versions
        del data["expert_imbalance"]
    return data | {
        "tensors": [
            [t.name, t.shape, t.dtype, t.kind, t.requires_grad, t.key, t.master_dtype]
            for t in graph.tensors.values()
        ],
        "operators": [_operator_to_dict(op) for op in graph.operators],
    }


def graph_from_dict(data: Mapping[str, Any]) -> OperatorGraph:
    """Return the graph of which :func:`graph_to_dict` made ``data``; the fingerprint is the same."""
    parts = dict(data)
    parts["tensors"] = {name: Tensor(name, tuple(shape), *rest) for name, shape, *rest in data["tensors"]}
    parts["operators"] = tuple(_operator_from_dict(op) for op in data["operators"])
    for name in ("inputs", "outputs", "notes"):
        parts[name] = tuple(data[name])
    kept = data.get("kept_constants", {})  # files of earlier versions lack it
    parts["kept_constants"] = {name: tuple(one) for name, one in kept.items()}
    return OperatorGraph(**parts)


def _operator_to_dict(op: Operator) -> dict[str, Any]:
    try:
        args, kwargs = _plain(op.args), {k: _plain(v) for k, v in op.kwargs.items()}
    except TypeError as error:
        raise TypeError(f"{op.name} ({op.target}) has an argument that cannot be saved: {error}") from None
    return {part.name: getattr(op, part.name) for part in fields(op)} | {"args": args, "kwargs": kwargs}


def _operator_from_dict(data: Mapping[str, Any]) -> Operator:
    kwargs = {k: _value(v) for k, v in data["kwargs"].items()}
    outputs = tuple(data["outputs"])
    return Operator(**{**data, "args": _value(data["args"]), "kwargs": kwargs, "outputs": outputs})


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
