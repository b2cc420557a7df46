"""``parallelize``: runs a user's own model by a plan, inside the user's own training script.

The model stays the object it was. Its parameters become DTensors over the engine's shards, and its forward
becomes the engine's; optimizers, gradient clipping, ``state_dict`` and distributed checkpoints see ordinary
(distributed) parameters.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from tensoropt.engine.parallel_model import ATTRIBUTE
from tensoropt.engine.runtime import leave_job
from tensoropt.engine.together import leave
from tensoropt.errors import PlanError
from tensoropt.execute.alike import made_alike, tell_of_refusal
from tensoropt.execute.executable import AnyStrategy
from tensoropt.execute.initialise import InitWeights
from tensoropt.execute.job import in_torchrun, rank_device, start_group
from tensoropt.execute.resolve import ResolvedPlan, resolve_plan
from tensoropt.execute.weights import WeightSource, fill_unused
from tensoropt.plan import Plan
from tensoropt.ranks.pinning import pin_process, unpin_process

M = TypeVar("M", bound=nn.Module)


def parallelize(
    model: M,
    plan: str | os.PathLike[str] | Plan | AnyStrategy,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    init_weights: InitWeights | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    seed: int = 0,
    as_measured: bool = True,
    sync_weights: bool = False,
    compare_ranks: bool = True,
) -> M:
    """Make ``model`` run by ``plan`` on the ranks of this job, in place.

    Every rank must call it with the same weights, and later pass the same global batch; each computes its
    part. In training the model returns what it returned before, with only the loss in it. ``model.eval()``
    computes without dropout and with running statistics.

    The model is captured on the CPU or on the meta device, and only a rank's shards of the weights are ever
    put on the rank's device. Weights from a checkpoint or a function are read one layer at a time: if the
    model was built on the meta device, a rank starts with the memory of its shards and one layer.

    Args:
        model: the model, on the CPU, on the meta device or on a GPU, with the weights to start from unless
            ``checkpoint`` or ``init_weights`` give them: the same on every rank (see ``sync_weights``).
        plan: a plan, its file, or a strategy. A placed plan is run by one process per device or, without a
            job, by this process alone on as many GPUs (or on the CPU).
        device: the device of this rank: ``cpu``, ``cuda`` for the GPU of torchrun's ``LOCAL_RANK``, or a
            certain GPU. By default the model's device; for a model on the meta device, the kind that the plan
            is for.
        checkpoint: where to read weights from: a folder of ``torch.distributed.checkpoint`` (as
            :func:`save_checkpoint` writes it), a safetensors file, or a folder of those. It must have
            everything that a state dict of the model has, except what ``init_weights`` gives.
        init_weights: draws the weights (those that the checkpoint lacks, if there is one): a function that
            sets the parameters and buffers of the module it is given. It is called for each module on the
            CPU, as ``model.apply(init_weights)`` calls it after ``torch.manual_seed(seed)`` and with the
            same result, but never finds more than it touches in memory. It is called on the meta device
            once before, so it may not look at values.
        args, kwargs: an example call at the global batch size; by default zeros of the shapes the plan was
            made for.
        loss: maps the model's output to the loss, if the model does not return it; the model then returns the
            loss.
        seed: the seed of dropout, and of ``init_weights``.
        as_measured: in a torchrun job on CPUs, run this process as CPU ranks are measured, so that a step
            takes the time that the plan predicts: PyTorch with one thread, the batch scheduling class, and a
            core of its own if there are enough, which workers of a data loader share. False leaves all that
            to the script.
        sync_weights: send rank 0's weights and buffers to the other ranks, one at a time. Without it, ranks
            whose weights differ are refused: these were drawn with other seeds, or none.
        compare_ranks: compare hashes between the ranks: of the weights now, and of a call's inputs in the
            first calls and in one of a thousand. False for ranks that compute their inputs themselves and
            round differently.

    Returns:
        ``model``. Its parameters are new; optimizers that were made before continue with them, in their
        groups.

    Warns:
        UserWarning: the plan was made for GPUs and the model is on the CPU, or the other way round; it runs,
            but the plan's predictions are not for these devices. Only rank 0 of a job says so.

    Raises:
        PlanError: the plan is for another model, or for another number of ranks; this machine lacks the
            device; something of the model has no value; ranks have different weights or another plan than
            rank 0.
        CaptureError: the model cannot be captured.
    """
    if hasattr(model, ATTRIBUTE):
        raise PlanError("this model is parallelized already; build it anew for another plan")
    resolved = resolve_plan(plan)
    where = _default_device(model, resolved) if device is None else rank_device(device)
    if args is None and kwargs is None:
        args, kwargs = resolved.example_call()
    compares = compare_ranks or sync_weights
    try:
        weights = WeightSource(model, checkpoint, init_weights, seed)
        prepare = functools.partial(resolved.prepare, weights, args or (), kwargs or {}, loss)
        prepared = prepare()
    except Exception:
        if compares and resolved.devices > 1:
            _join_job(where)
            if dist.is_initialized():
                tell_of_refusal(model, where)
        raise
    resolved.warn_of_other_devices(where)
    if as_measured:
        pin_process(where.type)  # before gloo or NCCL start threads, which take it over
    _join_job(where)
    if prepared.executable.devices > 1 and dist.is_initialized() and compares:
        prepared = made_alike(prepared, prepare, weights, where, seed, sync=sync_weights)
    # After joining the job, as engines make their process groups when they are built.
    captured = prepared.captured
    parallel = prepared.executable.parallel_model(model, captured, prepared.values, where, seed)
    # Before the model is watched for changes.
    fill_unused(weights, (str(tensor.key) for tensor in captured.graph.tensors.values() if tensor.key))
    parallel.install(compare_ranks=compare_ranks)
    return model


def _default_device(model: nn.Module, resolved: ResolvedPlan) -> torch.device:
    """Return a model's default device: the one it is on or, for the meta device, the kind that its plan is
    for."""
    found = next((p.device for p in model.parameters()), torch.device("cpu"))
    if found.type != "meta":
        return found
    cluster = resolved.cluster
    if cluster is None:
        raise PlanError(
            "the model is on the meta device, and the plan does not say what devices it is for; pass "
            "device='cuda' or device='cpu'"
        )
    return rank_device(cluster.device_type)


def _join_job(device: torch.device) -> None:
    """Initialise the process group of a torchrun job, as ``init_device_mesh`` would."""
    if dist.is_initialized() or not in_torchrun():
        return
    start_group(device)
    # A group that outlives the interpreter aborts the process (`leave_job`). Only a group made at this place:
    # one of the script's own is the script's to end.
    atexit.register(leave_job)


def shutdown() -> None:
    """Wait for the other ranks and leave the job; the last line of a script that parallelizes models.

    A group that :func:`parallelize` made is left at exit anyway; a group that the script made itself is not.
    Parallelized models cannot be run afterwards.
    """
    leave()
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # a rank that failed is not waited for
            dist.barrier()
    leave_job()
    unpin_process()
