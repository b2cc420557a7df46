"""The links between GPUs, read through NVML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tensoropt.cluster.devices import Link
from tensoropt.cluster.hardware import Level
from tensoropt.cluster.pairs import all_pairs, levels_from_pairs

# NVML's common-ancestor levels, in the notation of `nvidia-smi topo -m`.
_ANCESTORS = ((0, "PIX"), (10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS"))
# Usable share of a PCIe link's bandwidth, and latency per hop, by the path between two devices. PIX accounts
# for packet overhead only; the others are estimates that `measure-links` replaces.
_PCIE_PATHS = {
    "PIX": (0.82, 5.7e-6),
    "PXB": (0.80, 6.0e-6),
    "PHB": (0.70, 6.5e-6),
    "NODE": (0.63, 7.0e-6),
    "SYS": (0.50, 9.0e-6),
}
_PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
# One NVLink, each way, by generation (NVML's link version); from the data sheets of P100, V100, A100, H100,
# B200.
_NVLINK_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
_NVLINK_LATENCY_S = 3.4e-6
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_MAX_NVLINKS = 18


def gpu_links(nvml: Any, handles: Sequence[Any]) -> tuple[tuple[Level, ...], dict[tuple[int, int], Link]]:
    """The link levels between GPUs, and the links of single pairs that differ from their level's.

    Args:
        nvml: an object with pynvml's functions, initialised.
        handles: the GPUs' handles, in rank order.
    """
    if len(handles) == 1:
        return (), {}
    neighbours = [_nvlinks(nvml, handle) for handle in handles]
    bus_ids = [_bus_id(nvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
    # With an NVSwitch every pair has the full bandwidth of a device's wires: one level, no pairs.
    if all("switch" in links for links in neighbours):
        # The smallest wire count, because a ring is as fast as its slowest device.
        count, version = min(links["switch"] for links in neighbours)
        switch = Link(
            name=f"NV{count}",
            latency_s=_NVLINK_LATENCY_S,
            bandwidth_bytes_per_s=count * _NVLINK_BYTES_PER_S.get(version, 25e9),
            source=f"NVML: {count} NVLinks (version {version}) to a switch",
        )
        level = Level(name="gpu", size=len(handles), link=switch)
        return (level,), {}
    pairs = {}
    for low, high in all_pairs(len(handles)):
        wires = neighbours[low].get(bus_ids[high])
        pairs[low, high] = _nvlink(*wires) if wires else _pcie(nvml, handles[low], handles[high])
    levels = _levels(pairs, neighbours, bus_ids)
    # If all pairs are alike, the level already describes them.
    alike = len({(p.name, p.bandwidth_bytes_per_s) for p in pairs.values()}) == 1
    return levels, {} if alike else pairs


def _levels(
    pairs: dict[tuple[int, int], Link], neighbours: list[dict[str, tuple[int, int]]], bus_ids: list[str]
) -> tuple[Level, ...]:
    """One level if the NVLinks join all devices (a cube mesh), otherwise the blocks of the pair list."""
    if _connected(neighbours, bus_ids):
        total = [
            sum(
                count * _NVLINK_BYTES_PER_S.get(version, 25e9)
                for peer, (count, version) in links.items()
                if peer in bus_ids
            )
            for links in neighbours
        ]
        mesh = Link(
            name="NVLink-mesh",
            latency_s=_NVLINK_LATENCY_S,
            # Several concurrent rings use all wires of a device (costs.communication.pair_ring_bandwidth).
            bandwidth_bytes_per_s=min(total),
            source="NVML: sum of one device's NVLinks to the others",
        )
        return (Level(name="gpu", size=len(bus_ids), link=mesh),)
    return levels_from_pairs(pairs, len(bus_ids), "gpu")


def _connected(neighbours: list[dict[str, tuple[int, int]]], bus_ids: list[str]) -> bool:
    reached, frontier = {0}, [0]
    while frontier:
        current = frontier.pop()
        for other, bus_id in enumerate(bus_ids):
            if other not in reached and bus_id in neighbours[current]:
                reached.add(other)
                frontier.append(other)
    return len(reached) == len(bus_ids)


def _nvlinks(nvml: Any, handle: Any) -> dict[str, tuple[int, int]]:
    """Active NVLinks, keyed by the bus id of the other end (``switch`` for NVSwitch): (count, version)."""
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


def _nvlink(count: int, version: int) -> Link:
    return Link(
        name=f"NV{count}",
        latency_s=_NVLINK_LATENCY_S,
        bandwidth_bytes_per_s=count * _NVLINK_BYTES_PER_S.get(version, 25e9),
        source=f"NVML: {count} NVLinks (version {version})",
        dedicated=True,
    )


def _pcie(nvml: Any, first: Any, second: Any) -> Link:
    try:
        ancestor = int(nvml.nvmlDeviceGetTopologyCommonAncestor(first, second))
    except nvml.NVMLError:
        # Assumption if NVML does not report the path: the slowest one.
        ancestor = 50
    path = next(name for level, name in reversed(_ANCESTORS) if ancestor >= level)
    generation = min(
        _or(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, device, 3) for device in (first, second)
    )
    width = min(_or(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, device, 16) for device in (first, second))
    share, latency = _PCIE_PATHS[path]
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
    """A PCI bus id in one canonical form: NVML pads the domain to 4 or 8 digits depending on the call."""
    domain, _, rest = text_of(value).lower().strip("\x00").partition(":")
    return f"{int(domain, 16):x}:{rest}"


def text_of(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
