"""``torch.autograd.Function`` classes inside a model, which become one operator each with their own backward.

Export records the calls inside a function's forward and differentiates these calls, so a backward that is not
the derivative of its forward (straight-through rounding: Bengio et al., arXiv 1308.3432; gradient reversal:
Ganin and Lempitsky, ICML 2015) would be lost. While a model is exported, every call of such a function is
one operator, which runs the function itself. The function is run first on tensors without values, to find out
which operands get a gradient, which results have one, and whether it draws random numbers or writes to its
inputs.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tensoropt.capture.lines import current_line, first_line, shown_error
from tensoropt.capture.unsupported import own_calls
from tensoropt.errors import CaptureError
from tensoropt.ops.functions import FunctionCall, NotConstant, Slot, apply, operator_of, set_tracing

_PYTORCH_KEPT = ("torch.nn.",)
"""Prefixes of PyTorch's modules whose autograd functions are layers. Autograd functions in PyTorch's other
modules are building blocks of autograd and of export."""
_HOOKS = "BackwardHookFunction"
"""The autograd function by which PyTorch runs a module's backward hooks, which are refused elsewhere."""


@dataclass
class _Exporting:
    """The settings and state of an export, which every call of an autograd function reads.

    Attributes:
        reentrant: function called in place of a reentrant checkpoint.
        keep: whether calls of autograd functions become operators.
        inside: whether an autograd function's own code is running; functions called there stay part of it.
    """

    reentrant: Callable[..., Any]
    keep: bool = True
    inside: bool = False


_local = threading.local()


@contextlib.contextmanager
def own_backwards(reentrant: Callable[..., Any], *, keep: bool = True) -> Iterator[None]:
    """While open, a call of a ``torch.autograd.Function`` on this thread becomes one operator.

    Args:
        reentrant: function called in place of ``CheckpointFunction.apply``, with the same arguments.
        keep: whether calls become operators; if False, only checkpoints are replaced.
    """
    original: Any = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
    code = original.__code__
    before, tracing = getattr(_local, "exporting", None), set_tracing(keep)
    _local.exporting = _Exporting(reentrant, keep)
    # The code rather than the attribute, because `round = Round.apply` in a model's file holds the method
    # itself.
    original.__code__ = _Replaced.apply.__code__
    try:
        yield
    finally:
        original.__code__ = code
        _local.exporting = before
        set_tracing(tracing)


class _Replaced:
    """The code that replaces ``Function.apply`` during an export. It mentions ``__class__`` because Python
    requires that replaced code has the same closure cells as the original."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __class__  # type: ignore[name-defined]  # noqa: B018
        from tensoropt.capture.custom_functions import called

        return called(cls, args, kwargs)  # type: ignore[arg-type]


def called(cls: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of calling ``cls.apply`` during an export. A function of the model or of ``torch.nn``
    with a gradient becomes one operator (if calls are kept); a reentrant checkpoint is replaced."""
    exporting: _Exporting | None = getattr(_local, "exporting", None)
    if exporting is None or exporting.inside:
        return apply(cls, *args, **kwargs)
    if cls is torch.utils.checkpoint.CheckpointFunction:
        return exporting.reentrant(*args, **kwargs)
    module = cls.__module__
    own = not module.startswith(("torch.", "tensoropt.")) or module.startswith(_PYTORCH_KEPT)
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    # Without gradients there is no backward to keep: the calls in forward are sufficient.
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if not exporting.keep or not own or cls.__name__ == _HOOKS or not differentiated:
        return apply(cls, *args, **kwargs)
    exporting.inside = True
    try:
        return _kept(cls, args, kwargs)
    finally:
        exporting.inside = False


def _kept(cls: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch._C._are_functorch_transforms_active():
        raise _refused(cls, "it is called inside torch.func (vmap, grad, ...); call it outside")
    if torch.autograd.function._is_setup_context_defined(cls.setup_context):
        bound = inspect.signature(cls.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args, bound.kwargs
    if kwargs:
        raise _refused(cls, "it is called with keyword arguments, which its apply() does not take")
    leaves, spec = pytree.tree_flatten(args)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    number = iter(range(len(tensors)))
    places = [Slot(next(number)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    call, gradients_read, gradients_made = _examined(FunctionCall(cls, places, spec), tensors)
    try:
        operator = operator_of(call)
    except (NotConstant, RecursionError) as what:
        raise _refused(
            cls,
            f"it is given {what}, which a plan cannot store; pass tensors, numbers and texts to apply(), and "
            "the tensors of a module in place of the module",
        ) from None
    # An operand that gets no gradient is read detached, so that the graph expresses this too.
    read = [
        tensor if gets or not tensor.requires_grad else tensor.detach()
        for tensor, gets in zip(tensors, gradients_read, strict=True)
    ]
    made = operator(*read)
    made = [made] if isinstance(made, torch.Tensor) else list(made)
    return call.returned([m if has else m.detach() for m, has in zip(made, gradients_made, strict=True)])


def _examined(
    call: FunctionCall, tensors: Sequence[torch.Tensor]
) -> tuple[FunctionCall, list[bool], list[bool]]:
    """Return (the call with its results, whether each operand gets a gradient, whether each result has one),
    by running the call forward and backward on tensors without values.

    Raises:
        CaptureError: one operator cannot represent the call.
    """
    cls = call.cls
    mode = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None) or FakeTensorMode()
    # Separate from the trace being made, of which none of this is part.
    with own_calls(), _disable_current_modes(), torch._C.DisableTorchFunction(), mode, _Watch() as watch:
        leaves = [_alike(tensor) for tensor in tensors]
        # They are not leaves, because autograd refuses changes to leaves with its own message.
        copies = [leaf.clone() for leaf in leaves]
        try:
            returned = call.run(copies)
        except Exception as error:
            raise _refused(cls, f"its forward cannot run without values: {shown_error(error)}") from error
        call = _with_results(call, returned)
        made = call.tensors_of(returned)
        if any(copy._version for copy in copies):
            raise _refused(cls, "it changes a tensor that it is given; clone it first")
        differentiable = [leaf for leaf in leaves if leaf.requires_grad]
        trained_results = [value for value in made if value.requires_grad]
        gradients: Sequence[torch.Tensor | None] = [None] * len(differentiable)
        if differentiable and trained_results:
            received = [torch.empty_like(value) for value in trained_results]
            try:
                gradients = torch.autograd.grad(trained_results, differentiable, received, allow_unused=True)
            except Exception as error:
                why = f"its backward cannot run without values: {shown_error(error)}"
                raise _refused(cls, why) from error
    if watch.random:
        raise _refused(
            cls,
            f"it draws random numbers ({watch.random}), which every device and every recomputation would "
            "draw anew; draw them outside and pass them to apply()",
        )
    gets = iter(gradient is not None for gradient in gradients)
    read = [leaf.requires_grad and next(gets) for leaf in leaves]
    return call, read, [value.requires_grad for value in made]


def _with_results(call: FunctionCall, returned: Any) -> FunctionCall:
    single = not isinstance(returned, (tuple, list))
    results = [returned] if single else list(returned)
    number = iter(range(len(results)))
    kept = [Slot(next(number)) if isinstance(value, torch.Tensor) else value for value in results]
    if not any(isinstance(value, Slot) for value in kept):
        raise _refused(call.cls, "it returns no tensor; return the tensors themselves or a tuple of them")
    return replace(call, results=kept, single=single)


def _alike(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.requires_grad_(tensor.requires_grad)


class _Watch(TorchDispatchMode):
    random = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.random = str(func)
        return func(*args, **(kwargs or {}))


def _refused(cls: type[torch.autograd.Function], why: str) -> CaptureError:
    return CaptureError(
        f"the torch.autograd.Function {cls.__qualname__} ({first_line(cls.forward)}, called at "
        f"{current_line()}) cannot be kept with its own backward: {why}"
    )
