"""A loss whose backward has already run, or is run by the plan and not by autograd.

Micro-batches run forward and backward inside the model's call, and a placed plan orders its backward itself.
Both still hand out a loss, so that a script's ``loss.backward()`` works as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor


class DeferredStep:
    """The state that a step keeps from its forward until the script calls ``loss.backward()``.

    Attributes:
        done: whether that call has happened. It happens once, as it uses up what the step kept.
    """

    def __init__(self) -> None:
        self.done = False


S = TypeVar("S", bound=DeferredStep)


def whole_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a loss as a plain tensor; it is a DTensor if the script added one to the
    loss."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class _DeferredBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        loss: torch.Tensor,
        step: DeferredStep,
        finish: Callable[[Any, torch.Tensor], None],
    ) -> torch.Tensor:
        ctx.step, ctx.finish = step, finish
        # A function that returns its input as it is would hand out the input itself, with its own history.
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        # Autograd would call this once more for a retained graph; the gradients were added to `.grad` the
        # first time.
        if ctx.step.done:
            raise RuntimeError("this loss was already used for backward(); run the model again")
        ctx.step.done = True
        ctx.finish(ctx.step, whole_gradient(gradient))
        return None, None, None, None


def defer_backward(
    anchor: torch.Tensor, loss: torch.Tensor, step: S, finish: Callable[[S, torch.Tensor], None]
) -> torch.Tensor:
    """Return the loss that the script gets; its backward calls ``finish(step, gradient of the loss)``, once.

    Args:
        anchor: any tensor that requires a gradient. Autograd skips functions without such an input, and the
            loss itself has no history left.
    """
    result: torch.Tensor = _DeferredBackward.apply(anchor, loss, step, finish)
    return result
