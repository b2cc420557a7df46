"""``parallelize``: a user's own model, run by a plan, inside a user's own training script.

The model stays the object it was. Its parameters become DTensors over the engine's shards, its forward
becomes the engine's; optimizers, gradient clipping, ``state_dict`` and distributed checkpoints see
ordinary (distributed) parameters.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from tensoropt.capture import capture
from tensoropt.engine.parallel_model import ATTRIBUTE
from tensoropt.engine.runtime import leave_job
from tensoropt.errors import PlanError
from tensoropt.execute.executable import AnyStrategy
from tensoropt.execute.resolve import resolve_plan
from tensoropt.plan import Plan
from tensoropt.ranks.pinning import pin_process, unpin_process
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import group_operators

M = TypeVar("M", bound=nn.Module)


def parallelize(
    model: M,
    plan: str | os.PathLike[str] | Plan | AnyStrategy,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    seed: int = 0,
    as_measured: bool = True,
) -> M:
    """Make ``model`` run by ``plan`` on the ranks of this job, in place.

    Every rank calls it with the same weights, and later passes the same global batch; each computes its
    part. In training the model returns what it returned before, holding the loss only. ``model.eval()``
    computes without dropout and with running statistics.

    Args:
        model: on the CPU or on this rank's GPU, with the weights to start from (rank 0's are not sent to the
            others).
        plan: a plan, its file, or a strategy. A placed plan is run by one process per device, or without a
            job by this process alone on as many GPUs (or on the CPU), wherever the model is.
        args, kwargs: an example call at the global batch size; by default zeros of the shapes the plan was
            made for.
        loss: maps the model's output to the loss, where the model does not return it; the model then
            returns the loss.
        seed: of dropout.
        as_measured: in a torchrun job on CPUs, run this process as CPU ranks are measured, so that a step
            takes what the plan predicts: PyTorch with one thread, the batch scheduling class, and a core of
            its own where there are enough, which workers of a data loader share. False leaves all that to
            the script.

    Returns:
        ``model``. Create the optimizer afterwards: its parameters are new.

    Warns:
        UserWarning: the plan was made for GPUs and the model is on the CPU, or the other way round; it runs,
            but what the plan predicts is not for these devices. Only rank 0 of a job says so.

    Raises:
        PlanError: the plan is for another model, or for another number of ranks.
        CaptureError: the model cannot be captured.
    """
    if hasattr(model, ATTRIBUTE):
        raise PlanError("this model is parallelized already; build it anew for another plan")
    resolved = resolve_plan(plan)
    if args is None and kwargs is None:
        args, kwargs = resolved.example_call()
    # Captured anew in the script: plans have names only, and a model that is another one is refused at the
    # first name that does not fit.
    captured = capture(model, args or (), kwargs, loss=loss, mode=resolved.mode, dtype=resolved.compute_dtype)
    executable = resolved.bind(group_operators(refine_graph(captured.graph)))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    resolved.warn_of_other_devices(device)
    if as_measured and device.type == "cpu":
        pin_process()  # before gloo starts threads, which take it over
    _join_job(device)
    # After the job was joined: engines make their process groups when they are built.
    executable.parallel_model(model, captured, seed).install()
    return model


def _join_job(device: torch.device) -> None:
    """Initialise the process group of a torchrun job, as ``init_device_mesh`` would."""
    if dist.is_initialized() or "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    # A group that outlives the interpreter aborts the process (`leave_job`). Only a group made at this place:
    # one of the script's own is the script's to end.
    atexit.register(leave_job)


def shutdown() -> None:
    """Wait for the other ranks and leave the job; the last line of a script that parallelizes models.

    A group that :func:`parallelize` made is left at exit anyway; one that the script made itself is not.
    Parallelized models cannot be run afterwards.
    """
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # a rank that failed is not waited for
            dist.barrier()
    leave_job()
    unpin_process()
