"""The places where a model's code cuts a tensor off from its parameters: ``detach()``, ``.data``, ``no_grad``
regions."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tensoropt.capture.lines import current_line

_CUT = "_tensoropt_cut"


class Detachments(TorchFunctionMode):
    """A mode that marks results without a gradient of which some operand had one or was itself marked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point() and not result.requires_grad:
            cut = _cut_of((*args, *(kwargs or {}).values()), getattr(func, "__name__", ""))
            if cut:
                setattr(result, _CUT, cut)
        return result


def cut_at(tensor: torch.Tensor) -> str:
    """`` at FILE:LINE`` where a tensor without a gradient was cut off from one with a gradient, if known."""
    return getattr(tensor, _CUT, "")


def _cut_of(values: tuple[Any, ...], name: str) -> str:
    for value in values:
        if isinstance(value, (tuple, list)):
            found = _cut_of(tuple(value), name)
        elif not isinstance(value, torch.Tensor):
            continue
        elif value.requires_grad:
            under = "" if torch.is_grad_enabled() else ", without gradients (no_grad or inference_mode)"
            how = ".data" if name == "__get__" else f"{name}()"
            found = f" at {current_line()} ({how}{under})"
        else:
            found = getattr(value, _CUT, "")
        if found:
            return found
    return ""
