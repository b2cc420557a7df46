"""Why ``torch.export`` refuses a model, in words: the reason, the model's own line, what usually helps."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path

import torch

from tensoropt.errors import CaptureError

_REMEDIES = (
    (
        r"data-dependent|GuardOnDataDependent|unbacked",
        "the model branches on, or takes a size from, the value of a tensor; use torch.where or a mask "
        "instead of `if` and boolean indexing, leave out asserts on values and .item()",
    ),
    (
        r"not a known type|register a pytree",
        "the model returns, or is passed, an object of its own class; return tensors, tuples or dicts, or "
        "call torch.export.register_dataclass on the class first",
    ),
    (r"same device|two devices", "build the whole model and its inputs on one device"),
    (r"positional argument|keyword argument", "pass args and kwargs as forward takes them"),
    (r"\.numpy\(\)|numpy", "stay in PyTorch inside forward: numpy is not traced"),
    (
        r"reduction dim|shapes? cannot be multiplied|size mismatch|must match|Expected .* input",
        "check the shapes of the example inputs: the model itself refuses them",
    ),
)
_USUAL = "no Python branches on tensor values, no .item(), fixed shapes"


def refusal(model: torch.nn.Module, error: Exception) -> CaptureError:
    """The error to raise for an export that failed with ``error``."""
    reason = _first_lines(error)
    # The first that matches, as one error may fit several.
    remedy = next((text for pattern, text in _REMEDIES if re.search(pattern, str(error))), _USUAL)
    return CaptureError(
        f"torch.export refuses {type(model).__name__}{_refused_line(error)}: {reason.rstrip('.')}. "
        f"What usually helps: {remedy}."
    )


def check_model(model: torch.nn.Module) -> None:
    """Refuse what is no model, or one that lies on several devices."""
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"{type(model).__name__} is not a torch.nn.Module; pass the module itself")
    places: dict[str, str] = {}
    for name, tensor in model.named_parameters():
        places.setdefault(str(tensor.device), name)
    if len(places) > 1:
        shown = " and ".join(f"{name} on {device}" for device, name in list(places.items())[:2])
        raise CaptureError(
            f"the model lies on several devices ({shown}); build it on one, as how to spread it is "
            "what is searched"
        )


def _first_lines(error: Exception, count: int = 3) -> str:
    text = re.split(r"Caused by:|For more information|See https?:|\(Size-like", str(error))[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:count]) or type(error).__name__


def _refused_line(error: BaseException) -> str:
    """`` at FILE:LINE (source)`` of the innermost line that is the model's own, or nothing."""
    ours = str(Path(__file__).parent)
    seen: BaseException | None = error
    while seen is not None:
        for frame in reversed(traceback.extract_tb(seen.__traceback__)):
            if f"{os.sep}torch{os.sep}" not in frame.filename and not frame.filename.startswith((ours, "<")):
                return f" at {frame.filename}:{frame.lineno} ({frame.line})"
        # PyTorch raises its own errors from others, and the model's line may be in any of them.
        seen = seen.__cause__ or seen.__context__
    return ""
