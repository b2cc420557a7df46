"""Conversion of an ONNX file's nodes to PyTorch calls, in one pass that collects all errors.

A node that fails does not stop the pass; only nodes that depend on it are skipped. The final error therefore
names every node that cannot be converted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import torch

from tensoropt.capture.lines import shown_error, shown_names
from tensoropt.capture.onnx.reader import MAX_NODES, label, ordered, read_outside, reads, subgraphs
from tensoropt.capture.onnx.values import FxBuilder, OnnxError, OnnxValue, Traced
from tensoropt.capture.onnx.weights import (
    INSPECTED_ELEMENTS,
    attribute_value,
    find_weights,
    read_tensor,
    shape_and_dtype,
)


@dataclass(frozen=True)
class Call:
    """One ONNX node, as the function that converts it receives it.

    Attributes:
        op: name of the ONNX operator.
        operands: one value per input; None if an optional input is left out.
        attributes: attributes of the node by name, as Python values, tensors, or ONNX graphs.
        wanted: for each output, whether a node reads it or the graph returns it.
        batch: (batch size in the file, requested batch size), if a fixed size was replaced.
        run: function that evaluates a subgraph on given inputs and returns the subgraph's outputs.
    """

    op: str
    operands: Sequence[Traced]
    attributes: Mapping[str, Any]
    wanted: Sequence[bool]
    builder: FxBuilder
    batch: tuple[int, int] | None
    run: Callable[..., list[Any]]

    def __len__(self) -> int:
        return len(self.operands)

    def __iter__(self) -> Iterator[Traced]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Traced:
        """Return the required operand at a position."""
        value = self.optional(index)
        if value is None:
            raise OnnxError(f"its input {index} is missing")
        return value

    def optional(self, index: int) -> Traced:
        """Return the operand at a position; None if the file leaves it out."""
        return self.operands[index] if index < len(self.operands) else None

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the node, or ``default`` if the file has none."""
        return self.attributes.get(name, default)

    def wants(self, index: int) -> bool:
        """Return whether the output at a position is read."""
        return index < len(self.wanted) and self.wanted[index]

    def known(self, index: int, role: str = "") -> torch.Tensor:
        """Return the data of an operand that must be constant; ``role`` names the operand in the error.

        Raises:
            OnnxError: the operand depends on an input of the model.
        """
        value = self[index]
        if value.data is None:
            raise OnnxError(
                f"its {role or f'input {index}'} depends on an input's values, so later shapes are not fixed"
            )
        return value.data

    def ints(self, index: int, role: str = "") -> list[int]:
        """Return a constant operand as a list of integers."""
        return [int(v) for v in self.known(index, role).reshape(-1).tolist()]

    def ints_or(self, index: int, default: Any, role: str = "") -> Any:
        """Return a constant operand as a list of integers; ``default`` if the file leaves it out."""
        return default if self.optional(index) is None else self.ints(index, role)

    def scalar(self, index: int, default: Any = None, role: str = "") -> Any:
        """Return a constant operand of one element as a Python number, or ``default`` if it is left out."""
        if self.optional(index) is None:
            return default
        return self.known(index, role).reshape(()).item()

    def dim(self, name: str = "axis", default: int = 0) -> int:
        """Return the dim of operand 0 that an attribute names, counted from the front."""
        return positive(int(self.attribute(name, default)), self[0].ndim)


def positive(dim: int, dims: int) -> int:
    """Return a dim counted from the front; a negative ``dim`` counts from the end of ``dims`` dims.

    Raises:
        OnnxError: there is no such dim.
    """
    if not -dims <= dim < max(dims, 1):
        raise OnnxError(f"axis {dim} does not exist in a tensor of {dims} dims")
    return dim % dims if dims else 0


_Converter = Callable[[Call], Any]
_CONVERTERS: dict[str, _Converter] = {}


def converter(*names: str) -> Callable[[_Converter], _Converter]:
    """Return a decorator that registers a function as the converter of ONNX operators, by name."""

    def register(function: _Converter) -> _Converter:
        _CONVERTERS.update(dict.fromkeys(names, function))
        return function

    return register


def converters(**functions: _Converter) -> None:
    """Register converters by ONNX operator name, for operators that are one PyTorch call."""
    _CONVERTERS.update(functions)


def _find_converter(node: onnx.NodeProto) -> _Converter | None:
    return _CONVERTERS.get(node.op_type) if node.domain in ("", "ai.onnx") else None


_LISTED = 12


_FAILED: Any = object()
"""A placeholder for the result of a node that cannot be imported."""


class _Scope(NamedTuple):
    """The values computed so far in one ONNX graph, by name, and its initializers, which are read on first
    use."""

    values: dict[str, Any]
    stored: Mapping[str, onnx.TensorProto]


class Importer:
    """The conversion of one file's graph.

    Args:
        model: the model, checked and inlined.
        folder: the model file's folder, the only source of external data; None for models in memory.
        device: device of the weights; on ``meta`` only their shapes are read.
        batch: (batch size in the file, requested batch size), if a fixed size was replaced.
    """

    def __init__(
        self, model: onnx.ModelProto, folder: Path | None, device: str, batch: tuple[int, int] | None
    ):
        self.model, self.folder, self.device, self.batch = model, folder, device, batch
        self.builder = FxBuilder(device)
        self.weights = find_weights(model.graph)
        self.unsupported: dict[str, list[str]] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._tables = _embedding_tables(model.graph)
        self._nodes_run = 0

    # -- one graph --------------------------------------------------------------------------------

    def convert(self, inputs: Mapping[str, OnnxValue], outputs: Sequence[str]) -> list[OnnxValue]:
        """Convert all nodes that the tensors named ``outputs`` depend on; return these tensors.

        Raises:
            OnnxError: a node cannot be converted. The message lists all unsupported operators and errors.
        """
        scope = _Scope(dict(inputs), self._initializers(self.model.graph))
        self._evaluate(self.model.graph.node, scope, outputs)
        values = [self._lookup(name, scope) for name in outputs]
        self._refuse()
        for name, value in zip(outputs, values, strict=True):
            if not isinstance(value, OnnxValue):
                raise OnnxError(f"the output '{name}' is a sequence; only tensors can be returned")
        return values

    @staticmethod
    def _initializers(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
        if len(graph.sparse_initializer):
            raise OnnxError("it has sparse initializers, which cannot be imported; store them dense")
        stored = {t.name: t for t in graph.initializer}
        if len(stored) != len(graph.initializer):
            names = [t.name for t in graph.initializer]
            twice = next(name for name in names if names.count(name) > 1)
            raise OnnxError(f"the initializer '{twice}' is defined twice")
        return stored

    def _evaluate(self, nodes: Iterable[onnx.NodeProto], scope: _Scope, outputs: Sequence[str]) -> None:
        needed = ordered(list(nodes), scope.values.keys() | scope.stored.keys(), list(outputs))
        # Optional outputs that nothing reads are not requested from converters, some of which cannot provide
        # them.
        live = {name for node in needed for name in reads(node)} | set(outputs)
        for node in needed:
            self._nodes_run += 1
            # The reader counted the file's nodes; a loop runs its body repeatedly.
            if self._nodes_run > MAX_NODES:
                raise OnnxError(f"it takes more than {MAX_NODES} nodes once its loops are unrolled")
            results = self._node(node, scope, live)
            scope.values.update((n, r) for n, r in zip(node.output, results, strict=False) if n)

    def _lookup(self, name: str, scope: _Scope) -> Any:
        if name not in scope.values:
            try:
                scope.values[name] = self._stored(scope.stored[name], scope)
            except OnnxError as error:
                self.problems.append(str(error))
                # Stands for the value, so that dependent nodes are skipped and the pass continues.
                scope.values[name] = _FAILED
        return scope.values[name]

    def _stored(self, tensor: onnx.TensorProto, scope: _Scope) -> Traced:
        """Return an initializer, as a parameter if it is a weight. Exporters write an embedding table that is
        tied to the output layer twice, once transposed. Here both are one parameter.
        """
        shape, dtype = shape_and_dtype(tensor)
        weight = tensor.name in self.weights and dtype.is_floating_point
        tables = self._tables.get(shape[::-1], ()) if weight and len(shape) == 2 else ()
        # A meta-device model's large weights are never read, so the files next to it are not opened.
        if weight and self.device == "meta" and torch.Size(shape).numel() > INSPECTED_ELEMENTS and not tables:
            return self.builder.parameter(tensor.name, torch.empty(shape, dtype=dtype, device="meta"))
        data = read_tensor(tensor, self.folder)
        if not weight or not self.weights.holds(tensor.name, data):
            return self.builder.known(data, hint=tensor.name)
        for table in tables:
            if table.name != tensor.name and torch.equal(read_tensor(table, self.folder).t(), data):
                self.notes.append(f"{tensor.name} is {table.name} transposed; they are one tied parameter")
                return torch.t(self._lookup(table.name, scope))
        return self._parameter(tensor.name, data)

    def _parameter(self, name: str, data: torch.Tensor) -> Traced:
        """Return a weight as a parameter. If an exporter repeated the weight (a class token for each image of
        the batch, a table row for each position), one repetition is trained.
        """
        once = self.weights.once(name, data)
        if once.shape == data.shape:
            return self.builder.parameter(name, data.to(self.device))
        self.notes.append(
            f"{name} of shape {list(data.shape)} repeats its values; a parameter of shape {list(once.shape)} "
            "is trained instead"
        )
        return self.builder.parameter(name, once.to(self.device)).method("expand", data.shape)

    # -- one node ---------------------------------------------------------------------------------

    def _node(self, node: onnx.NodeProto, scope: _Scope, live: set[str]) -> Sequence[Any]:
        convert, failed = _find_converter(node), [_FAILED] * len(node.output)
        if convert is None:
            self._note_unsupported(node)
            return failed
        operands = [self._lookup(name, scope) if name else None for name in node.input]
        if any(v is _FAILED for v in operands):
            return failed
        # Subgraphs record their own problems; the count shows whether there were any.
        problems = len(self.problems), len(self.unsupported)
        self.builder.module_name = node.name
        try:
            results = convert(self._call(node, operands, scope, live))
        except RecursionError:
            raise OnnxError(f"{label(node)} is nested too deep; export a flatter model") from None
        except OnnxError as error:
            self.problems.append(f"{label(node)}: {error}")
        except Exception as error:  # a converter met attributes or shapes that its operator does not allow
            self.problems.append(f"{label(node)} is malformed: {shown_error(error)[:300]}")
        else:
            if (len(self.problems), len(self.unsupported)) == problems:
                results = results if isinstance(results, tuple) else (results,)
                return [self._leaf(node, i, result) for i, result in enumerate(results)]
        return failed

    def _leaf(self, node: onnx.NodeProto, index: int, result: Any) -> Any:
        name = node.output[index] if index < len(node.output) else ""
        if name not in self.weights or not isinstance(result, OnnxValue) or result.data is None:
            return result
        if not self.weights.holds(name, result.data):
            return result
        # A clone, because folding may have returned a view of another constant.
        return self._parameter(name, result.data.clone())

    def _call(self, node: onnx.NodeProto, operands: list[Any], scope: _Scope, live: set[str]) -> Call:
        def run(graph: onnx.GraphProto, values: Sequence[Any]) -> list[Any]:
            inner = _Scope(dict(scope.values), self._initializers(graph))
            # A subgraph sees names of enclosing graphs, and initializers, which are read on demand.
            captured = (name for name in read_outside(graph) if name in scope.stored)
            inner.values.update((name, self._lookup(name, scope)) for name in captured)
            inner.values.update(zip([v.name for v in graph.input], values, strict=True))
            outputs = [v.name for v in graph.output]
            self._evaluate(graph.node, inner, outputs)
            results = [self._lookup(name, inner) for name in outputs]
            if any(v is _FAILED for v in results) and not (self.problems or self.unsupported):
                raise OnnxError("its subgraph cannot be imported")
            return results

        return Call(
            op=node.op_type,
            operands=operands,
            attributes={a.name: attribute_value(a, self.folder) for a in node.attribute},
            wanted=[name in live for name in node.output],
            builder=self.builder,
            batch=self.batch,
            run=run,
        )

    # -- what went wrong --------------------------------------------------------------------------

    def _note_unsupported(self, node: onnx.NodeProto) -> None:
        name = f"{node.domain}.{node.op_type}".lstrip(".")
        self.unsupported.setdefault(name, []).append(node.name or (node.output[0] if node.output else "?"))
        for graph in subgraphs(node):
            for inner in graph.node:
                if _find_converter(inner) is None:
                    self._note_unsupported(inner)

    def _refuse(self) -> None:
        if not self.unsupported and not self.problems:
            return
        parts = []
        if self.unsupported:
            nodes = {op: shown_names(names, _LISTED) for op, names in sorted(self.unsupported.items())}
            listed = "; ".join(f"{op} (nodes {names})" for op, names in nodes.items())
            parts.append(f"unsupported operators (write the model without them): {listed}")
        parts += self.problems[:_LISTED]
        if len(self.problems) > _LISTED:
            parts.append(f"and {len(self.problems) - _LISTED} more")
        raise OnnxError(
            f"{'; '.join(parts)}. To import only a part, --output NAME (a tensor of the file) leaves out "
            "everything that NAME does not depend on"
        )


def _embedding_tables(graph: onnx.GraphProto) -> dict[tuple[int, ...], list[onnx.TensorProto]]:
    gathered = {n.input[0] for n in graph.node if n.op_type == "Gather" and n.input}
    tables: dict[tuple[int, ...], list[onnx.TensorProto]] = {}
    for tensor in graph.initializer:
        if tensor.name in gathered and len(tensor.dims) == 2:
            tables.setdefault(tuple(tensor.dims), []).append(tensor)
    return tables
