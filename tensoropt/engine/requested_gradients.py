"""Refuse ``torch.autograd.grad(loss, parameters)`` and similar requests for gradients of a plan's loss."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from tensoropt.engine.gradients import is_deferred
from tensoropt.errors import PlanError

SHAPE = "_tensoropt_shape"
"""The attribute of a parallelized model's parameter that stores its shape in the model."""
_LOSS = "tensoropt"
_RUN = "_engine_run_backward"


def mark_loss(loss: torch.Tensor) -> None:
    """Mark the autograd node of a plan's loss, to find it in graphs that the script builds on it."""
    if loss.grad_fn is not None:
        metadata: Any = loss.grad_fn.metadata
        metadata[_LOSS] = True


def refuse_requests() -> None:
    """Make requests for gradients of a plan's loss by parameters (``torch.autograd.grad``, ``inputs=``) or
    with ``create_graph=True`` raise a PlanError, in this process from now on."""
    run = getattr(torch.autograd, _RUN, None)  # not public
    if run is None or hasattr(run, "__wrapped__"):
        return

    @functools.wraps(run)
    def checked(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        # As both callers in PyTorch pass them: gradients, retain_graph, create_graph, inputs.
        create_graph, inputs = args[2], args[3]
        planned = any(hasattr(value, SHAPE) for value in inputs)
        if (planned or create_graph) and _reaches_loss(outputs):
            what = "gradients of gradients" if create_graph and not planned else "gradients by request"
            raise PlanError(
                f"a plan's loss gives no {what} (torch.autograd.grad, backward(inputs=...) or "
                "create_graph=True): its parameters get their gradients by loss.backward(), on all ranks "
                "together; call that, and read param.grad"
            )
        return run(outputs, *args, **kwargs)

    setattr(torch.autograd, _RUN, checked)


def _reaches_loss(outputs: Iterable[Any]) -> bool:
    waiting = [getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs]
    seen = set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_deferred(node) or _LOSS in node.metadata:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False
