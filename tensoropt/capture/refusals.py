"""Reasons why a model or its example inputs cannot be captured, with the model's own line and the remedy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from tensoropt.capture.lines import causes, failing_line, frames_of, is_own
from tensoropt.capture.unsupported import OBJECT, kind_of_tensor, of_error
from tensoropt.errors import CaptureError

_REMEDIES = (
    (r"same device|two devices", "build the whole model and its inputs on one device"),
    (r"positional argument|keyword argument", "pass args and kwargs as forward takes them"),
    (
        r"Expected dtype|expected scalar type|expected .* dtype|type Float|type Long",
        "check the types of the example inputs: the model itself refuses them",
    ),
    (
        r"reduction dim|shapes? cannot be multiplied|size mismatch|must match|Expected .* input",
        "check the shapes of the example inputs: the model itself refuses them",
    ),
)
_USUAL = "no Python branches on tensor values, no .item(), fixed shapes"


def refusal(
    model: torch.nn.Module,
    error: Exception,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> CaptureError:
    """The error to raise for an export with these example inputs that failed with ``error``."""
    ours = next((cause for cause in causes(error) if isinstance(cause, CaptureError)), None)
    if ours is not None:
        return CaptureError(str(ours))
    line, name = failing_line(error), type(model).__name__
    kind = of_error(error)
    if kind is OBJECT:
        for path, leaf in _named_leaves(model, args, kwargs or {}):
            if not isinstance(leaf, _PASSED):
                return CaptureError(_object_refused(path, leaf))
    if kind is not None:
        return kind.refused(name, line, _innermost_module(model, error))
    where = f" at {line}" if line else ""
    reason = _first_lines(error)
    raised = next(frames_of(error), None)
    if raised is not None and is_own(raised.f_code.co_filename):
        # Not PyTorch's refusal, but the model's own behaviour with these inputs.
        what = type(error).__name__
        return CaptureError(
            f"{name}'s own code raises {what}{where}: {reason.rstrip('.')}; it has to run on the example "
            "inputs"
        )
    # The first that matches, because one error may fit several.
    remedy = next((text for pattern, text in _REMEDIES if re.search(pattern, str(error))), _USUAL)
    return CaptureError(
        f"PyTorch cannot follow {name}{where}: {reason.rstrip('.')}. What usually helps: {remedy}."
    )


_PASSED = (torch.Tensor, int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, Enum)
"""The types that a call may hold; numpy's numbers are not among them, although some are floats."""


def _object_refused(path: str, value: Any) -> str:
    kind = type(value).__qualname__
    if type(value).__module__ == "numpy":
        kind = f"numpy.{kind}"
        remedy = "pass a tensor (torch.as_tensor) or a number of Python's"
    elif callable(value):
        remedy = "give it to the model when it is made, in __init__"
    elif is_dataclass(value):
        remedy = "call torch.export.register_dataclass on the class before"
    else:
        remedy = "pass its tensors in a tuple or a plain dict"
    return f"the input {path} is of the class {kind}, which a captured call cannot hold; {remedy}"


def _innermost_module(model: torch.nn.Module, error: BaseException) -> str:
    """The path of the submodule in whose forward an error was raised, or "" for the model itself."""
    paths = {id(vars(module)): path for path, module in model.named_modules() if path}
    for frame in frames_of(error):
        subject = frame.f_locals.get("self")
        # Export wraps modules in proxies, which share the attribute dict.
        if isinstance(subject, torch.nn.Module) and id(vars(subject)) in paths:
            return paths[id(vars(subject))]
    return ""


def check_model(model: torch.nn.Module) -> None:
    """Refuse an object that is not a model, a model that is already distributed, and one on several
    devices."""
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"{type(model).__name__} is not a torch.nn.Module; pass the module itself")
    for path, module in model.named_modules():
        _check_module(path, module)
    places: dict[str, str] = {}
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        _check_tensor(name, parameter)
    for name, tensor in model.named_parameters():
        places.setdefault(str(tensor.device), name)
    if len(places) > 1:
        shown = " and ".join(f"{name} on {device}" for device, name in list(places.items())[:2])
        raise CaptureError(
            f"the model lies on several devices ({shown}); build it on one, as how to spread it is "
            "what is searched"
        )


_WRAPPERS = frozenset(
    {
        "DataParallel",
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        "FSDPModule",
        "DeepSpeedEngine",
        "PipelineModule",
        "ShardedDataParallel",
    }
)
"""The names of classes that distribute a model."""


def _check_module(path: str, module: torch.nn.Module) -> None:
    named = f"`{path}`" if path else "the model"
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            f"{named} was made by torch.jit (script, trace or load), which leaves no Python code to follow; "
            "pass the module itself, as it was before"
        )
    wrapper = next((c.__name__ for c in type(module).__mro__ if c.__name__ in _WRAPPERS), "")
    if wrapper:
        raise CaptureError(
            f"{named} is wrapped in {wrapper}, which spreads it in a way of its own; pass what is inside "
            "(its attribute .module; with fully_shard the model as it was before), as how to spread it is "
            "what is searched"
        )


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise CaptureError(
            f"`{name}` has no shape yet (a lazy module); call the model once on the example inputs before"
        )
    if hasattr(tensor, "ds_id"):
        raise CaptureError(
            f"`{name}` is held in parts by DeepSpeed (ZeRO stage 3); build the model without "
            "deepspeed.zero.Init and deepspeed.initialize"
        )
    if isinstance(tensor, DTensor):
        raise CaptureError(
            f"`{name}` is a DTensor, spread over ranks already; build the model without fully_shard or "
            "parallelize_module, as how to spread it is what is searched"
        )
    if kind_of_tensor(tensor) is not None:
        raise CaptureError(
            f"`{name}` is {_described(tensor)}, which no plan can hold; {_REMEDY_OF_KIND[_described(tensor)]}"
        )


_REMEDY_OF_KIND = {
    "a nested tensor": "pad the sequences to one length and pass a mask",
    "a quantized tensor": "pass it in floating point (`.dequantize()`)",
    "a sparse tensor": "pass it dense (`.to_dense()`), or as indices for index_select and index_add",
}


def _described(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "a nested tensor"
    return "a quantized tensor" if tensor.is_quantized else "a sparse tensor"


def check_inputs(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse example inputs for which no plan can be made: empty ones, and unsupported kinds of tensors."""
    for name, tensor in _named_inputs(model, args, kwargs):
        if kind_of_tensor(tensor) is not None:
            kind = _described(tensor)
            raise CaptureError(f"the input {name} is {kind}, which no plan can hold; {_REMEDY_OF_KIND[kind]}")
        if tensor.numel() == 0:
            raise CaptureError(
                f"the input {name} of shape {tuple(tensor.shape)} is empty; pass a batch of at least one "
                "sample, of the size that a step has"
            )


def _named_inputs(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a call with its name (:func:`_named_leaves`)."""
    for name, leaf in _named_leaves(model, args, kwargs):
        if isinstance(leaf, torch.Tensor):
            yield name, leaf


def _named_leaves(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Every value that a call holds, with its name: that of the argument, and the value's position inside
    it."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        # The call does not fit the signature, which the model itself will report.
        bound = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
    for name, value in bound.items():
        for path, leaf in pytree.tree_leaves_with_path(value):
            yield f"`{name}{pytree.keystr(path)}`", leaf


def _first_lines(error: Exception, count: int = 3) -> str:
    text = re.split(
        r"Caused by:|For more information|See https?:|\(Size-like|This could be because", str(error)
    )[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:count]) or type(error).__name__
