"""Calls of a captured model: from a user's arguments to the graph's inputs, and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tensoropt.capture import Capture
from tensoropt.errors import PlanError


class CallingConvention:
    """Flattens calls of ``forward`` as the capture did, however the arguments are passed.

    Args:
        forward: the model's own forward, for its signature.
        captured: knows the example call.
    """

    def __init__(self, forward: Callable[..., Any], captured: Capture):
        self.signature = inspect.signature(forward)
        self.example = captured.example
        args, kwargs = pytree.tree_unflatten(list(range(len(self.example))), captured.in_spec)
        self.order, self.spec = pytree.tree_flatten(self._bound(args, kwargs))

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        try:
            arguments = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise PlanError(f"the model cannot be called like this: {error}") from None
        found: dict[str, Any] = {}
        for name, value in arguments.items():
            # `forward(**kwargs)` binds all of these as one dict; a call may also name them one by one.
            if self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                found.update(value)
            else:
                found[name] = value
        # What was not passed at capture may be passed as its default.
        # Sorted by name: a call by position and one by keywords flatten alike.
        return [(name, found[name]) for name in sorted(found) if not self._is_default(name, found[name])]

    def _is_default(self, name: str, value: Any) -> bool:
        parameter = self.signature.parameters.get(name)
        return parameter is not None and value is None and parameter.default is None

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The graph's inputs of a call.

        Raises:
            PlanError: the call differs from the captured one in more than the values of its tensors.
        """
        leaves, spec = pytree.tree_flatten(self._bound(args, kwargs))
        if spec != self.spec:
            expected = [name for name, _ in pytree.tree_unflatten(leaves_of(self.spec), self.spec)]
            given = [name for name, _ in self._bound(args, kwargs)]
            raise PlanError(
                f"the plan is for a call with {', '.join(expected)}, but this one has {', '.join(given)}; "
                "explore the model with the arguments it is trained with"
            )
        # Leaves come in the order of names; the graph's inputs are in the order of the captured call.
        values: list[Any] = [None] * len(self.example)
        for index, leaf in zip(self.order, leaves, strict=True):
            if isinstance(index, int):
                values[index] = leaf
        return [v for v, e in zip(values, self.example, strict=True) if self._checked(v, e)]

    @staticmethod
    def _checked(value: Any, example: Any) -> bool:
        """Whether it is a tensor; refuses one of another shape or type, and other constants."""
        if not isinstance(example, torch.Tensor):
            # Constants are compiled into the graph: another value would be left out without a word.
            if value is not example and value != example:
                raise PlanError(
                    f"the plan is for calls with the constant {example!r}, but this one has {value!r}"
                )
            return False
        if not isinstance(value, torch.Tensor):
            raise PlanError(f"the plan is for a tensor where this call has {value!r}")
        if value.shape != example.shape or value.dtype != example.dtype:
            raise PlanError(
                f"the plan is for inputs of shape {tuple(example.shape)} {example.dtype}, but this call "
                f"has {tuple(value.shape)} {value.dtype}; every rank passes the global batch (drop a smaller "
                "last one)"
            )
        return True


def leaves_of(spec: pytree.TreeSpec) -> list[int]:
    """Leaves to fill a tree with, to read its structure back."""
    return [0] * spec.num_leaves
