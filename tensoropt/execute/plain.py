"""Parallelized models as plain modules with whole weights, to generate, evaluate, export or save."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tensoropt.engine.parallel_model import ParallelModel, parallel_of
from tensoropt.engine.runtime import gathered, is_first, wait_for_all
from tensoropt.errors import PlanError


@contextlib.contextmanager
def whole(model: nn.Module, device: str | torch.device | None = None) -> Iterator[nn.Module]:
    """Yield, on every rank, a plain unsplit copy of a parallelized model with its current weights.

    All ranks must enter it together; inside, each acts on its own. The copy takes the whole model's memory,
    and changes to it are lost.

    Args:
        device: the weights' device; by default the rank's.

    Raises:
        PlanError: the model is not parallelized.
    """
    parallel = parallel_of(model)
    parallel.engine.sync_buffers()
    where = parallel.device if device is None else torch.device(device)
    # A copy: a parameter that no rank splits would be the model's own tensor.
    values = {key: value.to(where, copy=True) for key, value in _whole_values(parallel)}
    yield parallel.plain_copy(values).to(where)


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], **settings: Any) -> None:
    """Write a parallelized model of ``transformers`` or ``peft`` by its own ``save_pretrained``.

    Every rank must call it. Rank 0 writes, and its host holds the whole model.

    Args:
        settings: arguments of the model's ``save_pretrained``.

    Raises:
        PlanError: the model has no ``save_pretrained``, or is not parallelized.
    """
    if not hasattr(model, "save_pretrained"):
        raise PlanError(
            f"{type(model).__name__} has no save_pretrained; use tensoropt.save_checkpoint, or save the "
            "state dict of the module that tensoropt.whole(model) gives"
        )
    parallel = parallel_of(model)
    parallel.engine.sync_buffers()
    values = {}
    for key, value in _whole_values(parallel):
        if is_first():
            values[key] = value.cpu()
        del value
    if is_first():
        parallel.plain_copy(values).save_pretrained(folder, **settings)  # type: ignore[operator]
    wait_for_all()


def _whole_values(parallel: ParallelModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (key, whole value) of each parameter in the plan; all ranks must iterate to the end."""
    keys = parallel.parameter_keys()
    having = torch.tensor([parallel.in_state(key) for key in keys], dtype=torch.int64, device=parallel.device)
    ranks = gathered(having) if parallel.together is not None else having[None].cpu()
    for key, in_states in zip(keys, ranks.t(), strict=True):
        name = parallel.names[key]
        value = None
        if parallel.in_state(key):
            own = parallel.own_shape(key, parallel.shown_gradient(name, parallel.local(name)))
            value = (own.full_tensor() if isinstance(own, DTensor) else own).detach()
        if not in_states.all():
            if value is None:
                tensor = parallel.source.tensors[name]
                dtype = getattr(torch, tensor.stored_dtype)
                value = torch.empty(tensor.shape, dtype=dtype, device=parallel.device)
            value = value.as_subclass(torch.Tensor).reshape(parallel.shapes[key]).contiguous()
            dist.broadcast(value, int(in_states.argmax()))
        assert value is not None
        yield key, value.as_subclass(torch.Tensor).reshape(parallel.shapes[key])
