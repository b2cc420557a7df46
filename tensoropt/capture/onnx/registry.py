"""A registry with one converter per ONNX operator, by domain, name and the opset from which it applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tensoropt.capture.onnx.errors import DataDependentError, OnnxError
from tensoropt.capture.onnx.values import FxBuilder, Traced

MICROSOFT = "com.microsoft"
"""The domain of the operators that ONNX Runtime's optimizer writes."""


@dataclass(frozen=True)
class Call:
    """One node, as its converter sees it.

    Attributes:
        op: the operator's name.
        name: the node's name, for messages.
        opset: the version of the operator's domain in which the file is written.
        operands: one per input; None if an optional input is left out.
        attributes: plain Python values; tensors as ``torch.Tensor``, subgraphs unchanged.
        wanted: for each output, whether anything reads it.
        types: the ONNX element type of each input; 0 if it is not known.
        batch: (the file's batch size, the one requested instead), if a fixed one was overridden.
        run: evaluates a subgraph with values for its inputs; returns its outputs.
    """

    op: str
    name: str
    opset: int
    operands: Sequence[Traced]
    attributes: Mapping[str, Any]
    wanted: Sequence[bool]
    builder: FxBuilder
    types: Sequence[int] = ()
    batch: tuple[int, int] | None = None
    run: Callable[..., list[Any]] | None = None

    def __len__(self) -> int:
        return len(self.operands)

    def __getitem__(self, index: int) -> Traced:
        """The required operand at a position."""
        value = self.optional(index)
        if value is None:
            raise OnnxError(f"its input {index} is missing")
        return value

    def optional(self, index: int) -> Traced:
        """The operand at a position; None if it is left out."""
        return self.operands[index] if index < len(self.operands) else None

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute of the node, or ``default`` if the file has none."""
        return self.attributes.get(name, default)

    def type_of(self, index: int) -> int:
        """The ONNX element type of an input; 0 if it is not known."""
        return self.types[index] if index < len(self.types) else 0

    def wants(self, index: int) -> bool:
        """Whether anything reads an output."""
        return index < len(self.wanted) and self.wanted[index]

    def known(self, index: int, what: str = "") -> torch.Tensor:
        """The data of an operand that has to be constant.

        Raises:
            DataDependentError: it depends on an input of the model.
        """
        value = self[index]
        if value.data is None:
            raise DataDependentError(
                f"its {what or f'input {index}'} depends on the values of an input, so the shapes of what "
                "follows are not fixed"
            )
        return value.data

    def ints(self, index: int, what: str = "") -> list[int]:
        """A constant operand, as a list of whole numbers."""
        return [int(v) for v in self.known(index, what).reshape(-1).tolist()]

    def ints_or(self, index: int, default: Any, what: str = "") -> Any:
        """A constant operand as whole numbers; ``default`` if it is left out."""
        return default if self.optional(index) is None else self.ints(index, what)

    def scalar(self, index: int, default: Any = None, what: str = "") -> Any:
        """A constant operand with one element as a Python number; ``default`` if it is left out."""
        if self.optional(index) is None:
            return default
        return self.known(index, what).reshape(()).item()

    def dim(self, name: str = "axis", default: int = 0, *, of: int | None = None) -> int:
        """An attribute that names a dim of operand 0 (or of a tensor with ``of`` dims), made non-negative."""
        return positive(int(self.attribute(name, default)), self[0].ndim if of is None else of)


def positive(dim: int, dims: int) -> int:
    """The number of a dim, counted from the front.

    Raises:
        OnnxError: there is no such dim.
    """
    if not -dims <= dim < max(dims, 1):
        raise OnnxError(f"axis {dim} does not exist in a tensor of {dims} dims")
    return dim % dims if dims else 0


Converter = Callable[[Call], Any]
_CONVERTERS: dict[tuple[str, str], list[tuple[int, Converter]]] = {}


def converter(*names: str, since: int = 1, domain: str = "") -> Callable[[Converter], Converter]:
    """Register a function as the converter of operators, from an opset on."""

    def register(function: Converter) -> Converter:
        for name in names:
            versions = _CONVERTERS.setdefault((domain, name), [])
            versions.append((since, function))
            # Newest first, so that the first one that applies at an opset is the right one.
            versions.sort(key=lambda entry: entry[0], reverse=True)
        return function

    return register


def find_converter(domain: str, name: str, opset: int) -> Converter | None:
    """The converter that applies at an opset, or None."""
    for since, function in _CONVERTERS.get((domain, name), ()):
        if since <= opset:
            return function
    return None


def supported() -> list[str]:
    """The names of all operators with a converter; those of other domains as ``domain.Name``."""
    return sorted(f"{domain}.{name}".lstrip(".") for domain, name in _CONVERTERS)
