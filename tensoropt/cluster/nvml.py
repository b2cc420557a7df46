"""The GPUs of this machine and their links, read through NVML (package ``nvidia-ml-py``)."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from tensoropt.cluster.catalog import kind_by_nvml_name, named_kind
from tensoropt.cluster.hardware import Cluster, DeviceKind, Level, Link
from tensoropt.errors import ClusterError
from tensoropt.units import counted


def levels_from_pairs(
    pairs: Mapping[tuple[int, int], Link], device_count: int, name: str
) -> tuple[Level, ...]:
    """Return the levels that the links of all pairs show: nested blocks of ranks with faster links inside
    than outside. Each level's link is its slowest one; without such blocks there is one level."""

    def slowest(links: list[Link]) -> Link:
        return min(links, key=lambda link: (link.bandwidth_bytes_per_s, -link.latency_s))

    blocks = [1]
    for block in range(2, device_count):
        # Blocks nest and fill the cluster, because ranks are numbered row-major over the levels.
        if device_count % block or block % blocks[-1]:
            continue
        speeds: dict[bool, list[float]] = {True: [], False: []}
        for (low, high), link in pairs.items():
            speeds[low // block == high // block].append(link.bandwidth_bytes_per_s)
        # Strictly faster inside: equal links show no level.
        if min(speeds[True]) > max(speeds[False]):
            blocks.append(block)
    blocks.append(device_count)
    levels = []
    for depth, (inner, outer) in enumerate(pairwise(blocks)):
        crossing = [
            link
            for (low, high), link in pairs.items()
            if low // outer == high // outer and low // inner != high // inner
        ]
        of_depth = name if depth == 0 else f"{name}_group{depth}"
        levels.append(Level(name=of_depth, size=outer // inner, link=slowest(crossing)))
    return tuple(reversed(levels))


def all_pairs(device_count: int) -> list[tuple[int, int]]:
    """Return every ``(low, high)`` pair of ranks."""
    return list(combinations(range(device_count), 2))


# By NVML's common-ancestor level of two devices: the path in the notation of `nvidia-smi topo -m`, the usable
# share of a PCIe link's bandwidth, and the latency per hop. PIX accounts for packet overhead only; the others
# are estimates that `measure links` replaces.
_PCIE_PATHS = {
    0: ("PIX", 0.82, 5.7e-6),
    10: ("PIX", 0.82, 5.7e-6),
    20: ("PXB", 0.80, 6.0e-6),
    30: ("PHB", 0.70, 6.5e-6),
    40: ("NODE", 0.63, 7.0e-6),
    50: ("SYS", 0.50, 9.0e-6),
}
_PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
# One NVLink, each way, by generation (NVML's link version); from the data sheets of P100, V100, A100, H100,
# B200.
_NVLINK_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
_NVLINK_LATENCY_S = 3.4e-6
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_MAX_NVLINKS = 18


def _gpu_links(nvml: Any, handles: Sequence[Any]) -> tuple[tuple[Level, ...], dict[tuple[int, int], Link]]:
    if len(handles) == 1:
        return (), {}
    neighbours = [_nvlinks(nvml, handle) for handle in handles]
    bus_ids = [_bus_id(nvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
    # With an NVSwitch every pair has the full bandwidth of a device's wires: one level, no pairs.
    if all("switch" in links for links in neighbours):
        # The smallest wire count, because a ring is as fast as its slowest device.
        least = min(links["switch"] for links in neighbours)
        return (Level(name="gpu", size=len(handles), link=_nvlink(*least, switched=True)),), {}
    pairs = {}
    for low, high in all_pairs(len(handles)):
        wires = neighbours[low].get(bus_ids[high])
        pairs[low, high] = _nvlink(*wires) if wires else _pcie(nvml, handles[low], handles[high])
    levels = levels_from_pairs(pairs, len(handles), "gpu")
    # If all pairs are alike, the level already describes them.
    alike = len({(p.name, p.bandwidth_bytes_per_s) for p in pairs.values()}) == 1
    return levels, {} if alike else pairs


def _nvlinks(nvml: Any, handle: Any) -> dict[str, tuple[int, int]]:
    """Return (count, version) of a GPU's active NVLinks by the other end's bus id, or ``switch``."""
    counts: Counter[str] = Counter()
    versions: dict[str, int] = {}
    for index in range(_MAX_NVLINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, index):
                continue
            try:
                is_switch = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, index) == _SWITCH
            except nvml.NVMLError:
                is_switch = False
            peer = (
                "switch" if is_switch else _bus_id(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, index).busId)
            )
            version = int(nvml.nvmlDeviceGetNvLinkVersion(handle, index))
        except nvml.NVMLError:
            break  # no such link: this device has no more links
        counts[peer] += 1
        versions[peer] = version
    return {peer: (number, versions[peer]) for peer, number in counts.items()}


def _nvlink(count: int, version: int, *, switched: bool = False) -> Link:
    return Link(
        name=f"NV{count}",
        latency_s=_NVLINK_LATENCY_S,
        bandwidth_bytes_per_s=count * _NVLINK_BYTES_PER_S.get(version, 25e9),
        source=f"NVML: {count} NVLinks (version {version}){' to a switch' * switched}",
        dedicated=not switched,
    )


def _pcie(nvml: Any, first: Any, second: Any) -> Link:
    try:
        ancestor = int(nvml.nvmlDeviceGetTopologyCommonAncestor(first, second))
    except nvml.NVMLError:
        # Assumption if NVML does not report the path: the slowest one.
        ancestor = 50
    path, share, latency = _PCIE_PATHS[ancestor]
    generation = min(
        _or(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, device, 3) for device in (first, second)
    )
    width = min(_or(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, device, 16) for device in (first, second))
    return Link(
        name=path,
        latency_s=latency,
        bandwidth_bytes_per_s=share * width * _PCIE_LANE_BYTES_PER_S.get(generation, 7.563e9),
        source=f"NVML: {path}, PCIe {generation} x{width}",
    )


def _or(nvml: Any, function: Any, handle: Any, default: int) -> int:
    try:
        return int(function(handle))
    except nvml.NVMLError:
        return default


def _bus_id(value: bytes | str) -> str:
    """Return a PCI bus id in one form; NVML pads the domain to 4 or 8 digits depending on the call."""
    domain, _, rest = _text_of(value).lower().strip("\x00").partition(":")
    return f"{int(domain, 16):x}:{rest}"


def _text_of(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


_logger = logging.getLogger(__name__)


def gpu_cluster(nvml: Any = None) -> Cluster | None:
    """Return the GPUs of this machine as a cluster; None if NVML is missing or sees none.

    Whole GPUs are used, including busy ones. GPUs that are partitioned into MIG instances are left out, with
    a warning.

    Args:
        nvml: an object with pynvml's functions; the module itself by default.
    """
    with _opened(nvml) as opened:
        visible = [] if opened is None else _visible(opened)
        gpus = [gpu for gpu in visible if not _partitioned(opened, gpu)]
        if left := len(visible) - len(gpus):
            words = "%s with MIG instances left out; describe an instance in a cluster file to explore for it"
            _logger.warning(words, counted(left, "GPU"))
        if not gpus:
            return None
        kinds = [_kind(opened, gpu) for gpu in gpus]
        # GPUs of the same name share one kind, with the smallest memory among them.
        least = {kind.name: min(k.memory_bytes for k in kinds if k.name == kind.name) for kind in kinds}
        levels, pairs = _gpu_links(opened, gpus)
        return Cluster(
            name="local",
            devices=tuple(replace(kind, memory_bytes=least[kind.name]) for kind in kinds),
            levels=levels,
            pairs=pairs,
            source="NVML",
        )


@contextlib.contextmanager
def _opened(nvml: Any) -> Iterator[Any]:
    """Yield NVML, open during the block; None if NVML is missing or has no driver."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            yield None
            return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        _logger.debug("NVML is not usable here: %s", error)
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _visible(nvml: Any) -> list[Any]:
    """Return NVML's handles of the GPUs that ``CUDA_VISIBLE_DEVICES`` selects, by number or UUID prefix."""
    gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return gpus
    chosen: list[Any] = []
    for item in (part.strip() for part in variable.split(",")):
        if item.isdigit() and int(item) < len(gpus):
            chosen.append(gpus[int(item)])
        elif item.startswith("GPU-"):
            chosen += [g for g in gpus if _text_of(nvml.nvmlDeviceGetUUID(g)).startswith(item)][:1]
        else:
            break  # as in CUDA: an invalid entry hides itself and all that follow
    return chosen


def _partitioned(nvml: Any, gpu: Any) -> bool:
    """Return whether a GPU is partitioned into MIG instances, which cannot communicate with each other."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(gpu)[0])
    except nvml.NVMLError:  # it cannot be
        return False


def _kind(nvml: Any, handle: Any) -> DeviceKind:
    """Return the catalogue's device kind with this GPU's memory; NVML's own figures if it is unlisted."""
    name = _text_of(nvml.nvmlDeviceGetName(handle))
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    kind = kind_by_nvml_name(name)
    if kind is not None:
        return replace(kind, memory_bytes=memory)
    try:
        cores = nvml.nvmlDeviceGetNumGpuCores(handle)
        peak = 2.0 * cores * nvml.nvmlDeviceGetMaxClockInfo(handle, 1) * 1e6  # 1: NVML_CLOCK_SM, in MHz
        memory_clock = nvml.nvmlDeviceGetMaxClockInfo(handle, 2) * 1e6  # 2: NVML_CLOCK_MEM
        bandwidth = 2.0 * memory_clock * nvml.nvmlDeviceGetMemoryBusWidth(handle) / 8
    except nvml.NVMLError as error:
        raise ClusterError(
            f"GPU '{name}' is not in the catalogue and NVML does not report its speed ({error}); describe "
            "it in a cluster file, as a device kind"
        ) from None
    _logger.warning("GPU '%s' is not in the catalogue; its speed is taken from NVML (cores x clock)", name)
    return DeviceKind(
        name=named_kind(name),
        type="cuda",
        memory_bytes=memory,
        flops={"float32": peak},
        memory_bandwidth=bandwidth,
        source="NVML: cores x clock, bus width x memory clock",
    )
