"""The part of a checkpoint beside the model's tensors: the state of the script's training.

It holds the settings of an optimizer's groups, by the names of the parameters in them; a scheduler; the
number of steps made, on which dropout depends; and whatever the script adds.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensoropt.engine.parallel_model import parallel_of
from tensoropt.errors import PlanError

SETTINGS = "settings.pt"
"""The file in a checkpoint's folder that holds them."""
HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Settings of a group that select its kernels: these stay the script's, which may run elsewhere."""


def saved_settings(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    extra: Mapping[str, Any] | None,
) -> bytes:
    """Return the bytes that :func:`load_settings` reads.

    Raises:
        PlanError: something cannot be saved, or the optimizer has parameters without a name in the model.
    """
    found: dict[str, Any] = {"step": parallel_of(model).engine.runtime.step, "extra": dict(extra or {})}
    if optimizer is not None:
        found["groups"] = [
            {"names": names, **{k: v for k, v in group.items() if k not in HOW and _can_be_read(v)}}
            for group, names in zip(optimizer.param_groups, _names(model, optimizer), strict=True)
        ]
    if scheduler is not None:
        found["scheduler"] = dict(scheduler.state_dict())
    for what in ("extra", "scheduler"):
        for key, value in found.get(what, {}).items():
            if not _can_be_read(value):
                raise PlanError(
                    f"{what} has {key}, {type(value).__name__}, which a checkpoint cannot hold; save "
                    "numbers, texts, tensors, and lists and dicts of them"
                )
    return _written(found)


def _written(value: Any) -> bytes:
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def _can_be_read(value: Any) -> bool:
    """Return whether a value can be read back without running anybody's code, which only PyTorch can say."""
    try:
        torch.load(io.BytesIO(_written(value)), weights_only=True)
    except Exception:
        return False
    return True


def load_settings(
    file: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Any
) -> dict[str, Any]:
    """Continue as saved; return what the script added.

    Raises:
        PlanError: the optimizer has other groups than the saved one, or no scheduler was saved.
    """
    if not file.exists():
        if scheduler is not None:
            raise PlanError(f"checkpoint {file.parent} holds no scheduler; it was saved by an older version")
        if optimizer is not None:
            warnings.warn(
                f"checkpoint {file.parent} was saved by an older version and holds no learning rates; those "
                "of the script stay",
                stacklevel=3,
            )
        return {}
    found = torch.load(file, map_location="cpu", weights_only=True)
    if optimizer is not None and "groups" in found:
        _load_groups(file, model, optimizer, found["groups"])
    if scheduler is not None:
        if "scheduler" not in found:
            raise PlanError(
                f"checkpoint {file.parent} holds no scheduler; pass it to save_checkpoint, or leave it out"
            )
        scheduler.load_state_dict(found["scheduler"])
    parallel_of(model).engine.runtime.step = found["step"]
    extra: dict[str, Any] = found["extra"]
    return extra


def _load_groups(
    file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]
) -> None:
    own = _names(model, optimizer)
    where = {name: number for number, group in enumerate(saved) for name in group["names"]}
    for number, names in enumerate(own):
        for name in names:
            if where.get(name) != number:
                there = f"in group {where[name]}" if name in where else "in none"
                raise PlanError(
                    f"the optimizer has {name} in group {number}, but in checkpoint {file.parent} it is "
                    f"{there}; make the optimizer's groups as they were"
                )
    missing = where.keys() - {name for names in own for name in names}
    if missing or len(own) != len(saved):
        also = f" and with {', '.join(sorted(missing)[:3])}" if missing else ""
        raise PlanError(
            f"checkpoint {file.parent} was saved of an optimizer with {len(saved)} groups{also}, this one "
            f"has {len(own)}; make the optimizer's groups as they were"
        )
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        for key, value in settings.items():
            if key == "names":
                continue
            now = group.get(key)
            # A rate that is a tensor stays the one that compiled steps know, on its device.
            if isinstance(now, torch.Tensor):
                now.copy_(torch.as_tensor(value))
            else:
                group[key] = value


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise PlanError(
                    f"group {number} of the optimizer has a parameter of shape {tuple(parameter.shape)} "
                    "that is none of the model, so that the checkpoint has no name for it; give it an "
                    "optimizer of its own and save that by extra="
                )
        found.append([known[id(parameter)] for parameter in group["params"]])
    return found
