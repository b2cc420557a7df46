"""``torch.no_grad`` inside a model, kept through decomposition.

Export wraps such a region in a submodule, and ``run_decompositions`` inlines it without a trace: gradients
would then flow where the model has none. What leaves a region is therefore detached before. A region of
``torch.inference_mode`` is one of ``no_grad``: all that it adds is that its results may not be used in
backward.

What a region writes to a tensor from outside is another matter: its value changes, and its gradient goes
on to what it was before (``gaussian_nll_loss`` bounds variances so).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.overrides import TorchFunctionMode


def keep_no_grad(exported: Any) -> None:
    """Detach, in place, every result of a region that ran without gradients."""
    wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
    for module in exported.graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        regions = [n for n in module.graph.nodes if n.target is wrap and n.args[0] is False]
        results = [user for n in regions for user in n.users if user.target is operator.getitem]
        for result in results:
            value = result.meta.get("val")
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                _detach(module.graph, result)
        if results:
            module.recompile()


@contextlib.contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """While open, ``torch.inference_mode`` switches gradients off and nothing else, which export can see."""

    def enter(self: Any) -> None:
        self._tensoropt_before = torch.is_grad_enabled()
        torch.set_grad_enabled(not self.mode)

    def leave(self: Any, *error: Any) -> None:
        torch.set_grad_enabled(self._tensoropt_before)

    # Of the class, which decorators made before hold.
    mode = torch.autograd.grad_mode.inference_mode
    with mock.patch.object(mode, "__enter__", enter), mock.patch.object(mode, "__exit__", leave):
        yield


class WritesWithoutGradient(TorchFunctionMode):
    """Writes to a tensor with a gradient while gradients are switched off: its value changes, its gradient is
    passed on as if it had not.

    Export hands on the result of such a write, and would detach it with all other results of the region.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() or not _writes(func) or not _follows_others(args[0]):
            return func(*args, **kwargs)
        written = args[0]
        value = written.detach().clone()
        func(value, *args[1:], **kwargs)
        with torch.enable_grad():
            # Exactly the new value, as what is added is zero.
            written.copy_(value + (written - written.detach()))
        return written


def _writes(func: Any) -> bool:
    """Whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__invert__"))
    return name.endswith("_")


def _follows_others(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf


def _detach(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    # Decomposition takes shapes and modules from there.
    detached.meta = dict(node.meta)
    node.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
