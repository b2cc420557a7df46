"""Which clusters are this machine, so that their ranks can be started and measured."""

from __future__ import annotations

import torch

from tensoropt.cluster import Cluster, named_kind
from tensoropt.cluster.local import ANY_CORE, THIS_MACHINE
from tensoropt.cluster.nvml import gpu_cluster, gpu_notes
from tensoropt.ranks.pool import RankPool

_LOCAL_SOURCES = (THIS_MACHINE, "NVML")
"""The sources of clusters that were detected on this machine, links included."""


def has_local_cores(cluster: Cluster) -> bool:
    """Whether a cluster's devices are cores of this machine: ``local``, or a file's ``CPU-core`` without
    figures of its own. CPUs that a file describes belong to another machine."""
    if cluster.device_type != "cpu":
        return False
    return cluster.source == THIS_MACHINE or {kind.name for kind in cluster.device_kinds} == {ANY_CORE}


def has_local_links(cluster: Cluster) -> bool:
    """Whether a cluster's links are this machine's and can be timed; a file's links have the figures in the
    file."""
    return cluster.source in _LOCAL_SOURCES


def local_gpus() -> tuple[str, ...]:
    """The names of the GPUs on which ranks can run and communicate, in CUDA's order."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return ()
    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def why_no_gpu() -> str:
    """The reason why ranks cannot run on this machine's GPUs, with the remedy; empty if they can."""
    if torch.cuda.is_available():
        return ""
    build = f"PyTorch {torch.__version__}"
    if not torch.backends.cuda.is_built():
        return f"{build} is built without CUDA; install a build with CUDA"
    return f"{build} is built with CUDA but sees no GPU; look at nvidia-smi and at CUDA_VISIBLE_DEVICES"


def local_notes(cluster: Cluster) -> tuple[str, ...]:
    """Notes for a person who asked for this machine: which GPUs were detected, and how they are used.

    Empty for clusters that were not detected on this machine, and for CPU ranks that were requested.
    """
    if cluster.source == THIS_MACHINE and cluster.name.startswith("local"):
        seen = gpu_notes()
        if not seen and torch.cuda.is_available():
            count = torch.cuda.device_count()
            seen = (f"PyTorch sees {count} GPUs, but NVML, which describes them, does not answer",)
        return tuple(f"{note}: this is for CPU ranks" for note in seen)
    gpus = gpu_cluster() if cluster.source == "NVML" else None
    if gpus is None or gpus.devices[: cluster.device_count] != cluster.devices:
        return ()
    return (*gpu_notes(), *_untimed(cluster))


def _untimed(cluster: Cluster) -> tuple[str, ...]:
    """The reason why this machine's GPUs are not timed; :func:`gpu_notes` covers GPUs of several kinds."""
    if local_backend(cluster) is not None or len(cluster.device_kinds) > 1:
        return ()
    words = f"{cluster.device_count} x {cluster.device.name}"
    reason = why_no_gpu()
    if not reason and not torch.distributed.is_nccl_available():
        reason = f"PyTorch {torch.__version__} is built without NCCL; install a build that has it"
    if not reason:
        names = ", ".join(local_gpus()) or "none"
        remedy = "look at CUDA_VISIBLE_DEVICES and set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        reason = f"PyTorch sees other GPUs ({names}); {remedy}"
    return (
        f"{words} are here and nothing is timed on them, so that prices are from data sheets: {reason}, or "
        f"explore with --cluster cpu:{cluster.device_count} for CPU ranks",
    )


def local_backend(cluster: Cluster) -> str | None:
    """The backend that a cluster's ranks use if its devices are this machine's, otherwise None.

    :func:`has_local_cores` decides for cores. GPUs are this machine's if NVML described them, PyTorch can use
    that many, and their kinds agree rank by rank. A preset stays a preset even on a machine with GPUs of its
    kind, and the saved description of another machine is not this machine. GPUs of several kinds are not
    measured, because each workload's figure would be that of the slowest.
    """
    if cluster.device_type == "cpu":
        return "gloo" if has_local_cores(cluster) else None
    if cluster.source != "NVML" or len(cluster.device_kinds) > 1:
        return None
    names = [named_kind(name) for name in local_gpus()[: cluster.device_count]]
    return "nccl" if names == [device.name for device in cluster.devices] else None


def local_pool(cluster: Cluster) -> RankPool | None:
    """A pool with one rank per device if the cluster is this machine's, otherwise None; rank r uses GPU r."""
    backend = local_backend(cluster)
    return None if backend is None else RankPool(cluster.device_count, backend=backend)
