"""Reading of an ONNX file as a checked model, with functions inlined, nodes sorted and names defined once.

Nothing in a file is executed or trusted: sizes, counts and nesting are bounded before anything is built, and
the first error is raised as an :class:`OnnxError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import onnx
import onnx.inliner
import onnx.version_converter
from google.protobuf.message import DecodeError

from tensoropt.capture.onnx.values import OnnxError
from tensoropt.units import format_bytes

_MIN_OPSET, _OPSET, _MAX_OPSET = 7, 18, 28
"""The oldest opset that is read, the opset to which older files are converted, and the newest one. Below 7
broadcasting was a separate attribute; above the newest, operators may have meanings that are not covered."""
_UNKNOWN = "unknown"
_SMALL_BYTES = 4096
"""The size in bytes below which onnx's version converter gets a constant's values (axes, sizes, bounds)."""
MAX_NODES = 500_000
"""Maximum number of nodes after inlining; the largest exported language models have tens of thousands."""
_MAX_FILE_BYTES = 2**31
"""The largest size of a file, protobuf's own limit. Larger models have their weights in separate files."""
_MAX_NESTING = 16
"""Maximum nesting of subgraphs (If in If) and of function calls."""


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
    """Return the model with its functions inlined, after checking its opset, number of nodes and nesting."""
    opsets = _opsets_of(model)
    if not _MIN_OPSET <= opsets.get("", _MIN_OPSET) <= _MAX_OPSET:
        raise OnnxError(
            f"the file is written in opset {opsets['']}, but {_MIN_OPSET} to {_MAX_OPSET} are understood; "
            "export it again"
        )
    _count(model)
    if model.functions:
        try:
            model = onnx.inliner.inline_local_functions(model)
        except Exception as error:
            raise OnnxError(f"its functions cannot be inlined: {error}") from error
        _count(model)
    return model


def newer(model: onnx.ModelProto, outputs: Sequence[str]) -> onnx.ModelProto:
    """Return the model in opset 18 or newer. A model that is converted keeps its constants, and only the
    nodes that ``outputs`` depend on.

    Raises:
        OnnxError: onnx cannot convert the model.
    """
    version = _opsets_of(model).get("", _OPSET)
    if version >= _OPSET:
        return model
    old, stored = model.graph, {tensor.name for tensor in model.graph.initializer}
    bare = onnx.ModelProto(ir_version=max(model.ir_version, 8), opset_import=model.opset_import)
    bare.graph.name = old.name
    bare.graph.node.extend(ordered(old.node, {value.name for value in old.input} | stored, outputs))
    for node in every_node(bare.graph):
        # The converter asserts on unknown operators; the import lists them all.
        if node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type, version):
            node.domain = _UNKNOWN
    for domain in {node.domain for node in every_node(bare.graph)} - {o.domain for o in bare.opset_import}:
        bare.opset_import.add(domain=domain, version=1)
    bare.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    bare.graph.input.extend(value for value in old.input if value.name not in stored)
    for tensor in old.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.ByteSize() < _SMALL_BYTES:
            bare.graph.initializer.append(tensor)
        else:
            kind = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            bare.graph.input.append(kind)
    try:
        made = onnx.version_converter.convert_version(bare, _OPSET).graph
    except Exception as error:  # the converter asserts
        text = str(error).rpartition("failed: ")[2]
        raise OnnxError(
            f"onnx cannot convert it from opset {version} to {_OPSET} ({text}); export it in opset {_OPSET}"
        ) from None
    if version < 11:
        # onnx leaves newer defaults to them.
        for node in every_node(made):
            if node.op_type == "Resize":
                node.attribute.append(
                    onnx.helper.make_attribute("coordinate_transformation_mode", "asymmetric")
                )
                node.attribute.append(onnx.helper.make_attribute("nearest_mode", "floor"))
    for node in every_node(made):
        node.domain = "" if node.domain == _UNKNOWN else node.domain
    result = onnx.ModelProto(ir_version=bare.ir_version)
    result.opset_import.extend(model.opset_import)
    for entry in result.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = _OPSET
    result.graph.CopyFrom(old)
    del result.graph.node[:]
    result.graph.node.extend(made.node)
    result.graph.initializer.extend(t for t in made.initializer if t.name not in stored)
    return result


def every_node(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield a graph's nodes, each followed by the nodes of its subgraphs."""
    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from every_node(inner)


def _opsets_of(model: onnx.ModelProto) -> dict[str, int]:
    """Return the opset version by domain; the standard domain is the empty string."""
    return {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import}


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs among a node's attributes: branches and loop bodies."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _count(model: onnx.ModelProto) -> None:
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
    nodes: Sequence[onnx.NodeProto], defined: set[str], outputs: Sequence[str]
) -> list[onnx.NodeProto]:
    """Return the nodes that ``outputs`` depends on, each after the nodes whose results it reads.

    Args:
        nodes: the nodes of one graph.
        defined: names defined elsewhere: inputs, initializers, an outer graph's tensors.
        outputs: names of the tensors to compute.

    Raises:
        OnnxError: a name is defined twice or not at all, or nodes depend on each other in a cycle.
    """
    maker: dict[str, int] = {}
    for place, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in maker or name in defined:
                raise OnnxError(f"'{name}' is defined twice, the second time by {label(node)}")
            maker[name] = place
    for name in outputs:
        if name not in maker and name not in defined:
            raise OnnxError(f"the output '{name}' is defined by no node")
    before: dict[int, list[int]] = {}
    todo = [maker[name] for name in outputs if name in maker]
    while todo:
        place = todo.pop()
        if place not in before:
            for name in reads(nodes[place]):
                if name not in maker and name not in defined:
                    raise OnnxError(f"{label(nodes[place])} reads '{name}', which is not defined")
            before[place] = [maker[name] for name in reads(nodes[place]) if name in maker]
            todo += before[place]
    if all(earlier < place for place, read in before.items() for earlier in read):
        return [nodes[place] for place in sorted(before)]
    try:
        return [nodes[place] for place in TopologicalSorter(before).static_order()]
    except CycleError as error:
        circle = " needs ".join(label(nodes[place]) for place in error.args[1][:2])
        raise OnnxError(f"nodes depend on each other in a cycle: {circle}") from None


def reads(node: onnx.NodeProto) -> list[str]:
    """Return the names of tensors that a node reads, including those that its subgraphs read from outside."""
    names = [name for name in node.input if name]
    for graph in subgraphs(node):
        names += read_outside(graph)
    return names


def read_outside(graph: onnx.GraphProto) -> list[str]:
    """Return the names of tensors that a subgraph reads from enclosing graphs."""
    names: list[str] = []
    inside = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    for node in graph.node:
        names += [name for name in reads(node) if name not in inside]
        inside.update(node.output)
    return names + [v.name for v in graph.output if v.name not in inside]


def label(node: onnx.NodeProto) -> str:
    """Return a text with a node's operator and name, by which the node can be found in a viewer."""
    name = node.name or (node.output[0] if node.output else "")
    return f"{node.domain + '.' if node.domain else ''}{node.op_type} '{name}'"
