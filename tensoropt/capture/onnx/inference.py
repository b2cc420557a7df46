"""ONNX's own inference for a file's tensors: element types, and shapes with which the import is compared.

The import determines shapes by running, even where inference has to give up (exporters' shape arithmetic,
data-dependent operators); inference is an independent second opinion. If both know a size and differ, the
file contradicts itself or a converter is wrong, and the import is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx
import onnx.shape_inference

from tensoropt.capture.onnx.errors import OnnxError
from tensoropt.capture.onnx.signature import Input

SMALL_ELEMENTS = 256
"""The largest constants that inference sees with their values: shapes, axes, paddings."""
MAX_BYTES = 2**26
"""The most bytes of the nodes; a file whose attributes alone are larger is not inferred a second time."""
Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class Inferred:
    """The inferred facts about tensors, by name: ONNX element types, and shapes with None for unknown
    sizes."""

    types: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    def check(self, made: Mapping[str, tuple[int, ...]]) -> None:
        """Compare the inferred shapes with those of the import.

        Raises:
            OnnxError: names the first tensor whose shape differs.
        """
        for name, shape in made.items():
            known = self.shapes.get(name)
            if known is None or _agree(known, shape):
                continue
            shown = ["?" if size is None else size for size in known]
            raise OnnxError(
                f"'{name}' has the shape {list(shape)}, but by ONNX's shape inference it has {shown}; the "
                "file contradicts itself, so export it again"
            )


def _agree(known: Shape, shape: Sequence[int]) -> bool:
    return len(known) == len(shape) and all(k in (None, s) for k, s in zip(known, shape, strict=True))


def infer(model: onnx.ModelProto, inputs: Sequence[Input]) -> Inferred:
    """Run ``onnx.shape_inference`` with the inputs' sizes bound; returns an empty result if it cannot run."""
    if sum(node.ByteSize() for node in model.graph.node) > MAX_BYTES:
        return Inferred()
    try:
        # With data propagation, because exporters compute shapes in the graph.
        done = onnx.shape_inference.infer_shapes(_skeleton(model, inputs), data_prop=True)
    except Exception:  # only a second opinion: the import itself reports what is wrong with the file
        return Inferred()
    values = [*done.graph.input, *done.graph.value_info, *done.graph.output]
    tensors = {v.name: v.type.tensor_type for v in values if v.type.HasField("tensor_type")}
    return Inferred(
        {name: t.elem_type for name, t in tensors.items()},
        {name: tuple(_sizes(t.shape)) for name, t in tensors.items() if t.HasField("shape")},
    )


def _sizes(shape: onnx.TensorShapeProto) -> Iterator[int | None]:
    for dim in shape.dim:
        yield dim.dim_value if dim.HasField("dim_value") else None


def _skeleton(model: onnx.ModelProto, inputs: Sequence[Input]) -> onnx.ModelProto:
    """The model without its large constants and without the shapes that the file itself declares."""
    graph, bound = model.graph, {i.name: i.shape for i in inputs}
    bare = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    bare.graph.name = graph.name
    bare.graph.node.extend(graph.node)
    for value in graph.input:
        if value.name in bound:
            kind = value.type.tensor_type.elem_type
            bare.graph.input.append(_described(value.name, kind, bound[value.name]))
    for tensor in graph.initializer:
        # 16 bytes per element: 8 for its value, and an allowance for name and dims, which is an assumption.
        if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.ByteSize() < 16 * SMALL_ELEMENTS:
            bare.graph.initializer.append(tensor)
        else:
            bare.graph.input.append(_described(tensor.name, tensor.data_type, tensor.dims))
    for value in graph.output:
        # By name only: the shapes that the file declares are what is to be checked.
        bare.graph.output.add(name=value.name)
    return bare


def _described(name: str, kind: int, shape: Sequence[int]) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, kind, list(shape))
