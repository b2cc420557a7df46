"""A loss whose backward is the engine's: it comes once, with the gradient of the loss."""

from __future__ import annotations

import pytest
import torch

from tensoropt.engine.deferred import DeferredStep, defer_backward


def deferred() -> tuple[torch.Tensor, DeferredStep, list[float]]:
    given: list[float] = []
    step = DeferredStep()
    anchor = torch.zeros((), requires_grad=True)
    loss = defer_backward(anchor, torch.tensor(3.0), step, lambda _, gradient: given.append(float(gradient)))
    return loss, step, given


def test_backward_finishes_the_step_with_the_gradient_of_the_loss() -> None:
    loss, step, given = deferred()
    assert float(loss.detach()) == 3.0
    assert not step.done
    (0.5 * loss).backward()
    assert step.done
    assert given == [0.5]


def test_a_second_backward_is_refused() -> None:
    loss, _, given = deferred()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already used for backward"):
        loss.backward()
    assert given == [1.0]
