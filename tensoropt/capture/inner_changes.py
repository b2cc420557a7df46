"""Operators that change their operands internally, although their schemas do not say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch._decomp import _should_decompose_because_unsafe_op
from torch.utils._python_dispatch import _disable_current_modes

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def changes_inside(exported: Any) -> dict[Any, Callable[..., Any]]:
    """Decompositions of operators that are otherwise kept whole, for those that change an operand internally.

    Their schemas do not say so: they are composed of operators of which some change their operands
    (``instance_norm`` its running statistics). Written out, these become functional, and the new values
    become results.
    """
    tried: dict[Any, dict[Any, bool]] = {}
    # Regions without gradient are separate modules.
    modules = [m for m in exported.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    for node in (node for module in modules for node in module.graph.nodes):
        if _may_change(node.target):
            args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
            uses, use = tried.setdefault(node.target, {}), _use(args, kwargs)
            if use not in uses:
                uses[use] = _changes(node.target, args, kwargs)
    return {
        target: partial(_written_out, target, frozenset(use for use, changes in uses.items() if changes))
        for target, uses in tried.items()
        if any(uses.values())
    }


def _may_change(target: Any) -> bool:
    """Whether an operator is composed of others, stays whole in the graph, and does not declare its
    changes."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        # Those are written out in any case.
        and not _should_decompose_because_unsafe_op(target)
        and torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), _COMPOSITE)
    )


def _use(args: Any, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """A key of everything that decides whether a call changes its operands: which operands are present, and
    all arguments that are not tensors."""
    given = [*enumerate(args), *sorted(kwargs.items())]
    shown = ((key, "tensor" if isinstance(value, torch.Tensor) else repr(value)) for key, value in given)
    return tuple(f"{key}={value}" for key, value in shown)


def _changes(target: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call changes an operand, as counted by the operand's version."""

    def on_meta(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty(tuple(map(int, value.shape)), dtype=value.dtype, device="meta")

    with torch.no_grad(), _disable_current_modes():
        try:
            args, kwargs = tuple(map(on_meta, args)), {key: on_meta(value) for key, value in kwargs.items()}
            given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
            before = [v._version for v in given]
            target._op_dk(_COMPOSITE, *args, **kwargs)
        except Exception:  # a call that cannot be tried without data changes nothing that a graph could carry
            return False
        return [v._version for v in given] != before


def _written_out(target: Any, uses: frozenset[Any], *args: Any, **kwargs: Any) -> Any:
    if _use(args, kwargs) not in uses:
        return NotImplemented
    return target._op_dk(_COMPOSITE, *args, **kwargs)
