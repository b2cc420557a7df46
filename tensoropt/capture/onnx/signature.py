"""The inputs of a file, with sizes bound by the user and example values, and a loss for files that have
none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import onnx
import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.values import FxBuilder, OnnxError, Traced
from tensoropt.capture.onnx.weights import torch_dtype
from tensoropt.units import format_bytes

_MAX_INPUT_BYTES = 2**36


@dataclass(frozen=True)
class Input:
    """One input of a file, with all its sizes bound.

    Attributes:
        below: size of the table that an integer input indexes; None if it indexes no table.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int | None = None

    def example(self, generator: torch.Generator, device: str) -> torch.Tensor:
        """Return normal numbers, random indices into the table, or ones if there is no table (a mask)."""
        if device == "meta":
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        if self.dtype.is_floating_point:
            return torch.randn(self.shape, generator=generator).to(self.dtype)
        if self.below is not None and self.dtype != torch.bool:
            return torch.randint(0, max(self.below, 1), self.shape, generator=generator).to(self.dtype)
        return torch.ones(self.shape, dtype=self.dtype)


def bind_inputs(
    graph: onnx.GraphProto, dims: Mapping[str, int]
) -> tuple[list[Input], tuple[int, int] | None]:
    """Return (inputs with all sizes bound, (old, new) batch size if a fixed batch size was replaced).

    Args:
        graph: the graph; its inputs that are not initializers are the model's inputs.
        dims: sizes by the file's name of a dim (``batch``), or by input and position (``x[0]``), which also
            replaces a fixed size.

    Raises:
        OnnxError: dims have no size, or given names are no dims of the file. The message lists all of them.
    """
    stored = {t.name for t in graph.initializer}
    # Old files list their initializers among the inputs.
    live = [v for v in graph.input if v.name not in stored]
    used: set[str] = set()
    unbound: dict[str, None] = {}
    names: dict[str, None] = {}
    inputs: list[Input] = []
    replaced: tuple[int, int] | None = None
    for value in live:
        if not value.type.HasField("tensor_type"):
            raise OnnxError(f"the input '{value.name}' is a sequence, map or optional; give tensors")
        tensor = value.type.tensor_type
        if not tensor.HasField("shape"):
            raise OnnxError(f"the input '{value.name}' has no shape in the file; export it with one")
        shape = []
        for index, dim in enumerate(tensor.shape.dim):
            handle = f"{value.name}[{index}]"
            symbol = dim.dim_param or handle
            fixed = dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else None
            names[symbol if fixed is None else handle] = None
            size = dims.get(handle, dims.get(symbol))
            if size is not None:
                used.update({handle, symbol} & dims.keys())
                # Dim 0 is assumed to be the batch: converters then repair constants that repeat the old size.
                if fixed is not None and fixed != size and index == 0:
                    replaced = (fixed, size)
            elif fixed is None:
                unbound[symbol] = None
            shape.append(size if size is not None else (fixed or 1))
        dtype = torch_dtype(tensor.elem_type, f"the input '{value.name}'")
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes > _MAX_INPUT_BYTES:
            raise OnnxError(
                f"the input '{value.name}' of shape {shape} has {format_bytes(size_bytes)}, more than the "
                f"{format_bytes(_MAX_INPUT_BYTES)} allowed; give smaller sizes"
            )
        inputs.append(Input(value.name, tuple(shape), dtype))
    _refuse_unbound(unbound, dims, used, names)
    return inputs, replaced


def _refuse_unbound(
    unbound: Mapping[str, None], dims: Mapping[str, int], used: set[str], names: Mapping[str, None]
) -> None:
    wrong = [f"{name}={size}" for name, size in dims.items() if size < 1]
    if wrong:
        raise OnnxError(f"dims must be at least 1, but {', '.join(wrong)} was given")
    unknown = [name for name in dims if name not in used]
    if unknown:
        listed = ", ".join(names) or "none"
        raise OnnxError(f"the file has no dim called {', '.join(unknown)}; its dims are: {listed}")
    if unbound:
        remedy = " ".join(f"--dim {_quoted(name)}={_likely(name)}" for name in unbound)
        raise OnnxError(
            f"the sizes of {len(unbound)} dims are not in the file: {', '.join(unbound)}; bind them, for "
            f"example {remedy}"
        )


def _quoted(name: str) -> str:
    return name if name.replace("_", "").isalnum() else f"'{name}'"


def _likely(name: str) -> int:
    lowered = name.lower()
    if "seq" in lowered or "len" in lowered:
        return 128
    if "height" in lowered or "width" in lowered:
        return 224
    return 8


_Made = tuple[Traced, list[Input], str]


def _targets(results: Sequence[Traced]) -> list[Traced]:
    floats = [r for r in results if r.floating and r.node is not None]
    if not floats:
        raise OnnxError(
            "none of its outputs is a floating-point tensor that depends on an input; it cannot be trained"
        )
    return floats


def _mean(builder: FxBuilder, results: Sequence[Traced]) -> _Made:
    total = reduce(add, map(torch.mean, _targets(results)))
    return total, [], "the mean of all elements of its outputs"


def _mse(builder: FxBuilder, results: Sequence[Traced]) -> _Made:
    floats = _targets(results)
    names = [f"target_{index}" for index in range(len(floats))] if len(floats) > 1 else ["target"]
    targets = [Input(name, v.shape, v.dtype) for name, v in zip(names, floats, strict=True)]
    pairs = zip(floats, targets, strict=True)
    # One error after another: sums are the model's nodes, too, in this order.
    total = reduce(add, (F.mse_loss(v, builder.late_input(t.name, t.shape, t.dtype)) for v, t in pairs))
    return total, targets, "mean squared error against targets, passed after the file's own inputs"


def _cross_entropy(builder: FxBuilder, results: Sequence[Traced]) -> _Made:
    """Return the cross entropy; classes are the last dim of 2- or 3-dim outputs, the second dim of images."""
    value = _targets(results)[0]
    if value.ndim < 2:
        raise OnnxError(f"a cross entropy needs an output of at least 2 dims; it has {list(value.shape)}")
    # `(batch, classes)` and `(batch, sequence, classes)` end in classes; images have them before the spatial
    # dims.
    dim = 1 if value.ndim > 3 else value.ndim - 1
    classes = value.shape[dim]
    shape = tuple(s for d, s in enumerate(value.shape) if d != dim)
    labels = Input("labels", shape, torch.int64, below=classes)
    targets = builder.late_input(labels.name, shape, torch.int64)
    if value.ndim == 3:
        # PyTorch needs classes second: one row per token avoids a transposition.
        value, targets = value.reshape(-1, classes), targets.reshape(-1)
    sentence = f"cross entropy over {classes} classes with labels, passed after the file's own inputs"
    return F.cross_entropy(value, targets), [labels], sentence


LOSSES: dict[str, Callable[[FxBuilder, Sequence[Traced]], _Made]] = {
    "cross_entropy": _cross_entropy,
    "mean": _mean,
    "mse": _mse,
}
"""Losses by their name for ``--loss``."""


def with_loss(
    builder: FxBuilder, name: str, results: Sequence[Traced], outputs: Sequence[str]
) -> tuple[list[Traced], list[Input], str]:
    """Return ([loss], additional inputs that the loss needs, a sentence that describes the loss).

    Args:
        name: a name in :data:`LOSSES`, or ``auto``. With ``auto``, the loss is a scalar output called
            ``loss``; else cross entropy if an output is called ``logits``; else the squared error.
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
        raise OnnxError(f"unknown loss '{name}'; use auto, {', '.join(LOSSES)}")
    loss, inputs, sentence = LOSSES[name](builder, results)
    return [loss], inputs, f"loss: {sentence} (the file has none; --loss {'|'.join(LOSSES)})"
