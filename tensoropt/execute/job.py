"""The job of which a process is a rank: its device, and its process group."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from tensoropt.errors import PlanError
from tensoropt.ranks.local_hardware import why_no_gpu

DEVICE_TYPES = ("cpu", "cuda")


def rank_device(device: str | torch.device) -> torch.device:
    """Return ``device`` as this rank's: ``cuda`` without a number is the GPU of torchrun's ``LOCAL_RANK``.

    A GPU becomes the current one of the process, so that code that asks for "the GPU" (NCCL, the script) gets
    it.

    Raises:
        PlanError: the device is neither a CPU nor a GPU of this machine.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise PlanError(
            f"device {device!r} is none of PyTorch's ({error}); use cpu, cuda or cuda:N"
        ) from None
    if found.type not in DEVICE_TYPES:
        raise PlanError(f"plans run on cpu or cuda, not on {found.type}; pass device='cpu' or device='cuda'")
    if found.type == "cpu":
        return found
    reason = why_no_gpu()
    if reason:
        raise PlanError(f"this rank cannot run on a GPU: {reason}, or pass device='cpu'")
    seen = torch.cuda.device_count()
    local = os.environ.get("LOCAL_RANK")
    if found.index is None:
        index = torch.cuda.current_device() if local is None else int(local)
        found = torch.device("cuda", index)
    if found.index >= seen:
        raise PlanError(
            f"this rank has no GPU {found.index}: PyTorch sees {seen} here; start at most {seen} ranks per "
            "host, or show it more GPUs (CUDA_VISIBLE_DEVICES)"
        )
    torch.cuda.set_device(found)
    return found


def in_torchrun() -> bool:
    """Return whether this process is a rank of a torchrun job."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


def start_group(device: torch.device, timeout_s: float | None = None) -> None:
    """Initialise the process group of a torchrun job: NCCL, bound to the device, for GPUs, otherwise gloo.

    Args:
        device: this rank's device.
        timeout_s: how long a collective waits for another rank; PyTorch's default unless given.

    Raises:
        PlanError: GPUs cannot communicate with this build of PyTorch.
    """
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    if device.type == "cuda":
        if not dist.is_nccl_available():
            raise PlanError(
                f"GPUs talk through NCCL, which PyTorch {torch.__version__} is built without; install a "
                "build that has it"
            )
        # With `device_id` the communicator is made at once, on this GPU: without, NCCL guesses one from the
        # rank, and a wrong guess hangs.
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
