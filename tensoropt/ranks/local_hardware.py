"""Which clusters are this machine, so that their ranks can be started and measured."""

from __future__ import annotations

import torch

from tensoropt.cluster import Cluster, named_kind
from tensoropt.cluster.local import ANY_CORE, THIS_MACHINE
from tensoropt.ranks.pool import RankPool

_LOCAL_SOURCES = (THIS_MACHINE, "NVML")
"""Sources of clusters that were found on this machine, links included."""


def has_local_cores(cluster: Cluster) -> bool:
    """Whether a cluster's devices are cores of this machine: ``local``, or a file's ``CPU-core`` without
    figures of its own. CPUs that a file describes are somebody else's."""
    if cluster.device_type != "cpu":
        return False
    return cluster.source == THIS_MACHINE or {kind.name for kind in cluster.device_kinds} == {ANY_CORE}


def has_local_links(cluster: Cluster) -> bool:
    """Whether a cluster's links are this machine's, to be timed; a file's are what the file says."""
    return cluster.source in _LOCAL_SOURCES


def local_gpus() -> tuple[str, ...]:
    """Names of the GPUs on which ranks can run and talk, in CUDA's order."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return ()
    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def why_no_gpu() -> str:
    """Why ranks cannot run on GPUs here, with the remedy; empty where they can."""
    if torch.cuda.is_available():
        return ""
    build = f"PyTorch {torch.__version__}"
    if not torch.backends.cuda.is_built():
        return f"{build} is built without CUDA; install a build with CUDA"
    return f"{build} is built with CUDA but sees no GPU; look at nvidia-smi and at CUDA_VISIBLE_DEVICES"


def local_backend(cluster: Cluster) -> str | None:
    """The backend that ranks of a cluster talk over if its devices are this machine's, else None.

    Cores are by :func:`has_local_cores`. GPUs are if NVML described them, PyTorch can use as many, and rank
    by rank they are of the same kind: a preset stays a preset beside GPUs of its kind, and the saved
    description of another machine is not this one. GPUs of several kinds are not measured, as each workload's
    figure would be that of the slowest.
    """
    if cluster.device_type == "cpu":
        return "gloo" if has_local_cores(cluster) else None
    if cluster.source != "NVML" or len(cluster.device_kinds) > 1:
        return None
    names = [named_kind(name) for name in local_gpus()[: cluster.device_count]]
    return "nccl" if names == [device.name for device in cluster.devices] else None


def local_pool(cluster: Cluster) -> RankPool | None:
    """A pool with a rank per device of a cluster that is this machine's, else None; GPU r is rank r's."""
    backend = local_backend(cluster)
    return None if backend is None else RankPool(cluster.device_count, backend=backend)
