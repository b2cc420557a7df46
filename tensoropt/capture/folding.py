"""Constant folding: a tensor that depends on no input and no parameter is computed once, at capture.

Constants are stored with size 1 along each dim where their values do not change. Calls that read only a
tensor's shape or dtype become constants, too. Writes into a part of a complex tensor, which PyTorch cannot
differentiate, become writes into its real and imaginary parts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tensoropt.capture.lines import node_line

_CONSTANT_LIMIT = 256 << 20
"""The size in bytes of the largest tensor that is computed at capture and stored as a constant. Larger ones
are computed in every step, as in the model itself."""
_UNWRITTEN = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})
"""Calls that return uninitialised memory. Constants made by them are zeroed, because leftover contents would
differ between processes."""
_UNTAGGED_POINTWISE = frozenset(
    {torch.ops.aten.__and__.Tensor, torch.ops.aten.__or__.Tensor, torch.ops.aten.__xor__.Tensor}
)
_COMPARED_ELEMENTS = 1 << 27
"""The number of elements above which only dims of stride 0 are reduced to size 1, because comparing values
would take seconds."""


class Folder:
    """The constants found during capture: values of nodes that depend on no input and no parameter.

    The graph must be the same whether the model has values or is on the meta device, where *stored* values
    (buffers, tensors in the model's code, and results computed from them) are unknown. So no decision depends
    on stored values, except those of attention masks with ``read_stored``. Two stored values share a constant
    if they are computed in the same way; two other values share one if they are equal.

    Attributes:
        live: line of the model's code, by name of each node whose result is too large to be a constant.
    """

    def __init__(self) -> None:
        self._known: dict[torch.fx.Node, Any] = {}
        self._stored: set[torch.fx.Node] = set()
        self.values: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}
        self._results: dict[Any, Any] = {}
        self._reduced: dict[int, tuple[Tensor, bytes | None]] = {}
        self._equal: dict[Any, Tensor] = {}
        self.live: dict[str, str] = {}

    def __contains__(self, node: torch.fx.Node) -> bool:
        return node in self._known

    def give(self, node: torch.fx.Node, value: Tensor, *, stored: bool = False) -> None:
        """Record the value of a node; ``stored`` if the value is unknown for a model on the meta device."""
        self._known[node] = value.detach()
        if stored:
            self._stored.add(node)

    def value(self, node: torch.fx.Node) -> Any:
        """Return the value of a folded node: a tensor, a number or a tuple."""
        return self._known[node]

    def decides(self, node: torch.fx.Node) -> bool:
        """Return whether a node's value is known on every device, so that the graph may depend on it."""
        return node in self and node not in self._stored

    def reads_stored(self, node: torch.fx.Node) -> bool:
        """Return whether any operand is a stored value."""
        return any(source in self._stored for source in node.all_input_nodes)

    def can_fold(self, node: torch.fx.Node) -> bool:
        """Return whether a node can become a constant: its operands are known, it draws no random numbers,
        and its result is small enough. If the result is too large, the node's line is recorded in ``live``.
        """
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return False  # random numbers are drawn anew in every step
        if not all(source in self for source in node.all_input_nodes):
            return False
        operands = [self._known[source] for source in node.all_input_nodes]
        small = _computed_bytes(node, operands) <= _CONSTANT_LIMIT
        if not small:
            self.live[node.name] = node_line(node) or node.name
        return small

    def fold(self, node: torch.fx.Node) -> None:
        """Compute and record a node's value; equal calls on the same constants share one result."""
        call = (node.args, dict(node.kwargs))
        args, kwargs = pytree.tree_map_only(torch.fx.Node, self._known.__getitem__, call)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        # Compared by identity, which is cheap; `keep` detects equal values in different memory. The type is
        # part of the key, because 1, 1.0 and True are equal.
        same = tuple(id(v) if isinstance(v, Tensor) else (type(v), repr(v)) for v in leaves)
        key = (node.target, same, str(spec))
        if key not in self._results:
            # Operands are kept with the result: an id is meaningless once its tensor is gone.
            self._results[key] = (_evaluate(node.target, args, kwargs), leaves)
        self._known[node] = self._results[key][0]
        if self.reads_stored(node):
            self._stored.add(node)

    def once(self, key: Any, value: Tensor) -> Tensor:
        """Return the first value that was given for ``key``, so that layers share one tensor."""
        made: Tensor = self._results.setdefault(key, (value, ()))[0]
        return made

    def keep(self, node: torch.fx.Node, name: str, shape: tuple[int, ...]) -> str:
        """Add the value of a node that an operator reads to the constants; return the constant's name.

        Equal constants share a name. Equal stored values share memory, but not a name.
        """
        whole = self.value(node)
        # Comparing a large mask takes seconds; layers share it, so it is compared once.
        if id(whole) not in self._reduced:
            # In memory of its own.
            reduced = broadcast_narrowed(whole).clone(memory_format=torch.contiguous_format)
            self._reduced[id(whole)] = (reduced, None if reduced.is_meta else _digest(reduced))
        value, digest = self._reduced[id(whole)]
        same = (tuple(value.shape), str(value.dtype), digest)
        if digest is not None:
            # The memory is shared even if the names must not be.
            value = self._equal.setdefault(same, value)
        # Stored values are unknown on the meta device: if they were merged by value, the graph would have
        # fewer constants with weights than without.
        name = self._names.setdefault((shape, same if self.decides(node) else id(whole)), name)
        self.values[name] = value
        return name


def _computed_bytes(node: torch.fx.Node, values: list[Any]) -> int:
    results = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    operands = [v for v in values if isinstance(v, Tensor)]
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    # Without data there is nothing to compute, and views share their operand's memory.
    if any(v.is_meta for v in operands) or any(r.alias_info is not None for r in returns):
        return 0
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _UNTAGGED_POINTWISE:
        narrowed = torch.broadcast_shapes(*(_unexpanded(v) for v in operands))
        return sum(prod(narrowed) * v.element_size() for v in results)
    return sum(v.numel() * v.element_size() for v in results)


def _unexpanded(value: Tensor) -> tuple[int, ...]:
    return tuple(1 if stride == 0 else size for size, stride in zip(value.shape, value.stride(), strict=True))


def _evaluate(target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
    # One operand has no data, so the result has none either, and only its shape is known.
    without_data = any(t.is_meta for t in tensors)
    if "device" in kwargs:
        # Constants are computed and stored on the CPU, on whichever device the model was exported.
        kwargs["device"] = torch.device("meta" if without_data else "cpu")
    if without_data:
        args, kwargs = pytree.tree_map_only(Tensor, lambda v: v.to("meta"), (args, kwargs))
    with torch.no_grad():
        if target.__name__.split(".")[0] in _UNWRITTEN:
            return target(*args, **kwargs).zero_()
        if torch.Tag.pointwise in getattr(target, "tags", ()) or target in _UNTAGGED_POINTWISE:
            return _pointwise(target, args, kwargs)
        return _strided(target, args, kwargs)


def _pointwise(target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an elementwise call on operands narrowed to size 1 where they do not change; expand the result.

    A mask of 2,048 equal samples of 8,192 tokens then takes 64 MiB instead of 128 GiB.
    """
    tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
    if len(tensors) == 0 or any(t.is_meta for t in tensors):
        return target(*args, **kwargs)
    narrowed = {id(t): broadcast_narrowed(t) for t in tensors}
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    args, kwargs = pytree.tree_map_only(Tensor, lambda v: narrowed[id(v)], (args, kwargs))
    result = target(*args, **kwargs)
    return result.expand(shape) if isinstance(result, Tensor) else result


def _strided(target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    try:
        return target(*args, **kwargs)
    except RuntimeError:
        args, kwargs = pytree.tree_map_only(Tensor, lambda v: v.contiguous(), (args, kwargs))
        return target(*args, **kwargs)


def _digest(value: Tensor) -> bytes:
    return hashlib.sha256(value.contiguous().flatten().view(torch.uint8).numpy().tobytes()).digest()


def kept_constants(constants: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
    """Return, by constant's name, (name of the first constant with the same tensor, stored size in bytes)."""
    first: dict[int, str] = {}
    return {n: (first.setdefault(id(v), n), v.numel() * v.element_size()) for n, v in constants.items()}


def broadcast_narrowed(value: Tensor) -> Tensor:
    """Return a view of ``value`` with size 1 along each dim where the elements do not change."""
    for dim, size in enumerate(value.shape):
        if size <= 1:
            continue
        first = value.narrow(dim, 0, 1)
        # Stride 0 shows it without reading the values.
        if value.stride(dim) == 0 or (
            not value.is_meta and value.numel() <= _COMPARED_ELEMENTS and bool((value == first).all())
        ):
            value = first
    return value


VIEW, COPYING_VIEW = "aten.view.default", "aten._unsafe_view.default"
"""The calls that change a shape. Export writes a copy and the second call for a reshape of an operand whose
memory layout is incompatible."""

_FILLED = {f"aten.{name}.default": 1 for name in ("ones", "ones_like", "new_ones")} | {
    f"aten.{name}.default": 0
    for name in ("zeros", "zeros_like", "empty_like", "new_zeros", "new_empty", "new_empty_strided")
}
_FILL_ARGUMENT = {
    "aten.full.default": 1, "aten.full_like.default": 1, "aten.new_full.default": 2, "aten.fill.Scalar": 1,
    "aten.fill.Tensor": 1,
}  # fmt: skip


_SYMBOLS = (torch.SymBool, torch.SymInt, torch.SymFloat)
_CHECKS = ("aten._assert", "aten.sym_", "aten._functional_assert")


def checks_of(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the nodes of assertions and of the numbers that only assertions read (``assert
    lengths.max().item() <= width``).
    """
    checks: set[torch.fx.Node] = set()
    # From the end, so that all readers of a number are known before the number itself.
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        number = isinstance(node.meta.get("val"), (bool, int, float, *_SYMBOLS))
        if str(node.target).startswith(_CHECKS) or (number and checks.issuperset(node.users)):
            checks.add(node)
    return checks


def filled(node: torch.fx.Node, folder: Folder) -> Tensor | None:
    """Return the result of a call that fills a tensor with one number, as one expanded element; else None."""
    target, value = str(node.target), node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    fill: Any = _FILLED.get(target)
    if target in _FILL_ARGUMENT:
        fill = node.args[_FILL_ARGUMENT[target]]
    if fill is None or (isinstance(fill, torch.fx.Node) and fill not in folder):
        return None
    # One element, expanded: a mask of zeros uses no memory for its shape.
    if isinstance(fill, torch.fx.Node):
        return folder.value(fill).to(value.dtype).expand(tuple(value.shape))
    made = torch.full((), fill, dtype=value.dtype, device="cpu").expand(tuple(value.shape))
    return folder.once((repr(fill), made.dtype, made.shape), made)


_COPIES = frozenset(
    f"aten.{name}.default" for name in ("alias", "clone", "contiguous", "lift_fresh_copy", "detach_copy")
)
_LYING = frozenset({
    "aten.view_as_complex.default", "aten.view_as_real.default", "aten.view.dtype", "aten.as_strided.default",
})  # fmt: skip
"""Calls that reinterpret the memory of their operand. A copy before such a call must stay: a conjugate is
only a flag on a tensor until the tensor is copied."""
_MAYBE_RENAMES = frozenset({
    VIEW, COPYING_VIEW, "aten.reshape.default", "aten.expand.default", "aten.slice.Tensor",
    "aten._to_copy.default", "aten.to.dtype", "aten.type_as.default",
})  # fmt: skip
"""Calls that return their operand unchanged if shape and dtype do not change."""


def renamed(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the operand that a call returns unchanged, or None for a call that changes it. Unchanged are
    copies, views of equal shape and dtype, dropouts that drop nothing, and concatenations with empty tensors
    only."""
    target, value = str(node.target), node.meta["val"]
    source: Any = node.args[0] if node.args else None
    if target == "aten.dropout.default":
        return source if not node.args[2] or node.args[1] == 0.0 else None
    if target in _COPIES:
        return None if any(str(reader.target) in _LYING for reader in node.users) else source
    if target == "aten.copy.default":
        source = node.args[1]
    elif target == "aten.cat.default":
        parts = with_elements(source)
        source = parts[0] if len(parts) == 1 else None
    elif target not in _MAYBE_RENAMES:
        return None
    if not isinstance(source, torch.fx.Node):
        return None
    before = source.meta["val"]
    return source if (before.shape, before.dtype) == (value.shape, value.dtype) else None


def with_elements(nodes: Any) -> list[torch.fx.Node]:
    """Return the nodes of a list whose tensors are not empty."""
    return [n for n in nodes if n.meta["val"].numel() > 0]


def viewed_shape(node: torch.fx.Node, folder: Folder) -> tuple[int, ...] | None:
    """Return the shape of the view that equals an ``index`` with ``arange`` along distinct dims, or None.

    Masks for ``vmap`` are written as ``mask[batch[:, None, None, None], keys]``, where both indices are an
    ``arange`` over a whole dim. This equals ``mask.view(batch, 1, 1, keys)``.
    """
    source, indices = cast(tuple[Any, Any], node.args[:2])
    before, after = source.meta["val"].shape, node.meta["val"].shape
    if len(indices) != len(before):
        return None
    # Only values that are known on every device count; otherwise the graph would depend on where it was
    # captured.
    if not all(isinstance(i, torch.fx.Node) and folder.decides(i) for i in indices):
        return None
    shape = [1] * len(after)
    last = -1
    for size, index in zip(before, indices, strict=True):
        value = folder.value(index)
        dim = _arange_dim(value, int(size))
        if dim is None:
            return None
        if size > 1:
            dim += len(after) - value.dim()
            # Dims in another order would be a permutation, which a view cannot express.
            if dim <= last:
                return None
            shape[dim], last = int(size), dim
    return tuple(shape) if tuple(shape) == tuple(after) else None


def _arange_dim(value: Tensor, size: int) -> int | None:
    """Return the dim along which an index tensor counts ``0 .. size - 1``, equal along others; else None."""
    if value.is_meta or value.dtype == torch.bool:
        return None
    if size == 1:
        return 0 if not bool(value.any()) else None
    for dim, length in enumerate(value.shape):
        if length == size:
            counted = torch.arange(size).view([size if d == dim else 1 for d in range(value.dim())])
            if bool((value == counted).all()):
                return dim
    return None


_WRITES = {
    "aten.slice_scatter.default": "src",
    "aten.select_scatter.default": "src",
    "aten.diagonal_scatter.default": "src",
    "aten.index_put.default": "values",
}
"""Calls that write into a part of a tensor, mapped to the argument with the written values."""
_DIMS = ("dim", "dim1", "dim2")


def write_complex_as_real(graph: torch.fx.Graph) -> None:
    """Replace writes into complex tensors with writes into their real and imaginary parts."""
    # A conjugate is only a flag on a tensor, and has no parts to view before it is resolved.
    conjugated = any(str(node.target) == "aten._conj.default" for node in graph.nodes)
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if str(node.target) not in _WRITES or not isinstance(value, Tensor) or not value.is_complex():
            continue
        arguments = arguments_of(node)
        # The new dim is last, so dims counted from the end would shift.
        arguments |= {name: arguments[name] % value.dim() for name in _DIMS if name in arguments}
        with graph.inserting_before(node):
            for name in ("self", _WRITES[str(node.target)]):
                if conjugated:
                    resolve = torch.ops.aten.resolve_conj.default
                    arguments[name] = _called(graph, node, resolve, arguments[name])
                view = torch.ops.aten.view_as_real.default
                arguments[name] = _called(graph, node, view, arguments[name])
            if "dim1" in arguments:
                # A diagonal is the last dim of the value written to it, behind that of the parts.
                turn = torch.ops.aten.transpose.int
                arguments["src"] = _called(graph, node, turn, arguments["src"], -2, -1)
            real = _called(graph, node, node.target, *arguments.values())
            whole = _called(graph, node, torch.ops.aten.view_as_complex.default, real)
        node.replace_all_uses_with(whole)
        graph.erase_node(node)


def arguments_of(node: torch.fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by name, with default values for arguments that are not passed."""
    assert isinstance(node.target, torch._ops.OpOverload)
    declared = node.target._schema.arguments
    passed = dict(zip((argument.name for argument in declared), node.args, strict=False)) | dict(node.kwargs)
    return {argument.name: passed.get(argument.name, argument.default_value) for argument in declared}


def _called(graph: torch.fx.Graph, like: torch.fx.Node, target: Any, *args: Any) -> torch.fx.Node:
    node = graph.call_function(target, args)
    node.meta = {key: like.meta[key] for key in ("stack_trace", "nn_module_stack") if key in like.meta}
    node.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]))
    return node
