"""Calls that do less than they seem to: their actual effect is decided before they become operators.

In-place code in a model (``shifted[:, 1:] = labels[:, :-1]``) and helpers written for any dtype
(``y.type_as(x)``) arrive as calls that depend only on a tensor's shape or dtype. Unchanged, they would tie
together tensors that are unrelated, and some have no derivative.
"""

from __future__ import annotations

from typing import Any

import torch

from tensoropt.capture.folding import Folder

VIEW, COPYING_VIEW = "aten.view.default", "aten._unsafe_view.default"
"""A reshape whose operand has an incompatible memory layout is exported as a copy and the second of these."""

_FILLED = {
    "aten.zeros_like.default": 0,
    "aten.ones_like.default": 1,
    "aten.empty_like.default": 0,
    "aten.new_zeros.default": 0,
    "aten.new_ones.default": 1,
    "aten.new_empty.default": 0,
    "aten.new_empty_strided.default": 0,
}
_FILL_ARGUMENT = {
    "aten.full_like.default": 1,
    "aten.new_full.default": 2,
    "aten.fill.Scalar": 1,
    "aten.fill.Tensor": 1,
}


_CHECKS = ("aten._assert", "aten.sym_", "aten._functional_assert")


def checks_of(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The assertions, and the numbers that nothing else reads (``assert lengths.max().item() <= width``)."""
    found: set[torch.fx.Node] = set()
    # From the end, so that all readers of a number are known before the number itself.
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        number = isinstance(
            node.meta.get("val"), (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)
        )
        if str(node.target).startswith(_CHECKS) or (number and found.issuperset(node.users)):
            found.add(node)
    return found


def filled(node: torch.fx.Node, folder: Folder) -> torch.Tensor | None:
    """The result of a call that reads only its operand's shape, as one expanded element."""
    target, value = str(node.target), node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    fill: Any = _FILLED.get(target)
    if target in _FILL_ARGUMENT:
        fill = node.args[_FILL_ARGUMENT[target]]
    if fill is None or (isinstance(fill, torch.fx.Node) and fill not in folder):
        return None
    element = folder.value(fill) if isinstance(fill, torch.fx.Node) else torch.full((), fill)
    # One element, expanded: a mask of zeros uses no memory for its shape.
    return element.to(value.dtype).expand(tuple(value.shape))


def renamed(node: torch.fx.Node) -> torch.fx.Node | None:
    """The operand that a call returns unchanged: a copy of equal type, a concatenation with nothing."""
    target, value = str(node.target), node.meta["val"]
    source: Any = None
    if target == "aten.copy.default":
        source = node.args[1]
    elif target == "aten.type_as.default":
        source = node.args[0]
    elif target == "aten.cat.default":
        parts = with_elements(node.args[0])
        source = parts[0] if len(parts) == 1 else None
    if not isinstance(source, torch.fx.Node):
        return None
    before = source.meta["val"]
    return source if (before.shape, before.dtype) == (value.shape, value.dtype) else None


def with_elements(nodes: Any) -> list[torch.fx.Node]:
    """The tensors of a list that are not empty."""
    return [n for n in nodes if n.meta["val"].numel() > 0]


def viewed_shape(node: torch.fx.Node, folder: Folder) -> tuple[int, ...] | None:
    """The shape of the view to which an ``index`` with ``arange`` along distinct dims is equivalent.

    ``mask[batch[:, None, None, None], keys]``, with both indices an ``arange`` over a whole dim, is how masks
    are written for ``vmap``; it is equivalent to ``mask.view(batch, 1, 1, keys)``.
    """
    source, indices = node.args[0], node.args[1]
    assert isinstance(source, torch.fx.Node)
    assert isinstance(indices, (list, tuple))
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
        assert isinstance(index, torch.fx.Node)
        value = folder.value(index)
        dim = arange_dim(value, int(size))
        if dim is None:
            return None
        if size > 1:
            dim += len(after) - value.dim()
            # Dims in another order would be a permutation, which a view cannot express.
            if dim <= last:
                return None
            shape[dim], last = int(size), dim
    return tuple(shape) if tuple(shape) == tuple(after) else None


def arange_dim(value: torch.Tensor, size: int) -> int | None:
    """The dim along which an index tensor counts ``0 .. size - 1`` (it is constant along the others)."""
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
