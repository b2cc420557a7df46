"""Handing over optimizers that were made before a model's parameters were replaced by its plan's."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

LISTED = 3
"""The most names that a warning lists."""


def hand_over(
    parameters: Mapping[nn.Parameter, nn.Parameter],
    stored: Callable[[nn.Parameter, torch.Tensor], torch.Tensor],
) -> None:
    """Let every optimizer of this process continue with the new parameters, in its groups as they are.

    A plain parameter cannot itself become a DTensor (they differ in their memory, so
    ``torch.utils.swap_tensors`` refuses them), and an optimizer does not record the model that it was made
    for: those that are alive are found among the objects of the process.

    Args:
        parameters: a model's old parameters, with the new one for each.
        stored: converts a value of an optimizer's state, which is whole and laid out like an old parameter,
            to the layout of the new one.
    """
    new = {id(old): value for old, value in parameters.items()}
    for optimizer in _alive():
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(p), p) for p in group["params"]]
        olds: list[Any] = [p for p in optimizer.state if id(p) in new]
        for old in olds:
            state = optimizer.state.pop(old)
            optimizer.state[new[id(old)]] = {
                field: stored(old, value) if is_state_of(old, field, value) else value
                for field, value in state.items()
            }


def is_state_of(parameter: torch.Tensor, field: str, value: Any) -> bool:
    """Return whether a field of an optimizer's state is laid out like its parameter; a step counter has the
    shape of a scalar parameter."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and field != "step"


def _alive() -> list[torch.optim.Optimizer]:
    # By type, as `isinstance` would call proxies, which may do anything.
    return [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]


class Forgotten:
    """Old parameters to which something may still refer: a list for clipping, an average of weights.

    Args:
        parameters: the old parameters by state-dict key.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self._of = {key: weakref.ref(parameter) for key, parameter in parameters.items()}

    def warn(self) -> None:
        """Warn once about those that are still referred to."""
        of, self._of = self._of, {}
        if not any(ref() is not None for ref in of.values()):
            return
        gc.collect()  # what only a cycle still refers to is not used
        names = [key for key, ref in of.items() if ref() is not None]
        if names:
            more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
            warnings.warn(
                f"something still refers to the parameters that the model had before parallelize "
                f"({', '.join(names[:LISTED])}{more}): a list of parameters, a copy for averaging, a loss. "
                "They are not trained; take the model's parameters again (optimizers were changed over)",
                stacklevel=4,
            )
