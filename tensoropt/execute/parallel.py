"""``parallelize``: run a user's own model as a plan says, inside the user's own training script.

The model stays the same object. Its parameters become DTensors over the engine's shards, and its forward
becomes the engine's, so that optimizers, gradient clipping, ``state_dict`` and distributed checkpoints see
ordinary (distributed) parameters.

All ranks start with the same weights, model and plan. This module also sets up a rank's device and the job's
process group.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from tensoropt.engine.parallel_model import ATTRIBUTE, ParallelModel
from tensoropt.engine.runtime import first_differing, gathered, leave_job, text_hash
from tensoropt.engine.script_values import leave
from tensoropt.errors import PlanError
from tensoropt.execute.executable import Prepared, ResolvedPlan, engine_of, resolve_plan
from tensoropt.execute.initialise import InitWeights
from tensoropt.execute.own_steps import OwnSteps
from tensoropt.execute.weights import WeightSource
from tensoropt.plan.plan import Plan
from tensoropt.ranks.local_hardware import pin_process, unpin_process, why_no_gpu
from tensoropt.sharding.strategy import ParallelStrategy

_FACTS = ("model", "plan", "seed", "sync_weights")
"""The properties that ranks compare before they compare their weights."""


def _with_common_weights(
    prepared: Prepared,
    prepare: Callable[[], Prepared],
    weights: WeightSource,
    device: torch.device,
    seed: int,
    *,
    sync: bool,
) -> Prepared:
    """Return this rank's model with weights common to all ranks; every rank must call it.

    Weights from files or a function are equal on all ranks anyway, and are not compared.

    Args:
        prepare: a function that captures the model again.
        sync: whether to send rank 0's weights to the other ranks if some differ.
    """
    own = weights.own()
    plan = json.dumps(prepared.strategy.to_data(), sort_keys=True, default=str)
    _compare_facts([_tensors_of(weights.model), plan, str(seed), str(sync)], device)
    differing = first_differing(own, device)
    if differing is not None and not sync:
        name, rank = differing
        kind = "buffer" if name in weights.buffers() else "parameter"
        raise PlanError(
            f"rank {rank} has other weights than rank 0, first in the {kind} {name}; call torch.manual_seed "
            "with one seed on all ranks before the model is built, or pass sync_weights=True to use rank 0's "
            "weights, or give all ranks their weights by checkpoint= or init_weights="
        )
    if differing is not None:
        _send(own, device)
        # Buffers become constants of the graph, which change with rank 0's buffers.
        prepared = prepare()
    differing = first_differing(prepared.captured.graph.constants, device)
    if differing is not None:
        raise PlanError(
            f"rank {differing[1]} has another value than rank 0 in {differing[0]}, a constant of the model: "
            "a tensor that its code draws or keeps as a plain attribute; call torch.manual_seed with one "
            "seed on all ranks before the model is built, or make it a buffer and pass sync_weights=True"
        )
    return prepared


def _tensors_of(model: nn.Module) -> str:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return json.dumps([[name, *map(str, (value.shape, value.dtype))] for name, value in tensors])


def _compare_facts(texts: Sequence[str], device: torch.device) -> None:
    """Raise a PlanError if ranks differ in model, plan or settings, so that weights cannot be compared.

    Args:
        texts: this rank's properties in the order of :data:`_FACTS`; only the first of them (the model) if
            this rank has refused its model, plan or weights.
    """
    hashes = [text_hash(text) for text in texts] + [0] * (len(_FACTS) - len(texts))
    refuses = len(texts) < len(_FACTS)
    rows = gathered(torch.tensor([refuses, *hashes], dtype=torch.int64, device=device)).tolist()
    refused = [rank for rank, row in enumerate(rows) if row[0]]
    # A rank that refuses has no further facts.
    for column, fact in enumerate(_FACTS[:1] if refused else _FACTS, start=1):
        for rank, row in enumerate(rows):
            if row[column] != rows[0][column]:
                raise PlanError(
                    f"rank {rank} has another {fact} than rank 0; every rank must build the same model and "
                    "call parallelize with the same arguments"
                )
    if refused and not refuses:
        raise PlanError(f"rank {refused[0]} refused its model, plan or weights; see its own error")


@torch.no_grad()
def _send(own: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Copy rank 0's values to all ranks, with no more than one additional tensor on the device."""
    for value in own.values():
        # Collectives need contiguous tensors on the job's device.
        sent = value.detach().to(device).contiguous()
        dist.broadcast(sent, 0)
        if sent.data_ptr() != value.data_ptr():
            value.copy_(sent)


_DEVICE_TYPES = ("cpu", "cuda")


def rank_device(device: str | torch.device) -> torch.device:
    """Return this rank's device: for ``cuda`` without a number, the GPU of torchrun's ``LOCAL_RANK``.

    A GPU becomes the process's current one, for code that uses the default GPU (NCCL, the script).

    Raises:
        PlanError: the device is neither a CPU nor a GPU of this machine.
    """
    try:
        own_device = torch.device(device)
    except RuntimeError as error:
        raise PlanError(
            f"device {device!r} is unknown to PyTorch ({error}); use cpu, cuda or cuda:N"
        ) from None
    if own_device.type not in _DEVICE_TYPES:
        raise PlanError(
            f"plans run on cpu or cuda, not on {own_device.type}; pass device='cpu' or device='cuda'"
        )
    if own_device.type == "cpu":
        return own_device
    reason = why_no_gpu()
    if reason:
        raise PlanError(f"this rank cannot run on a GPU: {reason}, or pass device='cpu'")
    seen = torch.cuda.device_count()
    local = os.environ.get("LOCAL_RANK")
    if own_device.index is None:
        index = torch.cuda.current_device() if local is None else int(local)
        own_device = torch.device("cuda", index)
    if own_device.index >= seen:
        raise PlanError(
            f"this rank has no GPU {own_device.index}: PyTorch sees {seen} here; start at most {seen} ranks "
            "per host, or show it more GPUs (CUDA_VISIBLE_DEVICES)"
        )
    torch.cuda.set_device(own_device)
    return own_device


def start_group(device: torch.device, timeout_s: float | None = None) -> None:
    """Initialise the process group of a torchrun job: NCCL, bound to the device, for GPUs, otherwise gloo.

    Args:
        device: this rank's device.
        timeout_s: the longest wait of a collective, in seconds; by default PyTorch's.

    Raises:
        PlanError: this PyTorch is built without NCCL.
    """
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    if device.type == "cuda":
        if not dist.is_nccl_available():
            raise PlanError(
                f"GPUs communicate by NCCL, but PyTorch {torch.__version__} was built without it; install a "
                "build that has it"
            )
        # `device_id` creates the communicator at once, on this GPU: NCCL would guess it from the rank, and a
        # wrong guess hangs.
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)


_M = TypeVar("_M", bound=nn.Module)


def parallelize(
    model: _M,
    plan: str | os.PathLike[str] | Plan | ParallelStrategy,
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
    batch: Literal["global", "share"] = "global",
    outputs: Literal["all", "loss"] = "all",
    tune: bool = False,
) -> _M:
    """Parallelize ``model`` by ``plan`` over the ranks of this job, in place.

    Every rank must call it with the same weights, and later pass the same global batch, or its share of it;
    each computes its part. In training the model returns its output with only the loss filled in.
    ``model.eval()`` computes without dropout and with running statistics.

    The model is captured on the CPU or the meta device, and only a rank's shards of the weights are put on
    its device. Weights from a checkpoint or a function are read one layer at a time: for a model on the meta
    device, a rank needs memory for its shards and one layer.

    Args:
        model: the model, on any device. Its weights are the initial ones unless ``checkpoint`` or
            ``init_weights`` give them, and must be equal on all ranks (see ``sync_weights``).
        plan: a plan, its file, or a strategy. A placed plan runs with one process per device or, without a
            job, in this process alone on as many GPUs (or on the CPU).
        device: this rank's device: ``cpu``, ``cuda`` for the GPU of torchrun's ``LOCAL_RANK``, or a specific
            GPU. By default the model's device; for a model on the meta device, the plan's type of device.
        checkpoint: the source of weights: a folder of ``torch.distributed.checkpoint`` (as
            :func:`~tensoropt.execute.checkpoint.save_checkpoint` writes it), a safetensors file, or a folder
            of those. It must have every entry of the model's state dict that ``init_weights`` does not set.
        init_weights: a function that sets the parameters and buffers of the module it is given. With
            ``checkpoint``, only tensors that the checkpoint lacks get values from it. It is called for each
            module on the CPU, with the result of ``model.apply(init_weights)`` after
            ``torch.manual_seed(seed)``, but only the tensors that a call touches are in memory. It is called
            on the meta device once before, so it may not read values.
        args, kwargs: an example call at the global batch size; by default zeros of the plan's shapes.
        loss: a function from the model's output to the loss, if the model does not return the loss; the
            parallelized model then returns it.
        seed: the seed of dropout, and of ``init_weights``.
        as_measured: whether to run CPU ranks of a torchrun job as they were measured, so that a step takes
            the predicted time: PyTorch with one thread, Linux's batch scheduling, and if possible one core
            per rank, shared with its data-loader workers. False leaves this to the script.
        sync_weights: whether to send rank 0's weights and buffers to the other ranks, one at a time.
            Otherwise ranks with different weights (drawn with other seeds or none) are refused.
        compare_ranks: whether to compare hashes between ranks: of weights now, of inputs in the first 3 calls
            and every 1000th. Use False if ranks compute inputs themselves and round differently.
        batch: ``global`` if every rank passes the same global batch; ``share`` if it passes only its rows:
            share ``model.data_rank`` of ``model.data_world``, as :func:`tensoropt.sampler` gives them. Inputs
            without a batch dim are equal on all ranks. Pipelines and placed plans have one share, the global
            batch.
        outputs: the model's output in evaluation (``model.eval()``, without gradients): ``all``, for the
            rank's rows; or only the ``loss``, without computing or sending logits.
        tune: whether to time some training steps, for ``tensoropt tune DIR --job``, which runs the script
            once for each of several plans (:mod:`tensoropt.execute.own_steps`).

    Returns:
        ``model``, with new parameters; existing optimizers continue with them, in their groups.

    Warns:
        UserWarning: the plan was made for GPUs and the model is on the CPU, or vice versa, so the plan's
            predictions do not apply (on rank 0).

    Raises:
        PlanError: the plan is for another model or another number of ranks; this machine lacks the device; a
            tensor of the model has no value; ranks differ in weights or plan.
        CaptureError: the model cannot be captured.
    """
    if batch not in ("global", "share"):
        raise PlanError(f"batch={batch!r} is unknown; pass batch='global' or batch='share'")
    if outputs not in ("all", "loss"):
        raise PlanError(f"outputs={outputs!r} is unknown; pass outputs='all' or outputs='loss'")
    if tune and not isinstance(plan, str | os.PathLike):
        raise PlanError("tune=True writes step times beside the plan's file; pass its path as plan")
    if hasattr(model, ATTRIBUTE):
        raise PlanError("this model is already parallelized; build a new one for another plan")
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
                # The other ranks would wait for this one in `_with_common_weights`.
                _compare_facts([_tensors_of(model)], where)
        raise
    resolved.warn_of_other_devices(where)
    if as_measured and where.type == "cpu":
        pin_process()  # before gloo starts threads, which inherit it
    _join_job(where)
    if prepared.strategy.devices > 1 and dist.is_initialized() and compares:
        prepared = _with_common_weights(prepared, prepare, weights, where, seed, sync=sync_weights)
    # After joining the job, as engines create process groups.
    captured = prepared.captured
    engine = engine_of(prepared.strategy, prepared.values, seed=seed, device=where)
    if batch == "share":
        engine.share_batch()
    parallel = ParallelModel(model, captured, engine)
    # Before changes to the model are watched.
    weights.fill_unused(str(tensor.key) for tensor in captured.graph.tensors.values() if tensor.key)
    parallel.install(compare_ranks=compare_ranks, loss=loss)
    parallel.outputs = outputs
    if tune:
        assert isinstance(plan, str | os.PathLike)
        OwnSteps(engine, plan)
    return model


def _default_device(model: nn.Module, resolved: ResolvedPlan) -> torch.device:
    """Return a model's default device: its own or, for the meta device, the plan's type of device."""
    model_device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if model_device.type != "meta":
        return model_device
    cluster = resolved.cluster
    if cluster is None:
        raise PlanError(
            "the model is on the meta device, and the plan names no type of device; pass "
            "device='cuda' or device='cpu'"
        )
    return rank_device(cluster.device_type)


def _join_job(device: torch.device) -> None:
    """Initialise the process group of a torchrun job, as ``init_device_mesh`` would."""
    if dist.is_initialized() or not {"RANK", "MASTER_ADDR"} <= os.environ.keys():
        return
    start_group(device)
    # A group that outlives the interpreter aborts the process (`leave_job`). A group that the script made is
    # the script's to end.
    atexit.register(leave_job)


def shutdown() -> None:
    """Wait for the other ranks and leave the job; the last line of a script that parallelizes models.

    The exit of the process leaves a group made by :func:`parallelize` anyway, but not the script's own.
    Parallelized models cannot run afterwards.
    """
    leave()
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # does not wait for a rank that failed
            dist.barrier()
    leave_job()
    unpin_process()
