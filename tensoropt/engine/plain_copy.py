"""A copy of a parallelized model as the plain module that it was."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from tensoropt.graph import OperatorGraph


class ParallelizedParts(Protocol):
    """The parts of :class:`~tensoropt.engine.parallel_model.ParallelModel` that a copy needs."""

    model: nn.Module
    source: OperatorGraph
    names: dict[str, str]
    parameters: dict[str, nn.Parameter]
    attributes: dict[str, Any]
    hooks: list[Any]


def plain_copy(parallel: ParallelizedParts, values: Mapping[str, torch.Tensor]) -> nn.Module:
    """Copy a model as before parallelization, with parameters ``values`` by state-dict key."""
    memo: dict[int, Any] = {
        id(parallel.parameters[parallel.names[key]]): nn.Parameter(
            value, parallel.source.tensors[parallel.names[key]].requires_grad
        )
        for key, value in values.items()
    }
    copied = memo[id(parallel.model)] = object.__new__(type(parallel.model))
    before = parallel.attributes.keys() & parallel.model.__dict__.keys() - {"_apply"}
    attributes = {name: parallel.model.__dict__[name] for name in before}
    attributes |= {"forward": parallel.attributes["forward"]} if "forward" in parallel.attributes else {}
    for module in parallel.model.modules():
        # It has the old module bound.
        memo[id(module.__dict__.get("_apply"))] = None
    copied.__dict__.update(copy.deepcopy(attributes, memo))
    for module in copied.modules():
        module.__dict__.pop("_apply", None)
    for handle in parallel.hooks:
        for hooks in (
            copied._state_dict_hooks,
            copied._state_dict_pre_hooks,
            copied._load_state_dict_pre_hooks,
        ):
            hooks.pop(handle.id, None)
    return copied
