"""Hooks on gradients, which a captured graph cannot represent: they are detected and refused by name.

Forward hooks are part of what is traced. Backward hooks would be lost silently, together with their effect on
gradients.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
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
        CaptureError: there is one; the message names its owner, file and line.
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
    """While open, refuse the registration of a hook on a gradient on this thread, as forward would do it in
    each step."""
    thread = threading.get_ident()

    def refusing(original: Callable[..., Any], what: str, place: int) -> Callable[..., Any]:
        def register(*args: Any, **kwargs: Any) -> Any:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            differentiated = any(
                isinstance(t, nn.Module) or getattr(t, "requires_grad", False) for t in tensors
            )
            if threading.get_ident() == thread and differentiated:
                hook = args[place] if len(args) > place else next(iter(kwargs.values()), None)
                raise _refused(f"forward registers, at {current_line()}, the {what}", hook)
            return original(*args, **kwargs)

        return register

    def refusing_saved(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(self: Any, *args: Any, **kwargs: Any) -> Any:
            # PyTorch's own hooks, which checkpoints install, do not change what is saved.
            if threading.get_ident() == thread and is_own(sys._getframe(1).f_code.co_filename):
                hook = next(iter((*args, *kwargs.values())), self)
                raise _refused(f"forward has, at {current_line()}, the saved-tensor hook", hook)
            return original(self, *args, **kwargs)

        return make

    def grad_fn(value: torch.Tensor) -> Any:
        node = own_node(value)
        own = threading.get_ident() == thread and is_own(sys._getframe(1).f_code.co_filename)
        return _Node(node) if own and node is not None else node

    def edge(value: Any) -> Any:
        found: Any = original_edge(value)
        own = threading.get_ident() == thread and is_own(sys._getframe(1).f_code.co_filename)
        return found._replace(node=_Node(found.node)) if own else found

    base: Any = torch._C.TensorBase
    own_node = base.grad_fn.__get__
    graph, original_edge = torch.autograd.graph, torch.autograd.graph.get_gradient_edge
    with contextlib.ExitStack() as stack:
        saved = refusing_saved(graph.saved_tensors_hooks.__init__)
        stack.enter_context(mock.patch.object(graph.saved_tensors_hooks, "__init__", saved))
        stack.enter_context(mock.patch.object(torch.Tensor, "grad_fn", property(grad_fn)))
        stack.enter_context(mock.patch.object(graph, "get_gradient_edge", edge))
        for holder, name, what in (
            (nn.Module, "register_full_backward_hook", "backward hook"),
            (nn.Module, "register_full_backward_pre_hook", "backward pre-hook"),
            (nn.Module, "register_backward_hook", "backward hook"),
            (torch.Tensor, "register_hook", "tensor hook"),
            (torch.Tensor, "register_post_accumulate_grad_hook", "post-accumulate-grad hook"),
            (torch.autograd.graph, "register_multi_grad_hook", "multi-grad hook"),
        ):
            register = refusing(getattr(holder, name), what, 1)
            stack.enter_context(mock.patch.object(holder, name, register))
        yield


class _Node:
    """A node of autograd's graph as the model's code sees it; hooks on it are refused."""

    def __init__(self, node: Any):
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            kind = "hook" if name == "register_hook" else "pre-hook"

            def refuse(hook: Any) -> Any:
                what = f"{kind} of the gradient of {self._node.name()} (grad_fn)"
                raise _refused(f"forward registers, at {current_line()}, the {what},", hook)

            return refuse
        found = getattr(self._node, name)
        if name == "next_functions":
            return tuple((node and _Node(node), index) for node, index in found)
        return found

    def __eq__(self, other: object) -> bool:
        return bool(self._node == (other._node if isinstance(other, _Node) else other))

    def __hash__(self) -> int:
        return hash(self._node)


@contextlib.contextmanager
def asked_of_backward() -> Iterator[list[str]]:
    """While open, note what forward requests from a backward pass and a plan does differently.

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
        # The hooks of checkpoints, which have a separate note, come from PyTorch's file.
        if not type(hooks).__module__.startswith("torch.utils."):
            noted(
                f"says by {type(hooks).__name__} where activations are kept for backward; a plan keeps them "
                "where they are, and counts them so"
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
    """The function that a person wrote, if PyTorch wrapped it in its own hook."""
    if not inspect.isfunction(hook) or is_own(hook.__code__.co_filename):
        return hook
    inside = [value for value in inspect.getclosurevars(hook).nonlocals.values() if callable(value)]
    return next((value for value in inside if is_own(first_line(value).rpartition(":")[0])), hook)
