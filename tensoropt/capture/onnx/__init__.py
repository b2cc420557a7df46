"""Import of ONNX files as trainable ``fx.GraphModule``s of PyTorch calls, which are then explored like any
other model."""

from tensoropt.errors import import_extra

import_extra("onnx", "onnx", "reading ONNX files")

from tensoropt.capture.onnx.load import ImportedModel, import_onnx, load_onnx  # noqa: E402
from tensoropt.capture.onnx.signature import LOSSES  # noqa: E402
from tensoropt.capture.onnx.values import OnnxError  # noqa: E402

__all__ = ["LOSSES", "ImportedModel", "OnnxError", "import_onnx", "load_onnx"]
