"""Checkpoints that outlive their plan: saved under one, loaded under another.

They are built on ``torch.distributed.checkpoint``: parameters and optimizer state are written under the
model's own names and shapes, whatever plan lays them out, so the point on the frontier can change in
mid-training.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from tensoropt.engine.parallel_model import parallel_of
from tensoropt.errors import PlanError
from tensoropt.execute.resuming import SETTINGS, load_settings, saved_settings


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state by parameter name, in the model's own shapes.

    Returns:
        ``{"KEY.FIELD": value}``, with DTensors if the parameter is one; the settings of groups are separate
        (:mod:`~tensoropt.execute.resuming`).
    """
    parallel = parallel_of(model)
    found = {}
    for key, parameter in parallel.parameter_keys().items():
        if not parallel.has_local(key):
            continue
        for field, value in optimizer.state.get(parameter, {}).items():
            like = parallel.is_state_of(parameter, field, value)
            # State that is not laid out like its parameter (Adam's step count) is the same on every rank and
            # saved as it is.
            found[f"{key}.{field}"] = parallel.own_shape(key, value) if like else value
    return found


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state from :func:`optimizer_state`, under this model's plan."""
    parallel = parallel_of(model)
    for key, parameter in parallel.parameter_keys().items():
        if not parallel.has_local(key):
            continue
        # Keys contain dots, names of fields do not.
        fields = {n[len(key) + 1 :]: v for n, v in state.items() if n.rpartition(".")[0] == key}
        for field, value in fields.items():
            like = isinstance(value, torch.Tensor) and tuple(value.shape) == parallel.shapes[key]
            if like and value.dim():
                optimizer.state[parameter][field] = parallel.stored(key, value)
            else:
                optimizer.state[parameter][field] = value


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint folder; every rank must call it. An older one is replaced once the new one is
    complete.

    Args:
        optimizer: the optimizer, whose state and groups' settings (learning rates, weight decay) are saved.
        scheduler: the scheduler of learning rates; anything with ``state_dict()``.
        extra: what else the script needs to continue (an epoch, a sampler's position): numbers, texts,
            tensors, and lists and dicts of them. Rank 0's are written.

    Raises:
        PlanError: the folder cannot be written, or ``extra`` holds something else.
    """
    target = Path(path)
    # Before anything is written, what cannot be saved is refused on all ranks.
    settings = saved_settings(model, optimizer, scheduler, extra)
    # Next to the target, so that the rename at the end stays within one file system.
    partial = target.with_name(target.name + ".partial")
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer_state(model, optimizer)
    if _first():
        # Remains of a save that died: its files would be mixed with those of this one.
        shutil.rmtree(partial, ignore_errors=True)
    _wait()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of being used without a process group, which is meant
            dcp.save(  # type: ignore[attr-defined]
                state, checkpoint_id=partial, no_dist=not dist.is_initialized()
            )
        if _first():
            (partial / SETTINGS).write_bytes(settings)
    except OSError as error:
        raise PlanError(f"cannot write the checkpoint {target}: {error.strerror or error}") from error
    if _first():
        # At any moment one whole checkpoint has a name that load_checkpoint looks for.
        old = _older(target)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    _wait()


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
) -> dict[str, Any]:
    """Load a checkpoint saved under any plan of the same model; every rank must call it.

    Args:
        optimizer: receives its state, and the settings of its groups, which must hold the same parameters.
        scheduler: the scheduler of its learning rates; anything with ``load_state_dict()``.

    Returns:
        What was saved as ``extra``.

    Raises:
        PlanError: there is no checkpoint, or it was saved from an optimizer with other groups or without a
            scheduler.
    """
    source = Path(path)
    if not source.exists() and _older(source).exists():
        source = _older(source)  # a save died between taking the old one away and putting the new one there
    # `torch.distributed.checkpoint` writes it last: a folder without it is none, or not whole.
    if not (source / ".metadata").exists():
        raise PlanError(f"there is no checkpoint at {path}; give the folder that save_checkpoint wrote")
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        # `dcp.load` fills tensors that are there, in place: a fresh optimizer has none yet.
        _make_state(model, optimizer)
        state["optimizer"] = optimizer_state(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in save_checkpoint
        dcp.load(  # type: ignore[attr-defined]
            state, checkpoint_id=source, no_dist=not dist.is_initialized()
        )
    model.load_state_dict(state["model"])
    if optimizer is not None:
        load_optimizer_state(model, optimizer, state["optimizer"])
    return load_settings(source / SETTINGS, model, optimizer, scheduler)


def _make_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let a fresh optimizer make its state, by a step that changes nothing."""
    if optimizer.state:
        return
    settings = [(group, group["lr"], group.get("weight_decay")) for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [p.grad for p in parameters]
    with torch.no_grad():
        # A rate of zero is not trusted to change nothing: the values are put back after the step.
        values = [p.detach().clone() for p in parameters]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group, _, decay in settings:
            # A rate that is a tensor stays one, on its device: some optimizers take no number in its place.
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
            if decay is not None:
                group["weight_decay"] = 0.0
        optimizer.step()
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    for group, rate, decay in settings:
        group["lr"] = rate
        if decay is not None:
            group["weight_decay"] = decay
    for parameter, grad in zip(parameters, kept, strict=True):
        parameter.grad = grad


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()
