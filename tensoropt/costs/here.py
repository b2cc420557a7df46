"""Which clusters are this machine, so that their ranks can be started and measured."""

from __future__ import annotations

import torch

from tensoropt.cluster import Cluster, named_kind
from tensoropt.costs.pool import RankPool


def gpus_here() -> tuple[str, ...]:
    """Names of the GPUs on which ranks can run and talk, in CUDA's order."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return ()
    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def backend_here(cluster: Cluster) -> str | None:
    """What ranks of a cluster talk over if its devices are here, else None.

    CPU ranks exist wherever there are processors. GPUs are here if NVML described them, PyTorch can use as
    many, and rank by rank they are of the same kind: a preset stays a preset beside GPUs of its kind, and the
    saved description of another machine is not this one. GPUs of several kinds are not measured, as each
    workload's figure would be that of the slowest.
    """
    if cluster.device_type == "cpu":
        return "gloo"
    if cluster.source != "NVML" or len(cluster.device_kinds) > 1:
        return None
    names = [named_kind(name) for name in gpus_here()[: cluster.device_count]]
    return "nccl" if names == [device.name for device in cluster.devices] else None


def ranks_here(cluster: Cluster) -> RankPool | None:
    """A pool with a rank per device of a cluster that is here; GPU r is rank r's."""
    backend = backend_here(cluster)
    return None if backend is None else RankPool(cluster.device_count, backend=backend)
