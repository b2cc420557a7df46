"""The import of an ONNX file as an ``fx.GraphModule`` of PyTorch calls, trainable, on the same path as any
other model."""

from tensoropt.errors import import_extra

import_extra("onnx", "onnx", "reading ONNX files")

from tensoropt.capture.onnx.load import ImportedModel, import_onnx, load_onnx  # noqa: E402
from tensoropt.capture.onnx.signature import LOSSES  # noqa: E402
from tensoropt.capture.onnx.values import DataDependentError, OnnxError  # noqa: E402

__all__ = ["LOSSES", "DataDependentError", "ImportedModel", "OnnxError", "import_onnx", "load_onnx"]
