"""The converters, by family; importing this module registers all of them."""

from tensoropt.capture.onnx.ops import (
    attention,
    control,
    convolution,
    indexing,
    loss,
    math,
    microsoft,
    normalisation,
    pooling,
    quantisation,
    recurrent,
    reduction,
    resize,
    shape,
)

__all__ = [
    "attention",
    "control",
    "convolution",
    "indexing",
    "loss",
    "math",
    "microsoft",
    "normalisation",
    "pooling",
    "quantisation",
    "recurrent",
    "reduction",
    "resize",
    "shape",
]
