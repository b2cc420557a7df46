"""What costs on a cluster rest on: the cluster, its ranks if they can be measured, earlier measurements, and
the settings that costs depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from tensoropt.cluster import Cluster
from tensoropt.costs.compute import measurement_prefix
from tensoropt.profiling.cuda_kernels import Capability, capability_of
from tensoropt.profiling.store import ProfileStore
from tensoropt.ranks.kernel_settings import KernelSettings
from tensoropt.ranks.local_hardware import has_local_cores
from tensoropt.ranks.pool import RankPool
from tensoropt.types import Progress, silent


class CostSettings(Protocol):
    """The settings that costs depend on, in addition to model and cluster."""

    @property
    def mode(self) -> str: ...

    @property
    def optimizer(self) -> str: ...

    @property
    def measure(self) -> str:
        """``all`` or ``never``."""
        ...

    @property
    def process_memory(self) -> bool:
        """Whether the memory that a process uses in addition to tensors is counted."""
        ...

    @property
    def overlap(self) -> str:
        """``default``, or ``none``: nothing overlaps with computation."""
        ...


@dataclass
class CostContext:
    """A cluster, the store of earlier measurements, and how to measure more.

    Args:
        pool: ranks of this cluster if it is this machine and may be measured, otherwise None.
        expect: called with a part of the work and its remaining seconds.
        timing: the progress of timing, which estimates its own duration; by default like all other progress.
    """

    cluster: Cluster
    store: ProfileStore
    settings: CostSettings
    pool: RankPool | None = None
    progress: Progress = silent
    expect: Callable[[str, float], None] = lambda part, seconds: None
    timing: Progress | None = None

    @property
    def training(self) -> bool:
        """Whether training steps are priced, as opposed to inference calls."""
        return self.settings.mode == "train"

    @property
    def capability(self) -> Capability | None:
        """The compute capability whose attention kernels are asked what they keep; None for CPU ranks."""
        device = self.cluster.device
        return capability_of(device.capability) if self.cluster.device_type == "cuda" else None

    @cached_property
    def kernels(self) -> KernelSettings:
        """The settings of this process that decide which kernels run on this cluster."""
        return KernelSettings.now().of(self.cluster.device_type)

    @property
    def prefix(self) -> str:
        """The head of the store's keys for workloads that are timed on this cluster."""
        device = None if has_local_cores(self.cluster) else self.cluster.device.name
        # CPU ranks share caches and memory bandwidth, so their number is part of the key; a GPU has its own.
        ranks = self.cluster.device_count if device is None else 1
        return measurement_prefix(ranks, 1, self.training, device, self.kernels)
