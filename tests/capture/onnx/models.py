"""Small ONNX models and files for the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[Any]],
    outputs: Sequence[str],
    constants: Mapping[str, Any] | None = None,
    *,
    opset: int = 17,
    dtype: int = TensorProto.FLOAT,
    **more: Any,
) -> onnx.ModelProto:
    """A model of float inputs; a size that is text is a dim the file leaves open."""
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, dtype, list(shape)) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(v), name) for name, v in (constants or {}).items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9, **more)


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """``node("Add", "x y", "z")``."""
    names = ["" if n == "-" else n for n in inputs.split()]
    return helper.make_node(
        op, names, outputs.split(), name=f"{op.lower()}_{outputs.split()[0]}", **attributes
    )


def perceptron() -> onnx.ModelProto:
    """Two linear layers over an open batch."""
    rng = np.random.default_rng(0)
    weights = {
        "layer.0.weight": rng.normal(size=(16, 12)).astype(np.float32) / 4,
        "layer.0.bias": rng.normal(size=16).astype(np.float32),
        "head": rng.normal(size=(16, 8)).astype(np.float32) / 4,
    }
    nodes = [
        node("Gemm", "x layer.0.weight layer.0.bias", "h", transB=1),
        node("Relu", "h", "a"),
        node("MatMul", "a head", "logits"),
    ]
    return model(nodes, {"x": ["batch", 12]}, ["logits"], weights)


def ran(module: torch.nn.Module, *args: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        out = module(*args)
    return list(out) if isinstance(out, tuple) else [out]
