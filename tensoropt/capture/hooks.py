"""Hooks on gradients, which a captured graph has no place for: found and refused by name.

Hooks of forward are part of what is traced. Those of backward would be lost without a word, and with them
what they do to gradients.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules import module as all_modules

from tensoropt.capture.lines import calling_frame, current_line, first_line, is_own, line_of
from tensoropt.errors import CaptureError

_REMEDY = (
    "a plan's backward runs no hooks; remove it before, or write what it does to the gradient as a "
    "torch.autograd.Function that forward calls (the identity forward, the hook's arithmetic in backward), "
    "which is kept"
)


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks on gradients that a model or its parameters have.

    Raises:
        CaptureError: there is one; the message names what has it, and its file and line.
    """
    for kind, hooks in (
        ("backward hook", all_modules._global_backward_hooks),
        ("backward pre-hook", all_modules._global_backward_pre_hooks),
    ):
        for hook in hooks.values():
            raise _refused(f"all modules have the {kind}", hook)
    for name, module in model.named_modules():
        shown = f"{name} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        for kind, hooks in (
            ("backward hook", module._backward_hooks),
            ("backward pre-hook", module._backward_pre_hooks),
        ):
            for hook in hooks.values():
                raise _refused(f"{shown} has the {kind}", hook)
    for name, parameter in model.named_parameters():
        for kind, found in (
            ("hook", parameter._backward_hooks),
            ("post-accumulate-grad hook", getattr(parameter, "_post_accumulate_grad_hooks", None)),
        ):
            for hook in (found or {}).values():
                raise _refused(f"the parameter {name} has the {kind}", hook)


@contextlib.contextmanager
def no_new_hooks() -> Iterator[None]:
    """While open, registering a hook on a gradient on this thread is refused, as forward does it at each
    step."""
    thread = threading.get_ident()

    def refusing(original: Callable[..., Any], what: str, place: int) -> Callable[..., Any]:
        def register(*args: Any, **kwargs: Any) -> Any:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            differentiated = any(getattr(t, "requires_grad", False) for t in tensors)
            if threading.get_ident() == thread and differentiated:
                hook = args[place] if len(args) > place else next(iter(kwargs.values()), None)
                raise _refused(f"forward registers, at {current_line()}, the {what}", hook)
            return original(*args, **kwargs)

        return register

    with contextlib.ExitStack() as stack:
        for holder, name, what in (
            (torch.Tensor, "register_hook", "tensor hook"),
            (torch.Tensor, "register_post_accumulate_grad_hook", "post-accumulate-grad hook"),
            (torch.autograd.graph, "register_multi_grad_hook", "multi-grad hook"),
        ):
            register = refusing(getattr(holder, name), what, 1)
            stack.enter_context(mock.patch.object(holder, name, register))
        yield


@contextlib.contextmanager
def asked_of_backward() -> Iterator[list[str]]:
    """While open, what forward asks of a backward pass that a plan does otherwise is noted.

    Yields:
        The notes, filled as forward runs.
    """
    notes: list[str] = []
    thread = threading.get_ident()
    pack, retain = torch.autograd.graph.saved_tensors_hooks.__enter__, torch.Tensor.retain_grad

    def noted(text: str) -> None:
        frame = calling_frame()
        if threading.get_ident() == thread and frame is not None:
            note = f"{line_of(frame)} {text}"
            if note not in notes:
                notes.append(note)

    def entered(hooks: Any) -> Any:
        # Those of checkpoints, which have a note of their own, are of PyTorch's file.
        if not type(hooks).__module__.startswith("torch.utils."):
            noted(
                f"says by {type(hooks).__name__} how activations are kept for backward (packed, or "
                "elsewhere); a plan keeps them as they are, and counts them so"
            )
        return pack(hooks)

    def retained(tensor: torch.Tensor) -> None:
        noted("asks for the gradient of an activation (retain_grad), which a plan's backward does not keep")
        retain(tensor)

    with (
        mock.patch.object(torch.autograd.graph.saved_tensors_hooks, "__enter__", entered),
        mock.patch.object(torch.Tensor, "retain_grad", retained),
    ):
        yield notes


def _refused(what: str, hook: Any) -> CaptureError:
    hook = _written(hook)
    name = getattr(hook, "__qualname__", type(hook).__qualname__).replace("<locals>.", "")
    return CaptureError(f"{what} {name} ({first_line(hook)}), which would be lost: {_REMEDY}")


def _written(hook: Any) -> Any:
    """The function that a person wrote, where PyTorch made a hook of its own around it."""
    if not inspect.isfunction(hook) or is_own(hook.__code__.co_filename):
        return hook
    inside = [value for value in inspect.getclosurevars(hook).nonlocals.values() if callable(value)]
    return next((value for value in inside if is_own(first_line(value).rpartition(":")[0])), hook)
