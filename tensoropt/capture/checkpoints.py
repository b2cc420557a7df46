"""``torch.utils.checkpoint`` inside a model: the checkpointed code is traced once, with gradients.

Whether activations are kept or recomputed is a subject of the search, so the plan's choice replaces the
model's own. The effect of a checkpoint on gradients is preserved: a reentrant one whose arguments have none
produces none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import checkpoint

from tensoropt.capture.lines import current_line

_SHOWN = 4
"""How many modules a note names."""


class Checkpoints:
    """The checkpoints that a model's code has used.

    Args:
        model: provides the names of modules.
    """

    def __init__(self, model: nn.Module):
        # Keyed by their attribute dicts: export wraps modules in proxies, which share them.
        self._names: Mapping[int, str] = {id(vars(m)): name for name, m in model.named_modules()}
        self._met: dict[str, str] = {}
        self._idle: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on these checkpoints."""
        found = []
        if self._met:
            names = list(self._met)
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            found.append(
                f"the model's own checkpointing of {', '.join(names[:_SHOWN])}{more} "
                f"({next(iter(self._met.values()))}) is replaced by the plan's, which chooses the blocks "
                "whose inside is computed again"
            )
        found += [
            f"the reentrant checkpoint at {place} gives no gradient, as in the model: none of the tensors "
            "that it is given has one; use_reentrant=False would train what is inside"
            for place in self._idle
        ]
        return tuple(found)

    def reentrant(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Do what ``CheckpointFunction.apply`` does in a step, without computing anything twice."""
        self._meet(function)
        if torch.is_grad_enabled() and not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            self._idle[current_line()] = None
            with torch.no_grad():
                return function(*args)
        return function(*args)

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """While open, non-reentrant checkpoints simply call their function."""

        def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
            self._meet(function)
            yield

        with mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", plain):
            yield

    def _meet(self, function: Any) -> None:
        module = getattr(function, "__self__", function)
        while isinstance(module, functools.partial):
            given = next((a for a in module.args if isinstance(a, nn.Module)), module.func)
            module = getattr(given, "__self__", given)
        name = self._names.get(id(getattr(module, "__dict__", None)))
        place = current_line()
        self._met.setdefault(name or f"a function at {place}", place)
