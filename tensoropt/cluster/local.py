"""This machine as a cluster: GPUs through NVML, else CPU ranks, one per core that this process may use."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tensoropt.cluster.catalog import device_kind, link
from tensoropt.cluster.devices import DeviceKind
from tensoropt.cluster.hardware import Cluster, Level
from tensoropt.cluster.nvml import gpu_cluster, gpu_cores
from tensoropt.cluster.quantities import count
from tensoropt.errors import ClusterError

logger = logging.getLogger(__name__)

# float32 FLOP per cycle of one core: two fused multiply-adds of the widest vectors is the common case
# for AVX2; one for AVX-512, as many parts have a single 512-bit unit or halve it.
_FLOP_PER_CYCLE = (("avx512f", 32), ("fma", 32), ("avx", 16), ("asimd", 16))
_DEFAULT_HERTZ = 2.5e9  # an assumption, where the system does not say
_FEWEST_OF_GPU_RANK = 2  # logical CPUs; an assumption
THIS_MACHINE = "this machine"
"""The source of a cluster of CPU ranks that was found on this machine, not described by anybody."""
ANY_CORE = "CPU-core"
"""The kind that stands for a core of whatever machine asks."""


def local_cluster(count: int | None = None) -> Cluster:
    """GPUs if NVML sees any, else CPU ranks.

    Args:
        count: how many, the first of the GPUs; by default all GPUs, or one rank per available core.

    Raises:
        ClusterError: there are GPUs, but fewer.
    """
    gpus = gpu_cluster()
    if gpus is None:
        return cpu_cluster(count or len(available_cores()), name="local" if count is None else None)
    if count is None:
        return gpus
    if count > gpus.device_count:
        seen = f"{gpus.device_count} {'is' if gpus.device_count == 1 else 'are'}"
        raise ClusterError(
            f"local:{count} asks for {count} GPUs, but {seen} here to be used; use "
            f"local:{gpus.device_count}, or cpu:{count} for CPU ranks"
        )
    return replace(gpus.subset(count), name=f"local:{count}")


def cpu_cluster(ranks: int, *, name: str | None = None) -> Cluster:
    """``ranks`` CPU processes of this machine, each with an equal share of its memory."""
    count(ranks, "the number of CPU ranks")
    level = Level(name="cpu", size=ranks, link=link("CPU-memory"))
    return Cluster(
        name=name or f"local:{ranks}",
        devices=(cpu_kind(ranks),) * ranks,
        levels=(level,),
        source=THIS_MACHINE,
    )


def available_cores() -> tuple[int, ...]:
    """The physical cores this process may run on (one logical CPU of each)."""
    try:
        allowed = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return tuple(range(os.cpu_count() or 1))
    chosen: dict[str, int] = {}
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            key = siblings.read_text().strip()
        except OSError:
            key = str(cpu)
        # Threads of one core share its units: a second rank there would slow the first one down.
        chosen.setdefault(key, cpu)
    return tuple(chosen.values())


def rank_cores(world_size: int, threads: int = 1) -> tuple[tuple[int, ...], ...] | None:
    """The cores of each rank, for measuring and for running alike; None where there are too few.

    Two gloo ranks were measured to talk about twice as fast pinned as unpinned, so that a prediction
    holds only where both are done the same way.
    """
    cores = available_cores()
    if world_size * threads > len(cores):
        return None
    return tuple(cores[rank * threads : (rank + 1) * threads] for rank in range(world_size))


def gpu_rank_cores(
    ranks: int, near: Sequence[tuple[int, ...]] | None = None
) -> tuple[tuple[int, ...], ...] | None:
    """The logical CPUs of ranks that have a GPU each, rank 0 the first, for measuring and for running alike:
    those of the GPU's NUMA node, shared evenly with the other ranks there.

    None where that is not known, or where it leaves a rank with fewer than two: beside its own thread it has
    those of autograd and of NCCL.

    Args:
        near: per GPU the CPUs near it (:func:`~tensoropt.cluster.nvml.gpu_cores`), asked of NVML by default.
    """
    near = gpu_cores() if near is None else near
    if near is None or len(near) < ranks:
        return None
    found = []
    for rank in range(ranks):
        sharing = [other for other in range(ranks) if set(near[other]) & set(near[rank])]
        found.append(tuple(near[rank][sharing.index(rank) :: len(sharing)]))
    return tuple(found) if min(map(len, found), default=0) >= _FEWEST_OF_GPU_RANK else None


def stolen_s() -> float:
    """Seconds that the host of this virtual machine has given to others while a core had something to do, all
    cores and all time since it started, to the hundredth; 0 where the system does not say."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        # The eighth figure of the line "cpu" is the steal time; the file counts in clock ticks, of 1/100 s as
        # a rule.
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def pin_rank(cores: Iterable[int] | None) -> Callable[[], None]:
    """Let this thread and those it starts run as CPU ranks do, measured or at work; returns what undoes it.

    A rank is several threads: its own, PyTorch's, gloo's. They keep to its cores (None: any), and they are
    the kernel's batch class, in which a thread that a message wakes does not push another off the core: each
    comes on when the one before it waits. In the usual class every third all-reduce or so stood still for a
    slice of the scheduler. Means of 55 on Linux 6.18, two cores, usual and batch: two pinned ranks 1.3 and
    0.2 ms for 4 KiB, 2.5 and 0.4 ms for 1 MiB; four ranks on the two cores 7.4 and 2.8, 8.6 and 4.1 ms.

    A class that the process was given (real-time, idle) stays. Elsewhere than on Linux nothing happens.
    """
    undo: list[Callable[[], None]] = []
    if cores is not None and hasattr(os, "sched_setaffinity"):
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, set(cores))
        undo.append(lambda: os.sched_setaffinity(0, before))
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError as error:  # a container may forbid it
            logger.warning("this rank stays in the usual scheduling class, messages take longer: %s", error)
        else:
            undo.append(lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0)))

    def go_back() -> None:
        for each in undo:
            each()

    return go_back


def cpu_kind(ranks: int) -> DeviceKind:
    """One core of this machine: peak from its clock and vector width, memory from the machine's total."""
    base = device_kind(ANY_CORE)
    model, hertz, flags = _cpu_info()
    # The widest vectors stand first in the table. 8 is an assumption: one multiply-add of 128 bits.
    flop_per_cycle = next((flop for flag, flop in _FLOP_PER_CYCLE if flag in flags), 8)
    peak = hertz * flop_per_cycle
    slug = re.sub(r"[^A-Za-z0-9]+", "-", re.sub(r"\(.*?\)|@.*", "", model)).strip("-") or "unknown"
    return replace(
        base,
        name=f"CPU-core-{slug}",
        memory_bytes=max(1, _total_memory_bytes() // ranks),
        # Vectors hold half as many float64.
        flops={"float64": peak / 2, "float32": peak},
        source=f"this machine: {hertz / 1e9:.1f} GHz x {flop_per_cycle} FLOP per cycle; preset bandwidth",
    )


def _cpu_info() -> tuple[str, float, frozenset[str]]:
    """Model name, nominal clock in Hz and feature flags from /proc/cpuinfo, with defaults elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""

    def value(pattern: str) -> str:
        match = re.search(rf"^(?:{pattern})\s*:\s*(.*)$", text, flags=re.MULTILINE)
        return match.group(1).strip() if match else ""

    model = value("model name") or value("Hardware")
    nominal = re.search(r"@\s*([0-9.]+)\s*GHz", model)
    # "cpu MHz" moves with load; round it so that the same machine gives the same cluster.
    measured = value("cpu MHz")
    if nominal:
        hertz = float(nominal.group(1)) * 1e9
    elif measured:
        hertz = max(0.5, round(float(measured) / 500) / 2) * 1e9
    else:
        hertz = _DEFAULT_HERTZ
    return model or os.uname().machine, hertz, frozenset((value("flags") or value("Features")).split())


def _total_memory_bytes() -> int:
    """Memory of the machine, or of the container if that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        # cgroup v2 writes "max" where there is no limit; v1 writes a number larger than any memory.
        if text.isdigit():
            total = min(total, int(text))
    return total
