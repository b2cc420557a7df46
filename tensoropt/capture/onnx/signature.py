"""The inputs of a file: sizes that are bound from outside, and example values that the graph accepts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx
import torch

from tensoropt.capture.onnx.errors import OnnxError
from tensoropt.capture.onnx.tensors import torch_dtype
from tensoropt.units import format_bytes

MAX_INPUT_BYTES = 2**36


@dataclass(frozen=True)
class Input:
    """One input of a file, with all its sizes bound.

    Attributes:
        below: for whole numbers, the size of the table that they index; None if they index none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int | None = None

    def example(self, generator: torch.Generator, device: str) -> torch.Tensor:
        """Normally distributed numbers; whole numbers within the table that they index, otherwise ones (a
        mask)."""
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
    """The inputs with all sizes bound, and the (old, new) batch size if a fixed one was replaced.

    Args:
        graph: the graph; its inputs that are not initializers are the model's inputs.
        dims: sizes by the file's name of a dim (``batch``), or by input and position (``x[0]``), which also
            replaces a fixed size.

    Raises:
        OnnxError: a dim has no size, or a given name is not a dim of the file; the message names all of them.
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
            raise OnnxError(
                f"the input '{value.name}' is no tensor (a sequence, map or optional); give tensors"
            )
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
        if size_bytes > MAX_INPUT_BYTES:
            raise OnnxError(
                f"the input '{value.name}' of shape {shape} has {format_bytes(size_bytes)}, more than the "
                f"{format_bytes(MAX_INPUT_BYTES)} allowed; its sizes are absurd"
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
    """A likely size, to show in an example."""
    lowered = name.lower()
    if "seq" in lowered or "len" in lowered:
        return 128
    if "height" in lowered or "width" in lowered:
        return 224
    return 8
