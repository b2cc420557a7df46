"""``torch.no_grad`` inside a model, kept through decomposition.

Export wraps such a region in a submodule, and ``run_decompositions`` inlines it without a trace: gradients
would then flow where the model has none. What leaves a region is therefore detached before.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


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


def _detach(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    # Decomposition takes shapes and modules from there.
    detached.meta = dict(node.meta)
    node.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
