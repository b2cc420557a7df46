"""Checkpoints that move between plans: saved under one plan, loaded under another.

They use ``torch.distributed.checkpoint``. Parameters and optimizer state are written under the model's own
names and shapes, whatever the plan's layout, so that the plan can change in the middle of training.

A checkpoint also holds the script's training state: settings of optimizer groups by parameter name, a
scheduler, the number of steps (which dropout depends on), and the script's extras.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import _init_optim_state

from tensoropt.engine.parallel_model import is_state_of, parallel_of
from tensoropt.engine.runtime import is_first, wait_for_all
from tensoropt.errors import PlanError

_SETTINGS = "settings.pt"
"""The file of the training state, in a checkpoint's folder."""
_KERNEL_SETTINGS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Settings of optimizer groups that select kernels; loading keeps the script's, as devices may differ."""


def _saved_settings(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Any, extra: Mapping[str, Any] | None
) -> bytes:
    settings: dict[str, Any] = {"step": parallel_of(model).engine.runtime.step, "extra": dict(extra or {})}
    if optimizer is not None:
        settings["groups"] = [
            {
                "names": names,
                **{k: v for k, v in group.items() if k not in _KERNEL_SETTINGS and _can_be_read(v)},
            }
            for group, names in zip(optimizer.param_groups, _names(model, optimizer), strict=True)
        ]
    if scheduler is not None:
        settings["scheduler"] = dict(scheduler.state_dict())
    for part in ("extra", "scheduler"):
        for key, value in settings.get(part, {}).items():
            if not _can_be_read(value):
                raise PlanError(
                    f"{part} has {key}, {type(value).__name__}, which a checkpoint cannot hold; save "
                    "numbers, texts, tensors, and lists and dicts of them"
                )
    return _written(settings)


def _written(value: Any) -> bytes:
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def _can_be_read(value: Any) -> bool:
    """Return whether PyTorch can read a value back without running code from the file."""
    try:
        torch.load(io.BytesIO(_written(value)), weights_only=True)
    except Exception:
        return False
    return True


def _load_settings(
    file: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Any
) -> dict[str, Any]:
    if not file.exists():
        raise PlanError(f"checkpoint {file.parent} lacks {file.name}; give one that save_checkpoint wrote")
    settings = torch.load(file, map_location="cpu", weights_only=True)
    if optimizer is not None and "groups" in settings:
        _load_groups(file, model, optimizer, settings["groups"])
    if scheduler is not None:
        if "scheduler" not in settings:
            raise PlanError(
                f"checkpoint {file.parent} holds no scheduler; pass one to save_checkpoint, or none here"
            )
        scheduler.load_state_dict(settings["scheduler"])
    parallel_of(model).engine.runtime.step = settings["step"]
    return settings["extra"]


def _load_groups(
    file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]
) -> None:
    own = _names(model, optimizer)
    where = {name: number for number, group in enumerate(saved) for name in group["names"]}
    for number, names in enumerate(own):
        for name in names:
            if where.get(name) != number:
                location = f"in group {where[name]}" if name in where else "in none"
                raise PlanError(
                    f"the optimizer has {name} in group {number}, but in checkpoint {file.parent} it is "
                    f"{location}; give it the parameter groups that the saved optimizer had"
                )
    missing = where.keys() - {name for names in own for name in names}
    if missing or len(own) != len(saved):
        also = f" that also had {', '.join(sorted(missing)[:3])}" if missing else ""
        raise PlanError(
            f"checkpoint {file.parent} was saved from an optimizer with {len(saved)} groups{also}, this one "
            f"has {len(own)}; give it the parameter groups that the saved optimizer had"
        )
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        for key, value in settings.items():
            if key == "names":
                continue
            current = group.get(key)
            # A learning rate that is a tensor stays the same object on its device, for compiled steps.
            if isinstance(current, torch.Tensor):
                current.copy_(torch.as_tensor(value))
            else:
                group[key] = value


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    names = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in name_of:
                raise PlanError(
                    f"group {number} of the optimizer has a parameter of shape {tuple(parameter.shape)} "
                    "that is not the model's, so the checkpoint has no name for it; give it a separate "
                    "optimizer and save that by extra="
                )
        names.append([name_of[id(parameter)] for parameter in group["params"]])
    return names


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state by parameter name, in the model's own shapes.

    Returns:
        ``{"KEY.FIELD": value}``, with DTensors where the parameters are DTensors; without group settings.
    """
    parallel = parallel_of(model)
    state = {}
    for key, parameter in parallel.parameter_keys().items():
        if not parallel.in_state(key):
            continue
        for field, value in optimizer.state.get(parameter, {}).items():
            like = is_state_of(parameter, field, value)
            # State of another layout than its parameter (Adam's step count) is equal on all ranks and saved
            # as is.
            state[f"{key}.{field}"] = parallel.own_shape(key, value) if like else value
    return state


def _load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    parallel = parallel_of(model)
    for key, parameter in parallel.parameter_keys().items():
        if not parallel.in_state(key):
            continue
        # Keys contain dots, field names do not.
        fields = {n[len(key) + 1 :]: v for n, v in state.items() if n.rpartition(".")[0] == key}
        for field, value in fields.items():
            like = isinstance(value, torch.Tensor) and tuple(value.shape) == parallel.shapes[key]
            is_laid_out = like and value.dim() > 0
            optimizer.state[parameter][field] = parallel.stored(key, value) if is_laid_out else value


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint folder; every rank must call it.

    An older checkpoint is replaced once the new one is complete.

    Args:
        optimizer: the optimizer whose state and group settings (learning rates, weight decay) are saved.
        scheduler: a learning-rate scheduler; anything with ``state_dict()``.
        extra: rank 0's further state for resuming (an epoch, a sampler's position): numbers, texts, tensors,
            and lists and dicts of them.

    Raises:
        PlanError: the folder cannot be written, or ``extra`` holds other types.
    """
    target = Path(path)
    # All ranks refuse what cannot be saved, before anything is written.
    settings = _saved_settings(model, optimizer, scheduler, extra)
    # Next to the target, so that the final rename stays within one file system.
    partial = target.with_name(target.name + ".partial")
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(model, optimizer)
    with _refused(f"cannot write the checkpoint {target}", "; an older one is kept"):
        if is_first():
            # Remains of an interrupted save would mix with this one's files.
            shutil.rmtree(partial, ignore_errors=True)
        wait_for_all()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the missing process group, which is intended
            dcp.save(  # type: ignore[attr-defined]
                state, checkpoint_id=partial, no_dist=not dist.is_initialized()
            )
        if is_first():
            (partial / _SETTINGS).write_bytes(settings)
            # At any moment a complete checkpoint has a name that load_checkpoint looks for.
            old = _older(target)
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            partial.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        wait_for_all()


@contextlib.contextmanager
def _refused(what: str, more: str = "") -> Iterator[None]:
    """Turn errors of reading or writing in a ``with`` block into a PlanError: ``what``, reason, ``more``."""
    try:
        yield
    # PyTorch's error is not an Exception, and holds each rank's failure.
    except (OSError, CheckpointException) as error:
        failures = getattr(error, "failures", {0: (error,)})
        reason = next(iter(failures.values()))[0]
        words = getattr(reason, "strerror", None) or str(reason).partition("\n")[0]
        raise PlanError(f"{what}: {words}{more}") from error


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
) -> dict[str, Any]:
    """Load a checkpoint saved under any plan of the same model; every rank must call it.

    Args:
        optimizer: the optimizer that gets the saved state and settings; it must have the same groups.
        scheduler: the learning-rate scheduler; anything with ``load_state_dict()``.

    Returns:
        The saved ``extra``.

    Raises:
        PlanError: there is no checkpoint, or it was saved from an optimizer with other groups, or without a
            scheduler.
    """
    source = Path(path)
    if not source.exists() and _older(source).exists():
        source = _older(source)  # a save was interrupted between its two renames
    # `torch.distributed.checkpoint` writes this file last: without it a checkpoint is incomplete.
    if not (source / ".metadata").exists():
        raise PlanError(f"there is no checkpoint at {path}; give the folder that save_checkpoint wrote")
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        # `dcp.load` fills existing tensors in place, and a fresh optimizer has none yet.
        _make_state(optimizer)
        state["optimizer"] = _optimizer_state(model, optimizer)
    with _refused(f"cannot read the checkpoint {source}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in save_checkpoint
        dcp.load(  # type: ignore[attr-defined]
            state, checkpoint_id=source, no_dist=not dist.is_initialized()
        )
    model.load_state_dict(state["model"])
    if optimizer is not None:
        _load_optimizer_state(model, optimizer, state["optimizer"])
    return _load_settings(source / _SETTINGS, model, optimizer, scheduler)


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of a fresh optimizer by an optimizer step that changes no parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [p.grad for p in parameters]
    optimizer.zero_grad(set_to_none=True)  # with gradients, the optimizer would not count as fresh
    _init_optim_state(optimizer)
    for parameter, grad in zip(parameters, kept, strict=True):
        parameter.grad = grad


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".old")
