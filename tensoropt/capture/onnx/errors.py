"""The errors with which an ONNX file is refused."""

from __future__ import annotations

from tensoropt.errors import CaptureError


class OnnxError(CaptureError):
    """An ONNX file that cannot be imported; the message names the file or node, the reason and the remedy."""


class DataDependentError(OnnxError):
    """A node whose shapes depend on the values of an input: a graph with such a node has no fixed cost."""
