"""Errors for models and example inputs that cannot be captured, with the model's own line and the remedy.

Forward hooks are traced. Backward hooks would be lost, together with their effect on gradients, and are
therefore refused: those of modules and parameters, and those called in a backward that runs without values.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import combinations
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from tensoropt.capture.lines import causes, failing_line, first_line, frames_of, is_own, raised_by_model
from tensoropt.capture.state import plain_tensor_changed
from tensoropt.capture.unsupported import OBJECT, kind_of_tensor, of_error
from tensoropt.errors import CaptureError
from tensoropt.graph import OperatorGraph

_REMEDY = (
    "a plan's backward runs no hooks; remove the hook, or write its effect on the gradient as a "
    "torch.autograd.Function that forward calls (with the identity in forward and the hook's arithmetic in "
    "backward)"
)


def check_hooks(model: nn.Module) -> None:
    """Refuse a model whose modules or parameters have hooks on gradients.

    Raises:
        CaptureError: there is such a hook; the message names the module or parameter, and the hook's line.
    """
    for name, owner in (*model.named_modules(), *model.named_parameters()):
        for kind in ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"):
            for hook in (getattr(owner, kind, None) or {}).values():
                called = getattr(hook, "__qualname__", type(hook).__qualname__)
                raise _hook_refused(f"{name or 'the model'} has", called, first_line(hook))


@contextlib.contextmanager
def refusing_hooks() -> Iterator[None]:
    """While open, detect hooks that a backward calls, wherever forward registered them (on tensors, modules,
    autograd nodes, or saved tensors); raise :class:`CaptureError` at the end if there were any."""
    hooks: list[CodeType] = []

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        # A backward of a Function, or of an operator that a library registers, has another caller.
        by = "" if frame.f_back is None else frame.f_back.f_code.co_filename
        if by in _CALLERS_OF_HOOKS and is_own(frame.f_code.co_filename):
            hooks.append(frame.f_code)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        for code in hooks[:1]:
            line = f"{code.co_filename}:{code.co_firstlineno}"
            raise _hook_refused("the model's backward runs", code.co_qualname, line)


_CALLERS_OF_HOOKS = tuple(
    str(Path(torch.__file__).parent / file) for file in ("autograd/graph.py", "utils/hooks.py")
)


def _hook_refused(where: str, name: str, line: str) -> CaptureError:
    shown = name.replace("<locals>.", "")
    return CaptureError(f"{where} the hook {shown} ({line}), which would be lost: {_REMEDY}")


_USUAL = (
    "check the example inputs (args and kwargs, their types, shapes and device: does the model itself take "
    "them?); no Python branches on tensor values, no .item(), fixed shapes"
)


def refusal(
    model: torch.nn.Module,
    error: Exception,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> CaptureError:
    """Return the error to raise if the export of a model with these example inputs failed with ``error``."""
    ours = next((cause for cause in causes(error) if isinstance(cause, CaptureError)), None)
    if ours is not None:
        return CaptureError(str(ours))
    if changed := re.search(r"Constant (?:model\.)?(\S+) is mutated", str(error)):
        return plain_tensor_changed(changed[1])
    name, line, kind = type(model).__name__, failing_line(error), of_error(error)
    at = f" at {line}" if line else ""
    raised = next(frames_of(error), None)
    own = raised_by_model(error)
    if own is None and kind is None and raised is not None and is_own(raised.f_code.co_filename):
        own = error
    if own is not None:
        line = failing_line(own)
        return CaptureError(
            f"{name}'s own code raises {type(own).__name__}{f' at {line}' if line else ''}: "
            f"{_first_lines(own).rstrip('.')}; the model has to run on the example inputs"
        )
    if kind is OBJECT:
        for path, leaf in _named_leaves(model, args, kwargs or {}):
            if not isinstance(leaf, _PASSED):
                return CaptureError(
                    f"the input {path} is of the class {type(leaf).__module__}.{type(leaf).__qualname__}, "
                    "which a captured call cannot contain; pass a tensor (torch.as_tensor), a Python number, "
                    "or a tuple or plain dict of them; give functions to the model in __init__; for a "
                    "dataclass, call torch.export.register_dataclass before"
                )
    if kind is not None:
        return kind.refused(name, line, _first_lines(error, 1))
    return CaptureError(
        f"PyTorch cannot follow {name}{at}: {_first_lines(error).rstrip('.')}. What usually helps: {_USUAL}."
    )


_PASSED = (torch.Tensor, int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, Enum)
"""The types of values that a captured call may contain."""


def check_model(model: torch.nn.Module) -> None:
    """Raise :class:`CaptureError` for an object that is no module, and for a model that is distributed
    already, was made by ``torch.jit``, has lazy or unsupported tensors, or is on several devices."""
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"{type(model).__name__} is not a torch.nn.Module; pass the module itself")
    for path, module in model.named_modules():
        named = f"`{path}`" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{named} was made by torch.jit (script, trace or load), which leaves no Python code to "
                "follow; pass the module itself, as it was before"
            )
        wrapper = next((c.__name__ for c in type(module).__mro__ if c.__name__ in _WRAPPERS), "")
        if wrapper:
            raise CaptureError(
                f"{named} is wrapped in {wrapper}, which distributes the model in its own way; {_INSIDE}"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                f"`{name}` has no shape yet (a lazy module); call the model once on the example inputs before"
            )
        if hasattr(tensor, "ds_id") or isinstance(tensor, DTensor):
            how = "partitioned by DeepSpeed (ZeRO stage 3)" if hasattr(tensor, "ds_id") else "a DTensor"
            raise CaptureError(f"`{name}` is {how}, distributed over ranks already; {_INSIDE}")
        _check_kind(f"`{name}`", tensor)
    places: dict[str, str] = {}
    for name, tensor in model.named_parameters():
        places.setdefault(str(tensor.device), name)
    if len(places) > 1:
        shown = " and ".join(f"{name} on {device}" for device, name in list(places.items())[:2])
        raise CaptureError(
            f"the model is on several devices ({shown}); build it on one, because the search decides how to "
            "distribute it"
        )


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors of one storage have bytes in common."""
    ranges = []
    for tensor in (first, second):
        begin, size = int(tensor.storage_offset()), tensor.element_size()
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        ranges.append((begin * size, (begin + int(last) + 1) * size))
    (begin, end), (start, stop) = ranges
    if end <= start or stop <= begin:
        return False
    if first.element_size() != second.element_size():
        return True
    # Columns of one matrix lie between each other.
    elements = torch.arange(max(end, stop) // first.element_size(), device="cpu")
    mine, others = (elements.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (first, second))
    return bool(torch.isin(mine, others).any())


def check_memory(model: torch.nn.Module, graph: OperatorGraph) -> None:
    """Raise :class:`CaptureError` if a tensor that is trained or written lies in the memory of another one.

    A plan stores each of them by itself.
    """
    changed = {tensor.key for tensor in graph.parameters if tensor.requires_grad}
    changed |= {graph.tensors[name].key for name in graph.mutations}
    stored: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.numel() and tensor.layout == torch.strided:
            place = stored.setdefault(tensor.untyped_storage()._cdata, [])
            place.append((graph.aliases.get(name, name), tensor))
    for places in stored.values():
        for (one, first), (other, second) in combinations(places, 2):
            if one != other and not changed.isdisjoint((one, other)) and _overlap(first, second):
                raise CaptureError(
                    f"`{one}` and `{other}` are two tensors in the same memory, which a plan would store "
                    "apart; make one of them a clone(), or use one Parameter or buffer in both places"
                )


_WRAPPERS = frozenset({
    "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine",
    "PipelineModule", "ShardedDataParallel",
})  # fmt: skip
"""The names of classes that distribute a model."""
_INSIDE = (
    "pass the model itself (the wrapper's attribute .module; for fully_shard, parallelize_module or "
    "deepspeed.zero.Init, a model built without them), because the search decides how to distribute it"
)


def _check_kind(name: str, tensor: torch.Tensor) -> None:
    kind = kind_of_tensor(tensor)
    if kind is not None:
        raise CaptureError(f"{name} is {kind[0]}, which no plan supports; {kind[1]}")


def check_inputs(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise :class:`CaptureError` for example inputs that are empty or unsupported kinds of tensors."""
    for name, tensor in _named_leaves(model, args, kwargs):
        if not isinstance(tensor, torch.Tensor):
            continue
        _check_kind(f"the input {name}", tensor)
        if tensor.numel() == 0:
            raise CaptureError(
                f"the input {name} of shape {tuple(tensor.shape)} is empty; pass the whole batch of a step, "
                "with at least one sample"
            )


def _named_leaves(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of every value in a call; the name has the argument and the position inside it."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        # The call does not fit the signature, which the model itself will report.
        bound = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
    for name, value in bound.items():
        for path, leaf in pytree.tree_leaves_with_path(value):
            yield f"`{name}{pytree.keystr(path)}`", leaf


def _first_lines(error: BaseException, count: int = 3) -> str:
    text = re.split(
        r"Caused by:|For more information|See https?:|\(Size-like|This could be because", str(error)
    )[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:count]) or type(error).__name__
