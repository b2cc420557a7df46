"""This machine as a cluster of its GPUs, read through NVML, or else of one CPU rank per usable core."""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tensoropt.cluster.catalog import device_kind, link
from tensoropt.cluster.hardware import Cluster, DeviceKind, Level
from tensoropt.cluster.nvml import gpu_cluster
from tensoropt.cluster.quantities import count
from tensoropt.errors import ClusterError

_logger = logging.getLogger(__name__)

THIS_MACHINE = "this machine"
"""The source of a CPU cluster that was detected on this machine rather than described in a file."""
ANY_CORE = "CPU-core"
"""The name of the device kind that stands for a core of whichever machine loads the cluster."""


def local_cluster(count: int | None = None) -> Cluster:
    """Return a cluster of this machine's GPUs if NVML sees any, otherwise of CPU ranks.

    Args:
        count: the number of devices (the first GPUs); by default all GPUs, or one rank per available core.

    Raises:
        ClusterError: the machine has GPUs, but fewer than ``count``.
    """
    gpus = gpu_cluster()
    if gpus is None:
        return cpu_cluster(count or len(available_cores()), name="local" if count is None else None)
    if count is None:
        return gpus
    if count > gpus.device_count:
        seen = f"{gpus.device_count} {'is' if gpus.device_count == 1 else 'are'}"
        raise ClusterError(
            f"local:{count} asks for {count} GPUs, but {seen} available; use local:{gpus.device_count}, or "
            f"cpu:{count} for CPU ranks"
        )
    return replace(gpus.subset(count), name=f"local:{count}")


def cpu_cluster(ranks: int, *, name: str | None = None) -> Cluster:
    """Return a cluster of ``ranks`` CPU processes on this machine, each with an equal share of its memory."""
    count(ranks, "the number of CPU ranks")
    level = Level(name="cpu", size=ranks, link=link("CPU-memory"))
    return Cluster(
        name=name or f"local:{ranks}",
        devices=(_cpu_kind(ranks),) * ranks,
        levels=(level,),
        source=THIS_MACHINE,
    )


def available_cores() -> tuple[int, ...]:
    """Return one logical CPU of each physical core on which this process may run."""
    chosen: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            key = siblings.read_text().strip()
        except OSError:
            key = str(cpu)
        # Threads of one core share its units: a second rank on the same core would slow down the first.
        chosen.setdefault(key, cpu)
    return tuple(chosen.values())


def most_ranks() -> int:
    """Return the most CPU ranks that this machine may run at once: two per core, but at least 16. Both
    numbers are assumptions; ranks that share a core are slow but correct."""
    return max(16, 2 * len(available_cores()))


def rank_cores(world_size: int) -> tuple[int, ...] | None:
    """Return the core of each rank, the same for measuring and for running; None if there are too few cores.

    Two gloo ranks were measured to communicate about twice as fast when pinned as when unpinned, so a
    prediction holds only if both are pinned in the same way.
    """
    cores = available_cores()
    return None if world_size > len(cores) else cores[:world_size]


def pin_rank(core: int | None) -> Callable[[], None]:
    """Pin this thread and those it starts to a core (None: any), in Linux's batch scheduling class; return a
    function that undoes it.

    A rank has several threads on a core: its own, PyTorch's and gloo's. In the batch class a thread that is
    woken by a message does not preempt another one. An all-reduce of 4 KiB by two pinned ranks takes 0.2 ms
    instead of 1.3 ms in the usual class, of 1 MiB 0.4 ms instead of 2.5 ms (means of 55 runs, Linux 6.18). A
    class that the process was given (real-time, idle) is kept.
    """
    undo: list[Callable[[], None]] = []
    if core is not None:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        undo.append(lambda: os.sched_setaffinity(0, before))
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError as error:  # a container may forbid it
            _logger.warning("no batch scheduling class for this rank, so messages take longer: %s", error)
        else:
            undo.append(lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0)))

    def go_back() -> None:
        for each in undo:
            each()

    return go_back


def _cpu_kind(ranks: int) -> DeviceKind:
    """Return the catalogue's CPU core with this machine's processor name and an equal share of its memory."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", re.sub(r"\(.*?\)|@.*", "", processor_name())).strip("-")
    memory = max(1, _total_memory_bytes() // ranks)
    return replace(device_kind(ANY_CORE), name=f"CPU-core-{slug}", memory_bytes=memory)


def processor_name() -> str:
    """Return the CPU's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _total_memory_bytes() -> int:
    """Return the memory of the machine, or of the container if that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        # cgroup v2 writes "max" if there is no limit; v1 writes a number larger than any memory.
        if text.isdigit():
            total = min(total, int(text))
    return total
