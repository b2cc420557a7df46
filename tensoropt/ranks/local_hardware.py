"""Functions that tell whether a cluster is this machine, so that ranks can be started and timed on it."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from tensoropt.cluster import Cluster, available_cores, named_kind, pin_rank, rank_cores
from tensoropt.cluster.hosts import detected_hosts
from tensoropt.cluster.local import ANY_CORE, THIS_MACHINE, most_ranks
from tensoropt.cluster.nvml import gpu_cluster
from tensoropt.errors import ClusterError
from tensoropt.ranks.hosts import job_ranks
from tensoropt.ranks.pool import RankPool

_undo: list[Callable[[], None]] = []
"""The function that undoes :func:`pin_process`, if that was called."""


def pin(local_rank: int, local_ranks: int) -> Callable[[], None]:
    """Limit this process to one thread, pinned to a core of its own if there are enough; return a function
    that undoes it.

    Args:
        local_rank, local_ranks: number of this rank on the host, and of all ranks on the host.
    """
    threads = torch.get_num_threads()
    cores = rank_cores(local_ranks)
    go_back = pin_rank(cores[local_rank] if cores is not None else None)
    torch.set_num_threads(1)

    def undo() -> None:
        torch.set_num_threads(threads)
        go_back()

    return undo


def pin_process() -> None:
    """Call :func:`pin` once for this process, if torchrun's variables give its rank on the host."""
    if not _undo and {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        _undo.append(pin(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])))


def unpin_process() -> None:
    while _undo:
        _undo.pop()()


_LOCAL_SOURCES = (THIS_MACHINE, "NVML")
"""The sources of clusters detected on this machine."""


def has_local_cores(cluster: Cluster) -> bool:
    """Return whether a cluster's devices are this machine's CPU cores: detected, or of kind ``CPU-core``."""
    if cluster.device_type != "cpu":
        return False
    return cluster.source == THIS_MACHINE or {kind.name for kind in cluster.device_kinds} == {ANY_CORE}


def has_local_links(cluster: Cluster) -> bool:
    """Return whether a cluster's links are this machine's and can be timed."""
    return cluster.source in _LOCAL_SOURCES


def local_gpus() -> tuple[str, ...]:
    """Return the names of the GPUs on which ranks can run and communicate, in CUDA's order."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return ()
    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def why_no_gpu() -> str:
    """Return why ranks cannot run on this machine's GPUs, with the remedy; "" if they can."""
    if torch.cuda.is_available():
        return ""
    build = f"PyTorch {torch.__version__}"
    if not torch.backends.cuda.is_built():
        return f"{build} is built without CUDA; install a build with CUDA"
    return f"{build} is built with CUDA but sees no GPU; look at nvidia-smi and at CUDA_VISIBLE_DEVICES"


def local_notes(cluster: Cluster) -> tuple[str, ...]:
    """Return notes on why this machine's GPUs are not used or timed; none if CPU ranks were requested."""
    local, shown = cluster.name.startswith("local"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if cluster.source == THIS_MACHINE and local and shown in ("", "-1") and torch.backends.cuda.is_built():
        return (f"CUDA_VISIBLE_DEVICES='{shown}' shows no GPU: plans are for CPU ranks",)
    if cluster.source == THIS_MACHINE and local and torch.cuda.is_available():
        return (
            f"PyTorch sees {torch.cuda.device_count()} GPUs, but NVML, which describes them, names none that "
            "can be used: plans are for CPU ranks",
        )
    gpus = gpu_cluster() if cluster.source == "NVML" else None
    if gpus is None or gpus.devices[: cluster.device_count] != cluster.devices or local_backend(cluster):
        return ()
    reason = why_no_gpu()
    if not reason and not torch.distributed.is_nccl_available():
        reason = f"PyTorch {torch.__version__} is built without NCCL; install a build that has it"
    if not reason and len(cluster.device_kinds) > 1:
        reason = "ranks must have GPUs of one kind; select such GPUs with CUDA_VISIBLE_DEVICES"
    if not reason:
        names = ", ".join(local_gpus()) or "none"
        remedy = "look at CUDA_VISIBLE_DEVICES and set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        reason = f"PyTorch sees other GPUs ({names}); {remedy}"
    return (
        f"this machine's {cluster.counts} cannot be timed, so costs come from data sheets: {reason}, or "
        f"explore with --cluster cpu:{cluster.device_count} for CPU ranks",
    )


def local_backend(cluster: Cluster) -> str | None:
    """Return the backend for timing a cluster's ranks on this machine, ``gloo`` or ``nccl``; else None.

    GPUs must have been found by NVML, be usable by PyTorch in the same order, and be of one kind. A preset
    never counts as this machine.
    """
    if cluster.device_type == "cpu":
        return "gloo" if has_local_cores(cluster) else None
    if cluster.source != "NVML" or len(cluster.device_kinds) > 1:
        return None
    names = [named_kind(name) for name in local_gpus()[: cluster.device_count]]
    return "nccl" if names == [device.name for device in cluster.devices] else None


def local_pool(cluster: Cluster, *, mixed: bool = False) -> RankPool | None:
    """Return a pool with one rank per device if the cluster is this machine or the hosts of this job; else
    None.

    Args:
        mixed: whether a job's devices may be of several kinds, as when links are timed.

    Raises:
        ClusterError: the job has other hosts, or there are too many ranks for this machine.
    """
    if (ranks := job_ranks()) is not None and detected_hosts(cluster) > 1:
        ranks.check(cluster)
        return ranks if mixed or len(cluster.device_kinds) == 1 else None
    backend = local_backend(cluster)
    if backend == "gloo" and cluster.device_count > most_ranks():
        raise ClusterError(
            f"{cluster.name} would be timed on {cluster.device_count:,} processes, but this machine's "
            f"{len(available_cores())} cores run at most {most_ranks()}; take fewer devices, or "
            '--measure never (in Python measure="never"), which estimates durations'
        )
    return None if backend is None else RankPool(cluster.device_count, backend=backend)
