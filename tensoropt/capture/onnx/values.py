"""Tensors during the import of an ONNX file, the fx graph that is built from them, and the import's error.

Converters are plain PyTorch code over :class:`OnnxValue`: a constant with data, or the result of an fx node.
A call on constants is computed at once, which folds the shape arithmetic of exported files. Any other call
becomes an fx node, and is run on the meta device for its shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem as _getitem
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tensoropt.capture.fidelity import register
from tensoropt.errors import CaptureError
from tensoropt.units import format_bytes


class OnnxError(CaptureError):
    """An ONNX file that cannot be imported; the message names the file or node, the reason and the remedy."""


FOLDED_BYTES = 2**31
"""The largest total size in bytes of folded constants: a file of a few bytes can ask for terabytes
(ConstantOfShape, Tile)."""


Traced = Any
"""The type annotation for an :class:`OnnxValue` in converters, which use it as a tensor."""


def _operator(func: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda value, other: value.builder.call(func, value, other)


@dataclass(slots=True, eq=False, repr=False)
class OnnxValue:
    """A tensor of the graph being built.

    Attributes:
        meta: meta tensor with the value's shape and dtype.
        data: the values, if known at import.
        hint: name in the file, used if the value becomes a buffer.
    """

    builder: FxBuilder
    meta: torch.Tensor
    data: torch.Tensor | None = None
    node: fx.Node | None = None
    hint: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.meta.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    @property
    def ndim(self) -> int:
        return self.meta.dim()

    @property
    def numel(self) -> int:
        return self.meta.numel()

    @property
    def floating(self) -> bool:
        """Whether the elements are floating-point numbers."""
        return self.meta.is_floating_point()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        # All values of an import share one builder; at least one operand is a value.
        builder = next(leaf.builder for leaf in leaves if isinstance(leaf, OnnxValue))
        return builder.call(func, *args, **(kwargs or {}))

    __add__ = __radd__ = _operator(torch.add)
    __truediv__ = _operator(torch.div)
    __mul__ = __rmul__ = _operator(torch.mul)

    def method(self, name: str, *args: Any, **kwargs: Any) -> OnnxValue:
        """Call ``tensor.name(*args)``, for methods that are no functions of ``torch``."""
        return self.builder.method(name, self, *args, **kwargs)

    def to(self, dtype: torch.dtype) -> OnnxValue:
        """Return the value in another dtype; itself if unchanged."""
        return self if dtype == self.dtype else self.method("to", dtype)

    def reshape(self, *shape: int) -> OnnxValue:
        """Return the value in another shape; itself if unchanged."""
        return self if shape == self.shape else self.builder.call(torch.reshape, self, tuple(shape))

    def permute(self, *dims: int) -> OnnxValue:
        """Return the value with reordered dims; itself if unchanged."""
        return self if dims == tuple(range(self.ndim)) else self.builder.call(torch.permute, self, dims)


class FxBuilder:
    """A builder of a module's fx graph, with parameters and buffers under the file's names.

    Attributes:
        device: device of the module's tensors; folded values are computed on the CPU.
        bounds: size of the smallest table that an input indexes, by the input's node.
        module_name: name of the ONNX node that is being converted.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.module_name = ""
        self.bounds: dict[fx.Node, int] = {}
        self._folded_bytes = 0
        self._taken: set[str] = set()

    # -- leaves -----------------------------------------------------------------------------------

    def known(self, data: torch.Tensor, hint: str = "") -> Traced:
        """Return a value with known data; ``hint`` is its name if it becomes a buffer."""
        return OnnxValue(self, torch.empty_like(data, device="meta"), data, hint=hint)

    def constant(self, data: Any, dtype: torch.dtype | None = None) -> Traced:
        """Return a constant made from a number, a list or a tensor."""
        return self.known(torch.as_tensor(data, dtype=dtype))

    def input(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Traced:
        """Return a placeholder of the module, named after the file's input."""
        node = self.graph.placeholder(_identifier(name))
        return OnnxValue(self, torch.empty(shape, dtype=dtype, device="meta"), node=node, hint=name)

    def late_input(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Traced:
        """Add an input after all others, such as a loss's labels."""
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1:]
        with self.graph.inserting_after(*last) if last else self.graph.inserting_before(None):
            return self.input(name, shape, dtype)

    def bound(self, value: Traced, size: int) -> None:
        """Record that the input from which ``value`` was computed indexes a table of ``size`` rows."""
        node = value.node
        while node is not None and node.op != "placeholder":
            sources = node.all_input_nodes
            live = [s for s in sources if s.op != "get_attr"]
            # Follow calls with a single live operand: a cast, a reshape, a clamp. With two, it is unclear
            # which one is bounded.
            node = live[0] if len({*live}) == 1 else None
        if node is not None:
            self.bounds[node] = min(size, self.bounds.get(node, size))

    def parameter(self, name: str, data: torch.Tensor) -> Traced:
        """Return a parameter of the module, as a value without data, so that no call folds it."""
        key = self._register(name, torch.nn.Parameter(data))
        node = self.graph.get_attr(key)
        return OnnxValue(self, torch.empty_like(data, device="meta"), node=node, hint=name)

    def _register(self, name: str, tensor: torch.Tensor) -> str:
        """Store a tensor under the file's dotted name, made valid for a module and unique; return the key."""
        parts = [re.sub(r"\W", "_", part) or "_" for part in name.split(".")]
        key, number = ".".join(parts), 1
        while not self._is_free(key):
            key, number = f"{'_'.join(parts)}_{number}", number + 1
        register(self.root, key, tensor)
        self._taken.add(key)
        return key

    def _is_free(self, key: str) -> bool:
        module = self.root
        *path, last = key.split(".")
        for part in path:
            if part not in module._modules:
                return not hasattr(module, part)
            module = module._modules[part]  # type: ignore[assignment]
        return not hasattr(module, last)

    # -- calls ------------------------------------------------------------------------------------

    def call(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute ``func(*args, **kwargs)`` at once if it has operands and all are constants; otherwise add
        the call as a node."""
        return self._record("call_function", func, func, args, kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``args[0].name(*args[1:])`` at once on constants; otherwise add the call as a node."""
        return self._record("call_method", name, getattr(torch.Tensor, name), args, kwargs)

    def _record(
        self, kind: str, target: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        operands = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, OnnxValue)]
        # Calls that create tensors have no operands to determine the device.
        with torch.device("meta"):
            meta = self._run(func, args, kwargs, lambda v: v.meta)
        # A call without operands draws random numbers, anew in every step.
        if operands and all(v.data is not None for v in operands):
            # First on meta, which shows the memory it will take.
            self._allow(meta, operands)
            return self._wrap(meta, self._run(func, args, kwargs, lambda v: v.data), None)
        args, kwargs = pytree.tree_map(
            lambda v: self.node(v) if isinstance(v, OnnxValue) else v, (args, kwargs)
        )
        node = self.graph.create_node(kind, target, tuple(args), kwargs)
        node.meta["onnx"] = self.module_name
        return self._wrap(meta, None, node)

    @staticmethod
    def _run(func: Callable[..., Any], args: Any, kwargs: Any, of: Callable[[OnnxValue], Any]) -> Any:
        plain = pytree.tree_map(lambda v: of(v) if isinstance(v, OnnxValue) else v, (args, kwargs))
        with torch.no_grad():
            return func(*plain[0], **plain[1])

    def _allow(self, meta: Any, operands: list[OnnxValue]) -> None:
        shared = {v.meta.untyped_storage()._cdata for v in operands}
        for result in pytree.tree_leaves(meta):
            # A view shares its operand's memory and takes none.
            if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in shared:
                self.reserve(result.untyped_storage().nbytes())

    def reserve(self, count_bytes: int) -> None:
        """Add ``count_bytes``, which are about to be allocated, to the total size of folded constants.

        Raises:
            OnnxError: the total exceeds :data:`FOLDED_BYTES`.
        """
        self._folded_bytes += count_bytes
        if self._folded_bytes > FOLDED_BYTES:
            raise OnnxError(
                f"computing its constants takes {format_bytes(self._folded_bytes)}, more than the "
                f"{format_bytes(FOLDED_BYTES)} allowed; the file's shapes are too large, or its weights are "
                "computed in the graph (store them as initializers)"
            )

    def _wrap(self, meta: Any, data: Any, node: fx.Node | None) -> Any:
        if isinstance(meta, torch.Tensor):
            return OnnxValue(self, meta, data, node)
        assert isinstance(meta, (tuple, list)), type(meta)
        parts = []
        for index, part in enumerate(meta):
            item = None if node is None else self.graph.call_function(_getitem, (node, index))
            parts.append(self._wrap(part, None if data is None else data[index], item))
        return tuple(parts)

    def node(self, value: OnnxValue) -> fx.Node:
        """Return the fx node of a value; a constant becomes a buffer when a node first reads the constant."""
        if value.node is None:
            assert value.data is not None
            hint = value.hint or f"constant_{len(self._taken)}"
            key = self._register(hint, value.data.to(self.device))
            value.node = self.graph.get_attr(key)
        return value.node


def _identifier(name: str) -> str:
    cleaned = re.sub(r"\W", "_", name)
    return cleaned if cleaned[:1].isalpha() or cleaned.startswith("_") else f"v_{cleaned}"
