"""The calls that a model's code makes during export: refused, placed on the model's device, or answered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._device import _device_constructors

from tensoropt.capture.lines import calling_frame, line_of
from tensoropt.capture.unsupported import refuse_call, refuse_result
from tensoropt.capture.validity import Answers, valid_values

META = torch.device("meta")
_WITH_VALUES = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
"""Calls that make tensors from values in Python: the meta device would lose the values."""
_MOVES = frozenset({"to", "cpu", "cuda"})


class ForwardCalls(Answers):
    """A mode that sees all PyTorch calls in ``forward``.

    Args:
        notes: filled as the export proceeds.
        on_meta: whether the model is exported on the meta device. Tensors that it makes without a device are
            then made there, just as on the CPU for a model on the CPU, and so are those that it makes on a
            device by name.
    """

    def __init__(self, notes: list[str], on_meta: bool):
        super().__init__(notes)
        self.on_meta = on_meta

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, torch._ops.OpOverload):  # a traced graph is run, not the model's code
            return super().__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        refuse_call(name, args, kwargs)
        if self.on_meta:
            if func in _WITH_VALUES and not isinstance(args[0] if args else kwargs.get("data"), torch.Tensor):
                kwargs.pop("device", None)
                return super().__torch_function__(func, types, args, kwargs).to(META)
            args, kwargs = self._placed(func, name, args, kwargs)
        result = super().__torch_function__(func, types, args, kwargs)
        refuse_result(result)
        return result

    @staticmethod
    def _placed(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if func in _device_constructors() or "device" in kwargs:
            return args, kwargs | {"device": META}
        if name in _MOVES and isinstance(args[0], torch.Tensor):
            if name != "to":
                return args[:1], {}
            args = tuple(META if isinstance(a, str | torch.device) else a for a in args)
        return args, kwargs


@contextlib.contextmanager
def followed_calls(on_meta: bool) -> Iterator[list[str]]:
    """Follow the calls of a model's code while the context is open.

    Yields:
        Notes on decisions, filled as the export proceeds.
    """
    notes: list[str] = []
    with _unseeded(notes), valid_values(ForwardCalls(notes, on_meta)):
        yield notes


@contextlib.contextmanager
def _unseeded(notes: list[str]) -> Iterator[None]:
    seed = torch.manual_seed

    def noted(value: Any) -> Any:
        frame = calling_frame()
        if frame is None:
            return seed(value)
        note = f"{line_of(frame)} seeds the random numbers in forward; a plan draws its own"
        if note not in notes:
            notes.append(note)
        # The script's own random numbers continue as they would have.
        return torch.default_generator

    with mock.patch.object(torch, "manual_seed", noted):
        yield
