"""GPUs and their topology, read through NVML (package ``nvidia-ml-py``, module ``pynvml``)."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tensoropt.cluster.catalog import kind_by_nvml_name, named_kind
from tensoropt.cluster.devices import DeviceKind
from tensoropt.cluster.gpu_links import gpu_links, text_of
from tensoropt.cluster.hardware import Cluster
from tensoropt.errors import ClusterError
from tensoropt.units import format_bytes

logger = logging.getLogger(__name__)
_WORD_BITS = 64
"""The word size of the CPU masks that NVML returns (``unsigned long`` on 64-bit Linux)."""


@dataclass(frozen=True)
class _Gpu:
    """A GPU that NVML sees.

    Attributes:
        index: NVML's index of the GPU.
        instances: handles of its MIG instances; None if the GPU is not partitioned.
        chosen: position of the MIG instance that ``CUDA_VISIBLE_DEVICES`` names.
    """

    index: int
    handle: Any
    instances: tuple[Any, ...] | None = None
    chosen: int = 0


def gpu_cluster(nvml: Any = None) -> Cluster | None:
    """The GPUs of this machine; None if NVML is missing or sees none.

    Whole GPUs are used, including busy ones. GPUs that are partitioned into MIG instances are left out; if
    there are no others, the cluster is a single instance, because a process cannot see a second one.
    :func:`gpu_notes` reports this.

    Args:
        nvml: an object with pynvml's functions; the module itself by default.
    """
    with _opened(nvml) as found:
        if found is None:
            return None
        gpus, _ = _usable(found, _visible(found, os.environ.get("CUDA_VISIBLE_DEVICES")))
        return _cluster(found, gpus) if gpus else None


def gpu_notes(nvml: Any = None) -> tuple[str, ...]:
    """Notes for people on the GPUs that NVML sees on this machine, and on how they are handled: GPUs that are
    busy, partitioned into MIG instances, hidden, or of several kinds. Empty without NVML."""
    with _opened(nvml) as found:
        if found is None:
            return ()
        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = _visible(found, variable)
        count = found.nvmlDeviceGetCount()
        if count and not visible:
            return (f"{count} GPUs are here, but CUDA_VISIBLE_DEVICES='{variable}' shows none of them",)
        gpus, left_out = _usable(found, visible)
        busy = [note for gpu in gpus if (note := _busy(found, gpu))]
        return (*left_out, *busy, *_mixed(found, gpus))


def gpu_cores(nvml: Any = None) -> tuple[tuple[int, ...], ...] | None:
    """The logical CPUs near each GPU that this process sees, in CUDA's order: those of the GPU's NUMA node
    that the process may use.

    None if NVML is missing or does not report them, or if a GPU has none.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    allowed, found = os.sched_getaffinity(0), []
    with _opened(nvml) as opened:
        if opened is None:
            return None
        for gpu in _visible(opened, os.environ.get("CUDA_VISIBLE_DEVICES")):
            try:
                words = opened.nvmlDeviceGetCpuAffinity(gpu.handle, -(-(os.cpu_count() or 1) // _WORD_BITS))
            except opened.NVMLError:
                return None
            mask = sum(word << _WORD_BITS * number for number, word in enumerate(words))
            found.append(tuple(cpu for cpu in sorted(allowed) if mask >> cpu & 1))
    return tuple(found) if found and all(found) else None


@contextlib.contextmanager
def _opened(nvml: Any) -> Iterator[Any]:
    """NVML while the context is open; None if it is missing or has no driver."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            yield None
            return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        logger.debug("NVML is not usable here: %s", error)
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _visible(nvml: Any, visible: str | None) -> list[_Gpu]:
    """The visible GPUs in CUDA's order; ``CUDA_VISIBLE_DEVICES`` selects them by number or by the prefix of a
    UUID, which may be that of a MIG instance."""
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpus.append(_Gpu(index, handle, _instances(nvml, handle)))
    if visible is None:
        return gpus
    chosen: list[_Gpu] = []
    for item in (part.strip() for part in visible.split(",")):
        if item.isdigit() and int(item) < len(gpus):
            chosen.append(gpus[int(item)])
        elif item.startswith("GPU-"):
            chosen += [g for g in gpus if text_of(nvml.nvmlDeviceGetUUID(g.handle)).startswith(item)][:1]
        elif item.startswith("MIG-"):
            chosen += [
                replace(gpu, chosen=number)
                for gpu in gpus
                for number, instance in enumerate(gpu.instances or ())
                if text_of(nvml.nvmlDeviceGetUUID(instance)).startswith(item)
            ][:1]
        else:
            break  # as in CUDA: an invalid entry hides itself and all that follow
    return chosen


def _instances(nvml: Any, handle: Any) -> tuple[Any, ...] | None:
    """The MIG instances of a GPU; None if it is not, or cannot be, partitioned."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
        if not current:
            return None
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:
        return None
    found = []
    for number in range(most):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
        except nvml.NVMLError:
            continue  # no instance of that number
    return tuple(found)


def _usable(nvml: Any, gpus: list[_Gpu]) -> tuple[list[_Gpu], list[str]]:
    """The GPUs that make up the cluster, and notes on those left out."""
    whole = [gpu for gpu in gpus if gpu.instances is None]
    cut = [gpu for gpu in gpus if gpu.instances is not None]
    if whole or not cut:
        return whole, [
            f"GPU {gpu.index} is cut into {len(gpu.instances or ())} MIG instances and is left out; "
            "CUDA_VISIBLE_DEVICES with the UUID of one of them explores for that alone"
            for gpu in cut
        ]
    first = next((gpu for gpu in cut if gpu.instances), None)
    if first is None:
        numbers = ", ".join(str(gpu.index) for gpu in cut)
        return [], [f"MIG is on for GPU {numbers}, without any instance; make one, or switch MIG off"]
    count = sum(len(gpu.instances or ()) for gpu in cut)
    return [first], [
        f"the GPUs are cut into {count} MIG instances, of which a process sees one and which cannot talk "
        f"to each other: this is for one of them, {_kind_of(nvml, first).name}, at its share of the card's "
        "data sheet"
    ]


# Assumption: the context of an idle process uses less than this share of a card's memory.
_BUSY_SHARE = 0.05


def _busy(nvml: Any, gpu: _Gpu) -> str:
    """A note on a GPU that other processes use, or an empty string."""
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu.handle)
    try:
        others = [p for p in nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle) if p.pid != os.getpid()]
    except nvml.NVMLError:
        others = []
    if not others and memory.used <= _BUSY_SHARE * memory.total:
        return ""
    return (
        f"GPU {gpu.index} ({_kind(nvml, gpu.handle).name}) is in use by {len(others) or 'unknown'} "
        f"processes, which have {format_bytes(memory.used)} of its {format_bytes(memory.total)}: it is "
        "planned for as if it were free, and figures timed on it are too high; CUDA_VISIBLE_DEVICES leaves "
        "it out"
    )


def _mixed(nvml: Any, gpus: list[_Gpu]) -> tuple[str, ...]:
    """A note if the GPUs are of several kinds."""
    kinds = Counter(_kind_of(nvml, gpu).name for gpu in gpus)
    if len(kinds) < 2:
        return ()
    shown = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    order = (
        ""
        if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        else "; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or CUDA numbers them in an order of its own"
    )
    return (
        f"the GPUs are of several kinds ({shown}): sharded plans go at the pace of the slowest and fit the "
        f"smallest, and nothing is timed; CUDA_VISIBLE_DEVICES picks those of one kind{order}",
    )


def _kind_of(nvml: Any, gpu: _Gpu) -> DeviceKind:
    """The kind of a GPU, or of its chosen MIG instance."""
    kind = _kind(nvml, gpu.handle)
    if not gpu.instances:
        return kind
    instance = gpu.instances[gpu.chosen]
    memory = int(nvml.nvmlDeviceGetMemoryInfo(instance).total)
    slices = int(nvml.nvmlDeviceGetAttributes(instance).gpuInstanceSliceCount)
    # A slice has 14 of the 108 multiprocessors of an A100, 16 of the 132 of an H100: about an eighth.
    # Bandwidth is scaled with memory, because both are partitioned together (NVIDIA, MIG User Guide, "GPU
    # instance profiles").
    share = slices / 8
    return replace(
        kind,
        name=f"{kind.name}-MIG-{slices}g.{round(memory / 2**30)}gb",
        memory_bytes=memory,
        flops={dtype: value * share for dtype, value in kind.flops.items()},
        memory_bandwidth=kind.memory_bandwidth * memory / kind.memory_bytes,
        source=f"MIG instance with {slices} slices, an eighth of the card each: {kind.source}",
    )


def _kinds(nvml: Any, gpus: list[_Gpu]) -> tuple[DeviceKind, ...]:
    """The kind of each GPU; GPUs of the same name share one kind, with the smallest memory among them."""
    found = [_kind_of(nvml, gpu) for gpu in gpus]
    least: dict[str, int] = {}
    for kind in found:
        least[kind.name] = min(kind.memory_bytes, least.get(kind.name, kind.memory_bytes))
    return tuple(replace(kind, memory_bytes=least[kind.name]) for kind in found)


def _cluster(nvml: Any, gpus: list[_Gpu]) -> Cluster:
    devices = _kinds(nvml, gpus)
    levels, pairs = gpu_links(nvml, [gpu.handle for gpu in gpus])
    return Cluster(name="local", devices=devices, levels=levels, pairs=pairs, source="NVML")


def _kind(nvml: Any, handle: Any) -> DeviceKind:
    """The catalogue's kind with this device's memory; for an unlisted device, a kind from NVML's own
    figures."""
    name = text_of(nvml.nvmlDeviceGetName(handle))
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    known = kind_by_nvml_name(name)
    if known is not None:
        return replace(known, memory_bytes=memory)
    try:
        cores = nvml.nvmlDeviceGetNumGpuCores(handle)
        peak = 2.0 * cores * nvml.nvmlDeviceGetMaxClockInfo(handle, 1) * 1e6  # 1: NVML_CLOCK_SM, in MHz
        memory_clock = nvml.nvmlDeviceGetMaxClockInfo(handle, 2) * 1e6  # 2: NVML_CLOCK_MEM
        bandwidth = 2.0 * memory_clock * nvml.nvmlDeviceGetMemoryBusWidth(handle) / 8
    except nvml.NVMLError as error:
        raise ClusterError(
            f"GPU '{name}' is not in the catalogue and NVML does not tell its speed ({error});"
            " describe it in a cluster file with a device kind of its own"
        ) from None
    logger.warning("GPU '%s' is not in the catalogue; its speed is taken from NVML (cores x clock)", name)
    return DeviceKind(
        name=named_kind(name),
        type="cuda",
        memory_bytes=memory,
        flops={"float32": peak},
        memory_bandwidth=bandwidth,
        source="NVML: cores x clock, bus width x memory clock",
    )
