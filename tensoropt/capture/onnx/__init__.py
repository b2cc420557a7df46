"""ONNX file -> ``fx.GraphModule`` of PyTorch calls, trainable, on the same path as any other model."""

from tensoropt.capture.onnx.errors import DataDependentError, OnnxError
from tensoropt.capture.onnx.load import ImportedModel, import_onnx, load_onnx
from tensoropt.capture.onnx.losses import LOSSES

__all__ = ["LOSSES", "DataDependentError", "ImportedModel", "OnnxError", "import_onnx", "load_onnx"]
