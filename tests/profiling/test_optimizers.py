"""What optimizers keep, make and move, beside what PyTorch's own do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tensoropt.errors import MeasurementError
from tensoropt.profiling.optimizers import OPTIMIZERS, make_optimizer

ELEMENTS = 1000


class Traffic(TorchDispatchMode):
    """Counts the elements that kernels read and write, and those of tensors that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.numel() > 1}
        written = {
            t
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for t in tree_leaves(value)
            if t.numel() > 1
        }
        made = {t for t in tree_leaves(found) if isinstance(t, Tensor) and t.numel() > 1} - given
        self.moved += sum(t.numel() for t in given) + sum(t.numel() for t in written | made)
        self.made += sum(t.numel() for t in made)
        return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_moves_keeps_and_makes_as_many_values_as_is_said(name: str) -> None:
    parameters = [torch.randn(ELEMENTS).requires_grad_() for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn(ELEMENTS)
    optimizer = make_optimizer(name, parameters)
    optimizer.step()  # makes the state
    with Traffic() as traffic:
        optimizer.step()
    kind, whole = OPTIMIZERS[name], 3 * ELEMENTS
    state = [
        v for of in optimizer.state.values() for v in of.values() if isinstance(v, Tensor) and v.numel() > 1
    ]
    assert sum(v.numel() for v in state) == kind.state * whole
    assert traffic.made == kind.transient * whole
    # A fused kernel is told that it may write its gradients, which it does where they are scaled alone.
    unwritten = whole if name == "adam_fused" else 0
    assert traffic.moved - unwritten == kind.traffic * whole


def test_others_are_refused() -> None:
    with pytest.raises(MeasurementError, match="use sgd, momentum, adam, adam_fused"):
        make_optimizer("lion", [])
