"""Converters by operator family; importing this module registers all of them."""

from tensoropt.capture.onnx.ops import (
    attention,
    control,
    indexing,
    math,
    normalisation,
    recurrent,
    reduction,
    resize,
    shape,
    windows,
)

__all__ = [
    "attention",
    "control",
    "indexing",
    "math",
    "normalisation",
    "recurrent",
    "reduction",
    "resize",
    "shape",
    "windows",
]
