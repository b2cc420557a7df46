"""Losses for files that have none: a file says what a model computes, but training needs a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.errors import OnnxError
from tensoropt.capture.onnx.signature import Input
from tensoropt.capture.onnx.values import FxBuilder, Traced

Made = tuple[Traced, list[Input], str]


def _targets(results: Sequence[Traced]) -> list[Traced]:
    floats = [r for r in results if r.floating and r.node is not None]
    if not floats:
        raise OnnxError(
            "none of its outputs is a floating-point tensor that depends on an input; it cannot be trained"
        )
    return floats


def _mean(builder: FxBuilder, results: Sequence[Traced], names: Sequence[str]) -> Made:
    floats = _targets(results)
    total = torch.mean(floats[0])
    for value in floats[1:]:
        total = total + torch.mean(value)
    return total, [], "the mean of all elements of its outputs"


def _mse(builder: FxBuilder, results: Sequence[Traced], names: Sequence[str]) -> Made:
    floats = _targets(results)
    total: Traced = None
    added: list[Input] = []
    for index, value in enumerate(floats):
        target = Input(f"target_{index}" if len(floats) > 1 else "target", value.shape, value.dtype)
        error = F.mse_loss(value, builder.late_input(target.name, target.shape, target.dtype))
        total = error if total is None else total + error
        added.append(target)
    return total, added, "mean squared error against targets, passed after the file's own inputs"


def _cross_entropy(builder: FxBuilder, results: Sequence[Traced], names: Sequence[str]) -> Made:
    """Cross entropy; classes are the last dim of a tensor with 2 or 3 dims, and the second dim of images."""
    value = _targets(results)[0]
    if value.ndim < 2:
        raise OnnxError(f"a cross entropy needs an output of at least 2 dims; it has {list(value.shape)}")
    # `(batch, classes)` and `(batch, sequence, classes)` end in classes; images have them in front of the
    # spatial dims.
    dim = 1 if value.ndim > 3 else value.ndim - 1
    classes = value.shape[dim]
    shape = tuple(s for d, s in enumerate(value.shape) if d != dim)
    labels = Input("labels", shape, torch.int64, below=classes)
    given = builder.late_input(labels.name, shape, torch.int64)
    if value.ndim == 3:
        # PyTorch wants classes second: one row per token needs no transposition.
        value, given = value.reshape(-1, classes), given.reshape(-1)
    loss = F.cross_entropy(value, given)
    return (
        loss,
        [labels],
        f"cross entropy over {classes} classes with labels, passed after the file's own inputs",
    )


LOSSES: dict[str, Callable[[FxBuilder, Sequence[Traced], Sequence[str]], Made]] = {
    "cross_entropy": _cross_entropy,
    "mean": _mean,
    "mse": _mse,
}
"""The losses by the name that ``--loss`` takes."""


def with_loss(
    builder: FxBuilder, name: str, results: Sequence[Traced], outputs: Sequence[str]
) -> tuple[list[Traced], list[Input], str]:
    """(the loss alone, the inputs that it needs, a sentence that describes it).

    Args:
        name: a name in :data:`LOSSES`, or ``auto``: a scalar output called ``loss``; else cross entropy if an
            output is called ``logits``; else the squared error, which has a gradient for any output.
    """
    if name == "auto":
        for value, output in zip(results, outputs, strict=True):
            if value.numel == 1 and value.floating and value.node is not None and "loss" in output.lower():
                return [value], [], f"loss: the file's output '{output}'"
        named = [i for i, output in enumerate(outputs) if "logit" in output.lower() and results[i].ndim > 1]
        if named:
            results = [results[named[0]]]
        name = "cross_entropy" if named else "mse"
    if name not in LOSSES:
        raise OnnxError(f"there is no loss '{name}'; there are auto, {', '.join(LOSSES)}")
    loss, inputs, what = LOSSES[name](builder, results, outputs)
    return [loss], inputs, f"loss: {what} (the file has none; --loss {'|'.join(LOSSES)})"
