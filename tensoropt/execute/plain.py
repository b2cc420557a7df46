"""A parallelized model as a plain module again, with whole weights: to generate, to evaluate, to export, to
save in the form of another library."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensoropt.engine.parallel_model import parallel_of
from tensoropt.errors import PlanError


@contextlib.contextmanager
def whole(model: nn.Module, device: str | torch.device | None = None) -> Iterator[nn.Module]:
    """A copy of a parallelized model on every rank: the plain module that it was, with its weights now.

    All ranks must enter it together; within, each does what it likes, without the others. The copy takes the
    memory of the whole model. What is written into it is lost.

    Args:
        device: where the weights go; the device of the rank by default.

    Raises:
        PlanError: the model is not parallelized.
    """
    parallel = parallel_of(model)
    parallel.engine.sync_buffers()
    where = parallel.device if device is None else torch.device(device)
    # A copy: a parameter that no rank splits would be the model's own.
    values = {key: value.to(where, copy=True) for key, value in parallel.whole_values()}
    yield parallel.plain(values).to(where)


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], **settings: Any) -> None:
    """Write a parallelized model of ``transformers`` or ``peft`` as its own ``save_pretrained`` does; every
    rank must call it, and rank 0 writes. It takes the memory of the whole model on rank 0's host.

    Args:
        settings: of the model's ``save_pretrained``.

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
    first = not dist.is_initialized() or dist.get_rank() == 0
    values = {}
    for key, value in parallel.whole_values():
        if first:
            values[key] = value.cpu()
        del value
    if first:
        parallel.plain(values).save_pretrained(folder, **settings)  # type: ignore[operator]
    if dist.is_initialized():
        dist.barrier()
