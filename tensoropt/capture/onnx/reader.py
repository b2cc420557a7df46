"""Read a file into a checked ``ModelProto``: decoded, its functions inlined, nodes in order, every name
defined once.

Nothing in a file is executed or trusted: sizes, counts and nesting are bounded before anything is built, and
the first error is raised as an :class:`OnnxError`.

The module also has the definitions of operators that the ONNX standard defines in terms of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import onnx
import onnx.inliner
from google.protobuf.message import DecodeError

from tensoropt.capture.onnx.values import OnnxError
from tensoropt.units import format_bytes


def standard_function(
    node: onnx.NodeProto, domain: str, opset: int, graph: onnx.GraphProto
) -> onnx.FunctionProto | None:
    """Return the definition of a node's operator with the node's attributes substituted; None if it has none.

    A definition that depends on the operands' types is not used here, because those operators have
    converters.
    """
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None
    if not schema.has_function:  # type: ignore[attr-defined]
        return None
    body = onnx.FunctionProto()
    body.CopyFrom(schema.function_body)
    attributes = {a.name: a for a in node.attribute}
    defaults = {name: a.default_value for name, a in schema.attributes.items()}
    for inner in body.node:
        _bind(inner, attributes, defaults)
    return body


def _bind(
    node: onnx.NodeProto, attributes: dict[str, onnx.AttributeProto], defaults: dict[str, onnx.AttributeProto]
) -> None:
    """Replace references to the function's attributes with their values; drop those without a value."""
    kept = []
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            for inner in attribute.g.node:
                _bind(inner, attributes, defaults)
            kept.append(attribute)
            continue
        value = attributes.get(attribute.ref_attr_name) or defaults.get(attribute.ref_attr_name)
        if value is None or value.type == onnx.AttributeProto.UNDEFINED:
            continue
        bound = onnx.AttributeProto()
        bound.CopyFrom(value)
        bound.name = attribute.name
        kept.append(bound)
    values = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in kept]
    del node.attribute[:]
    node.attribute.extend(values)


_MIN_OPSET, _MAX_OPSET = 7, 28
"""Below 7, broadcasting was a separate attribute; above the maximum, operators may have meanings that are not
covered here."""
MAX_NODES = 500_000
"""The most nodes after inlining. The largest exported language models have some tens of thousands."""
_MAX_FILE_BYTES = 2**31
"""Protobuf's own limit; larger models store their weights in files next to the model."""
_MAX_NESTING = 16
"""The deepest nesting of subgraphs (If in If) and of function calls."""


def read_model(path: Path) -> onnx.ModelProto:
    """Decode a file and check its structure.

    Raises:
        OnnxError: there is no such file, it is not an ONNX model, or its graph is malformed.
    """
    if not path.is_file():
        raise OnnxError(f"there is no file {path}; check the path")
    size = path.stat().st_size
    if size > _MAX_FILE_BYTES:
        raise OnnxError(
            f"{path} has {format_bytes(size)}, but an ONNX file has at most {format_bytes(_MAX_FILE_BYTES)}; "
            "save it with external data"
        )
    try:
        model = onnx.ModelProto.FromString(path.read_bytes())
    except (DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise OnnxError(
            f"{path} is not an ONNX model (it cannot be decoded: {error}); it is truncated or of another kind"
        ) from None
    if not model.graph.node or not model.opset_import:
        raise OnnxError(f"{path} is not an ONNX model (it has no nodes or no opset); export it again")
    return model


def checked(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its own functions inlined, if all counts and names are valid."""
    opsets = opsets_of(model)
    if not _MIN_OPSET <= opsets.get("", _MIN_OPSET) <= _MAX_OPSET:
        raise OnnxError(
            f"the file is written in opset {opsets['']}, but {_MIN_OPSET} to {_MAX_OPSET} are understood; "
            "convert it with onnx.version_converter.convert_version"
        )
    _count(model)
    if model.functions:
        try:
            model = onnx.inliner.inline_local_functions(model)
        except Exception as error:
            raise OnnxError(f"its functions cannot be inlined: {error}") from error
        _count(model)
    return model


def opsets_of(model: onnx.ModelProto) -> dict[str, int]:
    """Return the opset version by domain; the standard domain is the empty string."""
    return {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import}


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs among a node's attributes: branches and loop bodies."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _count(model: onnx.ModelProto) -> None:
    """Refuse more nodes than a real model has, counted as if all function calls were inlined."""
    # Counted before inlining, because functions that each call another one twice double with every level.
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    counts: dict[tuple[str, str, str], int] = {}

    def size(nodes: Iterable[onnx.NodeProto], depth: int) -> int:
        if depth > _MAX_NESTING:
            raise OnnxError(
                f"its subgraphs or functions are nested more than {_MAX_NESTING} deep, or call themselves"
            )
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            if key in functions:
                if key not in counts:
                    counts[key] = size(functions[key].node, depth + 1)
                total += counts[key]
            total += 1 + sum(size(g.node, depth + 1) for g in subgraphs(node))
            if total > MAX_NODES:
                raise OnnxError(f"it has more than {MAX_NODES} nodes once its functions are inlined")
        return total

    size(model.graph.node, 0)


def ordered(
    nodes: Sequence[onnx.NodeProto], defined: set[str], outputs: Iterable[str]
) -> list[onnx.NodeProto]:
    """Return the nodes that ``outputs`` depends on, each after the nodes that it reads.

    Args:
        nodes: the nodes of one graph.
        defined: names that exist before: inputs, initializers, tensors made by an outer graph.
        outputs: names of outputs.

    Raises:
        OnnxError: a name is defined twice or not at all, or nodes depend on each other in a cycle.
    """
    maker: dict[str, onnx.NodeProto] = {}
    for node in nodes:
        for name in node.output:
            if name and (name in maker or name in defined):
                raise OnnxError(f"'{name}' is made twice, the second time by {label(node)}")
            if name:
                maker[name] = node
    order: list[onnx.NodeProto] = []
    state: dict[int, int] = {}  # 1: being visited, 2: done
    for start in outputs:
        if start in maker:
            _visit(maker[start], maker, defined, state, order)
        elif start not in defined:
            raise OnnxError(f"the output '{start}' is made by no node")
    position = {id(node): index for index, node in enumerate(nodes)}
    in_order = sorted(order, key=lambda n: position[id(n)])
    return in_order if _is_ordered(in_order, defined) else order


def _visit(
    start: onnx.NodeProto,
    maker: dict[str, onnx.NodeProto],
    defined: set[str],
    state: dict[int, int],
    order: list[onnx.NodeProto],
) -> None:
    """Visit depth first, without recursion: a chain of nodes may be longer than Python's stack."""
    stack: list[tuple[onnx.NodeProto, Iterator[str]]] = []

    def enter(node: onnx.NodeProto) -> None:
        state[id(node)] = 1
        stack.append((node, iter(reads(node))))

    if id(start) in state:
        return
    enter(start)
    while stack:
        node, names = stack[-1]
        for name in names:
            if name in maker and state.get(id(maker[name])) != 2:
                if state.get(id(maker[name])) == 1:
                    circle = [n for n, _ in stack]
                    raise OnnxError(
                        f"nodes depend on each other in a circle: {label(maker[name])} needs {label(node)}, "
                        f"which needs it ({len(circle)} nodes are involved at most)"
                    )
                enter(maker[name])
                break
            if name not in maker and name not in defined:
                raise OnnxError(f"{label(node)} reads '{name}', which nothing makes")
        else:
            state[id(node)] = 2
            order.append(node)
            stack.pop()


def _is_ordered(nodes: Sequence[onnx.NodeProto], defined: set[str]) -> bool:
    made = set(defined)
    for node in nodes:
        if not made.issuperset(reads(node)):
            return False
        made.update(node.output)
    return True


def reads(node: onnx.NodeProto) -> list[str]:
    """Return the names that a node reads, including those that its subgraphs take from outside."""
    names = [name for name in node.input if name]
    for graph in subgraphs(node):
        inside = {v.name for v in graph.input} | {t.name for t in graph.initializer}
        for inner in graph.node:
            names += [name for name in reads(inner) if name not in inside]
            inside.update(inner.output)
        names += [v.name for v in graph.output if v.name not in inside]
    return names


def label(node: onnx.NodeProto) -> str:
    """Return a node's label, by which a person can find it in a viewer."""
    name = node.name or (node.output[0] if node.output else "")
    return f"{node.domain + '.' if node.domain else ''}{node.op_type} '{name}'"
